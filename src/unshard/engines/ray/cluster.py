"""The driver of jobs on the nodes of a Ray cluster.

Every node that has a CPU and sees the required files has one `Actor`, which executes several jobs
concurrently. If it dies, or its node is lost, its jobs are repeated elsewhere. The driver collects
the progress of all actors, and stops all of them before it raises an error.
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

from unshard.console import counted
from unshard.engines.ray.actor import Actor, Done, NodeView, StoppedError, Task
from unshard.errors import OutputError, UnshardError
from unshard.progress import Advanced, Chosen, Listener, Warned
from unshard.signals import uninterrupted
from unshard.stores.nodes.connection import check_version, connect, disconnecting, host_of, unusable
from unshard.stores.nodes.store import LostNodeError, lost_node

_LOOK_S = 1.0
_VISIBLE_S = 30.0  # network file systems may show new files of other machines later
_STOPPING_S = 60.0
_PATIENCE_S = 5.0  # until the user is told about the wait
_MOST_DEATHS = 3
_OPTION = "⟦--engine ray⟧"


@contextmanager
def connected() -> Iterator["Cluster"]:
    """Connect to the cluster at RAY_ADDRESS, or else to this machine's cluster.

    An existing connection is used, and stays open.

    Raises:
        UsageError: Ray is not installed, or there is no cluster.
    """
    with disconnecting():
        yield Cluster(connect(_OPTION))


@dataclass(frozen=True, slots=True)
class ClusterJobs:
    """Jobs for a cluster.

    Attributes:
        task: executes the jobs.
        jobs: their numbers, the longest first.
        needed: the files that a node must see, by directory; without files, the directory itself.
        slots: number of concurrent jobs on a node.
        cpus: number of CPUs to reserve on a node; all of them if it has fewer.
        done: called with job, attempt and result, once for each job.
        lost: called with job and attempt when an attempt is lost, which may have left files.
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
class _Node:
    """A node, and its actor.

    Attributes:
        node: Ray's id of the node.
        host: its name.
        actor: a handle of an `Actor`.
        opened: when the actor was requested.
        is_ready: whether it accepts jobs.
        is_lost: whether it has died.
        running: its current jobs, by attempt.
    """

    node: str
    host: str
    actor: Any
    opened: float
    is_ready: bool = False
    is_lost: bool = False
    running: dict[int, int] = field(default_factory=dict)


