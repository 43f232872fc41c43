"""What runs on a node of a Ray cluster: an actor that does jobs, several at a time.

What a job is, its `Task` says, which each node gets once. This module does not import Ray.
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
    """What nodes do."""

    def do(self, job: int, attempt: int, listener: Listener) -> object:
        """Do a job, and return what the driver needs of it; each attempt at it has a number."""


@dataclass(frozen=True, slots=True)
class Found:
    """What an actor finds where it is.

    Attributes:
        version: of the unshard there.
        lacking: a path that is needed and is not there; empty if all are.
    """

    version: str
    lacking: str


@dataclass(frozen=True, slots=True)
class Done:
    """How an attempt ended.

    Attributes:
        answer: what the task returned, or the error that it raised.
        written: the bytes of progress that it made.
    """

    answer: object
    written: int


class Actor:
    """Does jobs. Its methods are called from several threads."""

    def __init__(self) -> None:
        self._task: Task | None = None
        self._written: dict[int, int] = {}
        self._lock = threading.Lock()
        self._stopped = False

    def look(self, directory: str, needed: Mapping[str, Sequence[str]]) -> Found:
        """Return whether the files that are needed, by their directories, are here.

        A network file system may show them later: an answer that they are not takes its time.
        Relative paths mean what they mean in `directory`.
        """
        with suppress(OSError):
            os.chdir(directory)
        lacking = _first_lacking(needed)
        if lacking:
            time.sleep(_LOOK_S)
        return Found(__version__, lacking)

    def take(self, task: Task) -> None:
        """Take what is to be done."""
        self._task = task

    def do(self, job: int, attempt: int) -> Done:
        """Do a job; an error that is ours, or the system's, is returned."""
        if self._task is None:
            raise RuntimeError("a job before its task")

        def told(event: Event) -> None:
            if self._stopped:
                raise StoppedError
            if isinstance(event, Advanced):
                with self._lock:
                    self._written[attempt] += event.written_bytes

        with self._lock:
            self._written[attempt] = 0
        try:
            answer = self._task.do(job, attempt, told)
        except (UnshardError, OSError, MemoryError, StoppedError) as error:
            answer = error
        with self._lock:
            return Done(answer, self._written.pop(attempt))

    def written(self) -> dict[int, int]:
        """Return the bytes of progress of each attempt that is under way; it takes its time."""
        time.sleep(_LOOK_S)
        with self._lock:
            return dict(self._written)

    def stop(self) -> None:
        """Let every attempt end soon."""
        self._stopped = True


def _first_lacking(needed: Mapping[str, Sequence[str]]) -> str:
    for directory, names in needed.items():
        try:
            there = {path.name for path in Path(directory).iterdir()}
        except OSError:
            return directory
        for name in names:
            if name not in there:
                return str(Path(directory, name))
    return ""
