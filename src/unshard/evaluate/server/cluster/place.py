"""The process of an attempt whose evaluator runs on a Ray cluster: places it, watches it, ends it.

`python -m unshard.evaluate.server.cluster.place` runs on the server's machine, in the attempt's
directory, under its supervisor. It prints what the evaluator prints, which becomes the log of the
attempt, and records how it ended once nothing of it is left. The actor belongs to this process: if
this process is killed, Ray ends the actor, and what the actor had started ends with it. The next
attempt at the job makes sure of that before it starts anything.
"""

import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from unshard._version import __version__
from unshard.evaluate.server.cluster.assignment import (
    ENDED_NAME,
    KILLED,
    LOST,
    NODE,
    NOT_PLACED,
    Assignment,
    read_assignment,
    read_node,
    record_node,
)
from unshard.evaluate.server.cluster.seat import Found, News, Seat, clear
from unshard.evaluate.server.processes.launching import python_path
from unshard.evaluate.server.processes.supervise import STOPS, Exit, write_exit
from unshard.showing import counted

_NAMESPACE = "unshard-eval"
_POLL_S = 0.5
_VISIBLE_S = 90.0  # network file systems show new files of other machines after a minute at most


class _EndError(Exception):
    """The attempt ends like this before its evaluator has started."""

    def __init__(self, done: Exit) -> None:
        self.done = done
        super().__init__(done.error)


def main() -> int:
    """Run the evaluator that this process was started for on a node."""
    stops: list[int] = []
    assignment = read_assignment()
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]  # a file
    try:
        _connect(assignment.address, stops)
        placing = _Placing(assignment, lambda: bool(stops))
        placing.clear_earlier()
        done = placing.run()
    except _EndError as ended:
        done = ended.done
    write_exit(assignment.attempt / NODE, done, lambda: bool(stops), name=ENDED_NAME)
    return 0


def _connect(address: str, stops: list[int]) -> None:
    """Connect to the cluster; signals are noted from now on, and end nothing by themselves."""
    import ray

    try:
        ray.init(
            address=address,
            namespace=_NAMESPACE,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={"env_vars": {"PYTHONPATH": python_path()}},
        )
    except Exception as error:
        raise _EndError(_hindered(f"the Ray cluster {address} cannot be used: {error}")) from error
    for number in STOPS:  # Ray has replaced what was there
        signal.signal(number, lambda number, _frame: stops.append(number))


class _Placing:
    """An evaluator, on its way to a node and on it."""

    def __init__(self, assignment: Assignment, is_stopped: Callable[[], bool]) -> None:
        import ray

        self._ray: Any = ray
        self._assignment = assignment
        self._is_stopped = is_stopped
        self._seat: Any = None

    def clear_earlier(self) -> None:
        """End what earlier attempts at the job, whose own process was killed, may have left."""
        attempt = self._assignment.attempt
        for other in sorted(set(attempt.parent.iterdir()) - {attempt}):
            if (node := read_node(other)) is not None:
                self._clear(node, other)

    def run(self) -> Exit:
        """Run the evaluator to its end, and return it when nothing of it is left."""
        errors = self._ray.exceptions
        kind = self._ray.remote(Seat).options(
            name=self._assignment.name,
            num_cpus=1,
            num_gpus=self._assignment.gpus,
            max_restarts=0,
        )
        try:
            self._seat = kind.remote()
            found = self._find_node()
        except (errors.RayError, ValueError) as error:
            raise _EndError(_hindered(f"Ray could not place the evaluator: {error}")) from error
        record_node(self._assignment.attempt, found.node)  # from now on something may run there
        try:
            self._ask(partial(self._seat.start.remote, self._assignment, found.gpus))
            done = self._follow()
        except errors.RayError as error:
            is_lost = not self._is_alive(found.node)
            self._clear(found.node, self._assignment.attempt)
            why = f"node {found.host} is lost" if is_lost else f"its Ray actor ended: {error}"
            done = Exit(LOST if is_lost else KILLED, 1, why, 0.0)
        self._ray.kill(self._seat)
        return done

    def _find_node(self) -> Found:
        """Wait until the actor has its place, and check what it finds there."""
        order, model = self._assignment.order, self._assignment.model
        looking = self._seat.look.remote([order.directory, model])
        is_told = False
        while not self._ray.wait([looking], timeout=_POLL_S)[0]:
            if self._is_stopped():
                self._ray.kill(self._seat)
                raise _EndError(Exit("stopped", -signal.SIGTERM, "", 0.0))
            if not is_told:
                self._tell(f"waiting for {self._wanted()} on a node of the Ray cluster")
                is_told = True
        found: Found = self._ray.get(looking)
        if found.missing:
            raise _EndError(
                _hindered(
                    f"node {found.host} does not have {found.missing}: the server's work directory "
                    "and the checkpoints must be on a disk that all nodes see under the same path"
                )
            )
        if found.version != __version__:
            why = f"node {found.host} has unshard {found.version}, the server {__version__}"
            raise _EndError(_hindered(why))
        where = f"GPU {', '.join(found.gpus)}" if found.gpus else "the CPU"
        self._tell(f"node {found.host}, {where}")
        return found

    def _wanted(self) -> str:
        gpus = self._assignment.gpus
        if not gpus:
            return "a CPU"
        most = max((node["Resources"].get("GPU", 0) for node in self._nodes()), default=0)
        lacking = f", which no node of the cluster has (the most is {most:g})"
        return counted(gpus, "GPU") + (lacking if most < gpus else "")

    def _follow(self) -> Exit:
        """Print what the evaluator prints, until it has ended."""
        offset, is_asked = 0, False
        while True:
            if self._is_stopped() and not is_asked:
                self._ask(self._seat.stop.remote)
                is_asked = True
            news: News = self._ask(partial(self._seat.news.remote, offset))
            sys.stdout.write(news.text)
            sys.stdout.flush()
            offset = news.offset
            if news.exit is not None and not news.text:
                _await_files(news.files, self._is_stopped)
                return news.exit
            if not news.text:
                time.sleep(_POLL_S)

    def _ask(self, call: Callable[[], Any]) -> Any:
        """Return an answer of the actor; ask again where the network lost the question."""
        while True:
            try:
                return self._ray.get(call())
            except self._ray.exceptions.ActorUnavailableError:
                time.sleep(_POLL_S)

    def _clear(self, node: str, attempt: Path) -> None:
        """Return when nothing of an attempt is left on a node, or the node is lost."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        clearing = self._ray.remote(clear).options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        while self._is_alive(node):
            try:
                order = self._assignment.order
                self._ray.get(clearing.remote(str(attempt / NODE), order.grace_s))
            except self._ray.exceptions.RayError:
                time.sleep(_POLL_S)
            else:
                return

    def _is_alive(self, node: str) -> bool:
        return any(one["NodeID"] == node for one in self._nodes())

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _tell(self, what: str) -> None:
        sys.stdout.write(f"[unshard: {what}]\n")
        sys.stdout.flush()


def _hindered(why: str) -> Exit:
    return Exit(NOT_PLACED, 1, why, 0.0)


def _await_files(files: Mapping[str, int], is_stopped: Callable[[], bool]) -> None:
    """Wait until this machine sees the files that the evaluator has left, for some time."""
    deadline = time.monotonic() + _VISIBLE_S
    while not all(map(_has_size, files, files.values())):
        if is_stopped() or time.monotonic() > deadline:
            return
        time.sleep(_POLL_S)


def _has_size(path: str, size: int) -> bool:
    try:
        return Path(path).lstat().st_size == size
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