class Cluster:
    """A cluster to which this process is connected."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray

    def nodes(self) -> list[dict[str, Any]]:
        """Return the nodes that are alive and have a CPU for jobs."""
        nodes = self.ray.nodes()
        return [node for node in nodes if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]

    def run(self, work: ClusterJobs, listener: Listener) -> None:
        """Execute jobs, and return when all are done.

        Raises:
            UnshardError: the task raised it, or no node can execute it.
            OSError: the task raised it.
        """
        running = _Running(self, work, listener)
        with ThreadPoolExecutor(1, "unshard-ray") as driver:  # so that a signal can end the wait
            try:
                driver.submit(running.to_the_end).result()
            except BaseException:
                running.stop()
                with uninterrupted():
                    driver.shutdown()
                raise


class _Running:
    """Running jobs. All methods except `stop` are for one thread."""

    def __init__(self, cluster: Cluster, work: ClusterJobs, listener: Listener) -> None:
        self._cluster, self._ray = cluster, cluster.ray
        self._work = work
        self._listener = listener
        self._task = self._ray.put(work.task)  # sent once to each node
        self._waiting = deque(work.jobs)
        self._left = set(work.jobs)
        self._attempts = 0
        self._deaths: Counter[int | str] = Counter()  # by job, and by node
        self._progress: Counter[int] = Counter()  # reported bytes, by job
        self._nodes: list[_Node] = []
        self._calls: dict[Any, tuple[_Node, Callable[[Any], None]]] = {}  # without answers yet
        self._lacking: dict[str, str] = {}
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Make `to_the_end` end soon."""
        self._stopped.set()

    def to_the_end(self) -> None:
        """Execute all jobs."""
        try:
            for node in self._cluster.nodes():
                self._open(node)
            report_at = time.monotonic() + _PATIENCE_S
            while self._left:
                self._assign()
                self._take_answers()
                if time.monotonic() > report_at and not any(n.is_ready for n in self._nodes):
                    report_at = inf
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
            max_concurrency=self._work.slots + 3,  # also for `written` and `stop` during jobs
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        host = node["NodeManagerHostname"]
        self._nodes.append(_Node(node["NodeID"], host, kind.remote(), time.monotonic()))
        self._look(self._nodes[-1])

    def _look(self, node: _Node) -> None:
        call = node.actor.look.remote(str(Path.cwd()), self._work.needed)
        self._calls[call] = node, partial(self._on_view, node)

    def _take_answers(self) -> None:
        """Handle the answers of actors, or wait a little for one."""
        if self._stopped.is_set():
            raise StoppedError
        errors = self._ray.exceptions
        lost = errors.RayActorError, errors.ActorUnschedulableError
        ready, _ = self._ray.wait(list(self._calls), timeout=_LOOK_S)
        for call in ready:
            node, handle = self._calls.pop(call)
            try:
                answer = self._ray.get(call)
            except lost as error:
                self._lose(node, error)
            else:
                handle(answer)

    def _on_view(self, node: _Node, view: NodeView) -> None:
        check_version(_OPTION, node.host, view.version)
        if not view.lacking:
            self._calls[node.actor.take.remote(self._task)] = node, partial(self._on_ready, node)
        elif time.monotonic() - node.opened < _VISIBLE_S:
            self._look(node)
        else:
            self._lacking[node.host] = view.lacking
            self._warn(f"node {node.host} does not see {view.lacking}, and is left out")
            self._ray.kill(node.actor)

    def _on_ready(self, node: _Node, _: None) -> None:
        node.is_ready = True
        self._on_progress(node, {})

    def _assign(self) -> None:
        """Assign jobs, each to the node with the fewest."""
        while self._waiting:
            free = [n for n in self._nodes if n.is_ready and len(n.running) < self._work.slots]
            if not free:
                break
            node = min(free, key=lambda n: len(n.running))
            job, attempt = self._waiting.popleft(), self._attempts
            self._attempts += 1
            node.running[attempt] = job
            call = node.actor.do.remote(job, attempt)
            self._calls[call] = node, partial(self._on_done, node, attempt)
        if not self._calls:
            raise self._no_node()

    def _no_node(self) -> UnshardError:
        if self._lacking:
            reasons = (f"{host} does not see {path}" for host, path in self._lacking.items())
            return OutputError(
                f"⟦--engine ray⟧: no node of the cluster can do it: {', '.join(reasons)}",
                hint="checkpoint and output must be on a file system that the nodes share, under "
                "the same paths",
            )
        return OutputError("⟦--engine ray⟧: the cluster has no node with a CPU left")

    def _on_progress(self, node: _Node, written: Mapping[int, int]) -> None:
        for attempt, count in written.items():
            if attempt in node.running:
                self._report(node.running[attempt], count)
        self._calls[node.actor.written.remote()] = node, partial(self._on_progress, node)

    def _report(self, job: int, written: int) -> None:
        """Report the progress of a job, without bytes that a lost attempt has reported already."""
        more = written - self._progress[job]
        if more > 0:
            self._progress[job] = written
            self._listener(Advanced(more))

    def _on_done(self, node: _Node, attempt: int, done: Done) -> None:
        job = node.running.pop(attempt)
        if isinstance(done.answer, LostNodeError) and done.answer.node in self._work.alone:
            lost = done.answer.node
            raise lost_node(lost, host_of(self._ray, lost), self._work.alone[lost])
        if isinstance(done.answer, UnshardError):
            done.answer.hint += f"{' ' * bool(done.answer.hint)}(on node {node.host})"
        if isinstance(done.answer, BaseException):
            raise done.answer
        self._work.done(job, attempt, done.answer)
        self._report(job, done.written)
        self._left.discard(job)

    def _lose(self, node: _Node, error: Any) -> None:
        """Repeat the jobs of a dead actor, elsewhere or in a new actor on the same node."""
        if node.is_lost:
            return
        node.is_lost, node.is_ready = True, False
        if getattr(error, "actor_init_failed", False):
            raise unusable(_OPTION, node.host, error) from error
        self._ray.kill(node.actor)  # it may be alive but unreachable
        alive = {each["NodeID"]: each for each in self._cluster.nodes()}.get(node.node)
        if alive is None and node.node in self._work.alone:
            raise lost_node(node.node, node.host, self._work.alone[node.node]) from error
        if node.running:
            event = "is lost" if alive is None else "lost a process"
            jobs = counted(len(node.running), "part")
            self._warn(f"node {node.host} {event}: {jobs} of the work are done again")
        for attempt, job in node.running.items():
            self._work.lost(job, attempt)
            self._waiting.appendleft(job)
            self._count_death(job, node, error)
        node.running.clear()
        if alive is not None:
            self._count_death(node.node, node, error)
            self._open(alive)

    def _count_death(self, job_or_node: int | str, node: _Node, error: Exception) -> None:
        self._deaths[job_or_node] += 1
        if self._deaths[job_or_node] == _MOST_DEATHS:
            raise OutputError(
                f"⟦--engine ray⟧: processes die repeatedly, the last one on node {node.host}",
                hint="if they were killed for memory, give less ⟦--memory⟧ and fewer ⟦--workers⟧",
            ) from error

    def _warn(self, text: str) -> None:
        self._listener(Warned(text))

    def _close(self) -> None:
        """Stop all attempts, so that none of them writes after the cleanup."""
        running = [call for call, (node, _) in self._calls.items() if node.running]
        if running:
            for node in self._nodes:
                if node.running:
                    node.actor.stop.remote()
            self._ray.wait(running, num_returns=len(running), timeout=_STOPPING_S)
        for node in self._nodes:
            self._ray.kill(node.actor)
