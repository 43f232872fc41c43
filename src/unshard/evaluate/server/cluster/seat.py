"""What runs on a node of the cluster: the actor that has an evaluator's GPUs, and a cleaner.

The evaluator runs under the same supervisor as on the server's machine, and no longer than the
actor does: when the process of the actor ends, or its node is cut off from the cluster and ends it,
the supervisor ends everything. Ray kills the children of an actor, but not theirs, so the
supervisor is not its child.
"""

import os
import select
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from unshard._version import __version__
from unshard.evaluate.process import Process
from unshard.evaluate.server.cluster.assignment import KILLED, Assignment
from unshard.evaluate.server.processes.bounded_log import read_log
from unshard.evaluate.server.processes.launching import evaluator_environment, start_apart
from unshard.evaluate.server.processes.supervise import LOG_NAME, Exit, Order, read_exit
from unshard.evaluate.server.processes.table import boot_id, kill_group

_VISIBLE_S = 30.0  # a network file system may show what another machine has made later
_PAUSE_S = 0.2
# Ray sets these for its own processes.
_RAYS = ("RAY_", "OMP_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Found:
    """Where an actor is.

    Attributes:
        node: Ray's id of the node.
        host: the node's name.
        gpus: those that Ray gave the actor.
        version: of the unshard there.
        missing: a path that is needed and does not exist there; empty if all exist.
    """

    node: str
    host: str
    gpus: tuple[str, ...]
    version: str
    missing: str


@dataclass(frozen=True, slots=True)
class News:
    """What is new of an evaluator.

    Attributes:
        text: of its log.
        offset: of what follows.
        exit: how it ended, if it has; nothing of it is left then.
        files: how many bytes each of its files has, if it has ended.
    """

    text: str
    offset: int
    exit: Exit | None
    files: dict[str, int]


class Seat:
    """The actor. Every method returns soon, and may be called again if its answer was lost."""

    def __init__(self) -> None:
        self._tie: socket.socket | None = None
        self._order: Order | None = None
        self._done: Exit | None = None

    def look(self, needed: list[str]) -> Found:
        """Return where this is, and whether all of the paths that are needed exist here."""
        import ray

        deadline = time.monotonic() + _VISIBLE_S
        while missing := next((one for one in needed if not Path(one).exists()), ""):
            if time.monotonic() > deadline:
                break
            time.sleep(_PAUSE_S)
        node = ray.get_runtime_context().get_node_id()
        gpus = tuple(str(one) for one in ray.get_gpu_ids())
        return Found(node, socket.gethostname(), gpus, __version__, missing)

    def start(self, assignment: Assignment, gpus: tuple[str, ...]) -> None:
        """Start the evaluator, once."""
        if self._order is not None:
            return
        order = assignment.order
        environment = evaluator_environment(
            order.environment, program=order.command[0], gpus=gpus, directory=order.directory
        )
        kept = {
            name: value
            for name, value in environment.items()
            if name in order.environment or not name.startswith(_RAYS)
        }
        self._order = replace(order, environment=kept)
        try:
            self._tie = start_apart(self._order)
        except OSError as error:
            self._done = Exit("not started", 127, str(error), 0.0, error.errno or 0)

    def stop(self) -> None:
        """Ask the supervisor to end the evaluator."""
        if self._tie is not None:
            with suppress(OSError):  # it has ended
                self._tie.shutdown(socket.SHUT_WR)

    def news(self, offset: int) -> News:
        """Return what the evaluator has printed since an offset, and how it ended, if it has."""
        if self._order is None:
            raise RuntimeError("asked for news before the start")
        directory = Path(self._order.directory)
        if self._tie is not None and select.select([self._tie], [], [], 0)[0]:
            clear(self._order.directory, self._order.grace_s)
            killed = Exit(KILLED, 1, "the evaluator and its supervisor were killed", 0.0)
            self._done = read_exit(directory) or killed
            self._tie.close()
            self._tie = None
        bound = self._order.log_bytes
        text, offset = read_log(directory / LOG_NAME, offset, most_bytes=bound)
        files = {} if self._done is None else sizes_below(directory.parent / "output")
        return News(text, offset, self._done, files)


def clear(directory: str, grace_s: float) -> None:
    """End all processes on this machine that a directory marks, however long it takes."""
    marked = Process(0, 0, boot_id(), (), directory)
    while not kill_group(marked, grace_s=grace_s):
        sys.stderr.write(f"processes of {directory} cannot be ended\n")


def sizes_below(directory: Path) -> dict[str, int]:
    """Return how many bytes each file below a directory has; links are not followed."""
    return {
        str(Path(place, name)): Path(place, name).lstat().st_size
        for place, _, names in os.walk(directory)
        for name in names
    }
