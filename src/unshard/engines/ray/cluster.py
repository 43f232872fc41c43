"""Jobs on the nodes of a Ray cluster, for a process that is connected with it: the driver.

On every node that has a CPU and sees what is needed there is one `Actor`, which does several jobs
at a time. If it dies, or its node is lost, what it had to do is done again elsewhere. The driver
learns the progress of all, and lets all stop before it raises an error.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from unshard.engines.ray.actor import Actor, Done, Found, StoppedError, Task
from unshard.errors import OutputError, UnshardError
from unshard.progress import Advanced, Chosen, Listener, Warned
from unshard.showing import counted
from unshard.signals import uninterrupted
from unshard.stores.nodes.connection import check_version, connect, disconnecting, host_of, unusable
from unshard.stores.nodes.store import LostNodeError, lost_node

_LOOK_S = 1.0
_VISIBLE_S = 30.0  # network file systems may show new files of other machines later
_STOPPING_S = 60.0
_PATIENCE_S = 5.0  # until it is told what is waited for
_MOST_DEATHS = 3
_OPTION = "⟦--engine ray⟧"


@contextmanager
def connected() -> Iterator["Cluster"]:
    """Connect with the cluster that RAY_ADDRESS names, or that this machine is a node of.

    A process that is connected already stays so.

    Raises:
        UsageError: Ray is not installed, or there is no cluster.
    """
    with disconnecting():
        yield Cluster(connect(_OPTION))


@dataclass(frozen=True, slots=True)
class Work:
    """Jobs for a cluster.

    Attributes:
        task: does them.
        jobs: their numbers, the longest first.
        needed: the files that a node must see, by their directories; a directory alone, too.
        slots: how many jobs a node does at a time.
        cpus: how many CPUs Ray reserves on a node, or all that it has.
        done: called with a job, an attempt and what the task returned, once for each job.
        lost: called with a job and an attempt that may have left something, and will not end.
        alone: the sources that only one node has, by Ray's id of the node.
    """

    task: Task
    jobs: Sequence[int]
    needed: Mapping[str, Sequence[str]]
    slots: int
    cpus: int
    done: Callable[[int, int, Any], None]
    lost: Callable[[int, int], None] = lambda _job, _attempt: None
    alone: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Place:
    """A node, and the actor there.

    Attributes:
        node: Ray's id of the node.
        host: its name.
        actor: a handle of an `Actor`.
        opened: when it was asked for.
        is_ready: whether it takes jobs.
        running: the jobs that it does, by their attempts.
    """

    node: str
    host: str
    actor: Any
    opened: float
    is_ready: bool = False
    is_lost: bool = False
    running: dict[int, int] = field(default_factory=dict)


class Cluster:
    """A cluster that this process is connected with."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray

    def nodes(self) -> list[dict[str, Any]]:
        """Return the nodes that are alive and have a CPU for jobs."""
        nodes = self.ray.nodes()
        return [one for one in nodes if one["Alive"] and one["Resources"].get("CPU", 0) >= 1]

    def run(self, work: Work, listener: Listener) -> None:
        """Do jobs, and return when all are done.

        Raises:
            UnshardError: as the task raised it; or no node can do it.
            OSError: likewise.
        """
        running = _Running(self, work, listener)
        with ThreadPoolExecutor(1, "unshard-ray") as driver:  # a signal can end the wait for it
            try:
                driver.submit(running.to_the_end).result()
            except BaseException:
                running.stop()
                with uninterrupted():
                    driver.shutdown()
                raise


