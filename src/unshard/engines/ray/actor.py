"""The actor on a node of a Ray cluster, which executes jobs, several concurrently.

A `Task`, which each node receives once, defines the jobs. This module does not import Ray.
"""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from unshard import __version__
from unshard.errors import UnshardError
from unshard.progress import Advanced, Event, Listener

_LOOK_S = 0.3


class StoppedError(Exception):
    """The work was stopped before its end."""


class Task(Protocol):
    """The work of a node."""

    def do(self, job: int, attempt: int, listener: Listener) -> object:
        """Execute a job, and return its result; each attempt has a number."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """The environment of an actor.

    Attributes:
        version: the version of unshard there.
        lacking: a required path that is missing there; "" if none is.
    """

    version: str
    lacking: str


@dataclass(frozen=True, slots=True)
class Done:
    """The outcome of an attempt.

    Attributes:
        answer: the result of the task, or its error.
        written: its bytes of progress.
    """

    answer: object
    written: int


class Actor:
    """Executes jobs. Its methods are called from several threads."""

    def __init__(self) -> None:
        self._task: Task | None = None
        self._written: dict[int, int] = {}
        self._lock = threading.Lock()
        self._stopped = False

    def look(self, directory: str, needed: Mapping[str, Sequence[str]]) -> NodeView:
        """Look for the required files, by directory; relative paths are relative to `directory`.

        If a file is missing, wait before the answer, because network file systems may show it
        later.
        """
        with suppress(OSError):
            os.chdir(directory)
        lacking = _first_lacking(needed)
        if lacking:
            time.sleep(_LOOK_S)
        return NodeView(__version__, lacking)

    def take(self, task: Task) -> None:
        """Set the task."""
        self._task = task

    def do(self, job: int, attempt: int) -> Done:
        """Execute a job; return errors of unshard or the system as its answer."""
        if self._task is None:
            raise RuntimeError("a job before its task")

        def count_progress(event: Event) -> None:
            if self._stopped:
                raise StoppedError
            if isinstance(event, Advanced):
                with self._lock:
                    self._written[attempt] += event.written_bytes

        with self._lock:
            self._written[attempt] = 0
        try:
            answer = self._task.do(job, attempt, count_progress)
        except (UnshardError, OSError, MemoryError, StoppedError) as error:
            answer = error
        with self._lock:
            return Done(answer, self._written.pop(attempt))

    def written(self) -> dict[int, int]:
        """Return, after a while, the bytes of progress of each running attempt."""
        time.sleep(_LOOK_S)
        with self._lock:
            return dict(self._written)

    def stop(self) -> None:
        """Make every attempt end soon."""
        self._stopped = True


def _first_lacking(needed: Mapping[str, Sequence[str]]) -> str:
    for directory, names in needed.items():
        try:
            existing = {path.name for path in Path(directory).iterdir()}
        except OSError:
            return directory
        for name in names:
            if name not in existing:
                return str(Path(directory, name))
    return ""