class _Running:
    """Jobs on their way. All methods but `stop` are for one thread."""

    def __init__(self, cluster: Cluster, work: Work, listener: Listener) -> None:
        self._cluster, self._ray = cluster, cluster.ray
        self._work = work
        self._listener = listener
        self._task = self._ray.put(work.task)  # it is sent once to each node
        self._waiting = deque(work.jobs)
        self._left = set(work.jobs)
        self._attempts = 0
        self._deaths: Counter[int | str] = Counter()  # by job, and by node
        self._told: Counter[int] = Counter()
        self._places: list[_Place] = []
        self._asked: dict[Any, tuple[_Place, Callable[[Any], None]]] = {}
        self._lacking: dict[str, str] = {}
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Let `to_the_end` end soon."""
        self._stopped.set()

    def to_the_end(self) -> None:
        """Do all jobs."""
        try:
            for node in self._cluster.nodes():
                self._open(node)
            told_at = time.monotonic() + _PATIENCE_S
            while self._left:
                self._assign()
                self._take_answers()
                if time.monotonic() > told_at and not any(one.is_ready for one in self._places):
                    told_at = inf
                    cpus = counted(self._work.cpus, "CPU")
                    self._listener(Chosen(f"waiting for {cpus} on a node of the Ray cluster"))
        finally:
            self._close()

    def _open(self, node: Mapping[str, Any]) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        cpus = min(self._work.cpus, int(node["Resources"]["CPU"]))
        kind = self._ray.remote(Actor).options(
            num_cpus=cpus,
            max_restarts=0,
            max_concurrency=self._work.slots + 3,  # while it works it is asked, and told to stop
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        place = _Place(node["NodeID"], node["NodeManagerHostname"], kind.remote(), time.monotonic())
        self._places.append(place)
        self._look(place)

    def _look(self, place: _Place) -> None:
        found = place.actor.look.remote(str(Path.cwd()), self._work.needed)
        self._ask(place, found, partial(self._found, place))

    def _ask(self, place: _Place, answer: Any, take: Callable[[Any], None]) -> None:
        self._asked[answer] = place, take

    def _take_answers(self) -> None:
        """Take what the actors have answered, or wait a little for an answer."""
        if self._stopped.is_set():
            raise StoppedError
        errors = self._ray.exceptions
        lost = errors.RayActorError, errors.ActorUnschedulableError
        ready, _ = self._ray.wait(list(self._asked), timeout=_LOOK_S)
        for one in ready:
            place, take = self._asked.pop(one)
            try:
                answer = self._ray.get(one)
            except lost as error:
                self._lose(place, error)
            else:
                take(answer)

    def _found(self, place: _Place, found: Found) -> None:
        check_version(_OPTION, place.host, found.version)
        if not found.lacking:
            self._ask(place, place.actor.take.remote(self._task), partial(self._taken, place))
        elif time.monotonic() - place.opened < _VISIBLE_S:
            self._look(place)
        else:
            self._lacking[place.host] = found.lacking
            self._warn(f"node {place.host} does not see {found.lacking}, and is left out")
            self._ray.kill(place.actor)

    def _taken(self, place: _Place, _: None) -> None:
        place.is_ready = True
        self._ask(place, place.actor.written.remote(), partial(self._written, place))

    def _assign(self) -> None:
        """Give jobs to the nodes that have the fewest."""
        while self._waiting:
            free = [
                one for one in self._places if one.is_ready and len(one.running) < self._work.slots
            ]
            if not free:
                break
            place = min(free, key=lambda one: len(one.running))
            job, attempt = self._waiting.popleft(), self._attempts
            self._attempts += 1
            place.running[attempt] = job
            self._ask(
                place, place.actor.do.remote(job, attempt), partial(self._done, place, attempt)
            )
        if not self._asked:
            raise self._no_node()

    def _no_node(self) -> UnshardError:
        if self._lacking:
            listed = (f"{host} does not see {path}" for host, path in self._lacking.items())
            return OutputError(
                f"⟦--engine ray⟧: no node of the cluster can do it: {', '.join(listed)}",
                hint="checkpoint and output must be on a file system that the nodes share, under "
                "the same paths",
            )
        return OutputError("⟦--engine ray⟧: no node with a CPU is left of the cluster")

    def _written(self, place: _Place, written: Mapping[int, int]) -> None:
        for attempt, count in written.items():
            if attempt in place.running:
                self._tell(place.running[attempt], count)
        self._ask(place, place.actor.written.remote(), partial(self._written, place))

    def _tell(self, job: int, written: int) -> None:
        """Tell how far a job is; what was told of an attempt that is lost is not told again."""
        more = written - self._told[job]
        if more > 0:
            self._told[job] = written
            self._listener(Advanced(more))

    def _done(self, place: _Place, attempt: int, done: Done) -> None:
        job = place.running.pop(attempt)
        if isinstance(done.answer, LostNodeError) and done.answer.node in self._work.alone:
            lost = done.answer.node
            raise lost_node(lost, host_of(self._ray, lost), self._work.alone[lost])
        if isinstance(done.answer, UnshardError):
            done.answer.hint += f"{' ' * bool(done.answer.hint)}(on node {place.host})"
        if isinstance(done.answer, BaseException):
            raise done.answer
        self._work.done(job, attempt, done.answer)
        self._tell(job, done.written)
        self._left.discard(job)

    def _lose(self, place: _Place, error: Any) -> None:
        """Have what a process had to do, which has died, done elsewhere, or there by another."""
        if place.is_lost:
            return
        place.is_lost, place.is_ready = True, False
        if getattr(error, "actor_init_failed", False):
            raise unusable(_OPTION, place.host, error) from error
        self._ray.kill(place.actor)  # perhaps it only cannot be reached
        alive = {one["NodeID"]: one for one in self._cluster.nodes()}.get(place.node)
        if alive is None and place.node in self._work.alone:
            raise lost_node(place.node, place.host, self._work.alone[place.node]) from error
        if place.running:
            what = "is lost" if alive is None else "lost a process"
            jobs = counted(len(place.running), "part")
            self._warn(f"node {place.host} {what}: {jobs} of the work are done again")
        for attempt, job in place.running.items():
            self._work.lost(job, attempt)
            self._waiting.appendleft(job)
            self._count_death(job, place, error)
        place.running.clear()
        if alive is not None:
            self._count_death(place.node, place, error)
            self._open(alive)

    def _count_death(self, what: int | str, place: _Place, error: Exception) -> None:
        self._deaths[what] += 1
        if self._deaths[what] == _MOST_DEATHS:
            raise OutputError(
                f"⟦--engine ray⟧: processes die at their work, the last one on node {place.host}",
                hint="if they were killed for memory, give less ⟦--memory⟧ and fewer ⟦--workers⟧",
            ) from error

    def _warn(self, text: str) -> None:
        self._listener(Warned(text))

    def _close(self) -> None:
        """Let all attempts end, so that none of them goes on with what is about to be removed."""
        going = [answer for answer, (place, _) in self._asked.items() if place.running]
        if going:
            for place in self._places:
                if place.running:
                    place.actor.stop.remote()
            self._ray.wait(going, num_returns=len(going), timeout=_STOPPING_S)
        for place in self._places:
            self._ray.kill(place.actor)
