"""Threads that take jobs from one iterator, and the resources that each of them gets.

Threads are enough: moving bytes and casting release the interpreter lock.
"""

import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from unshard.progress import Advanced, Listener
from unshard.write.staging.interrupts import uninterrupted

__all__ = ["MIN_BUFFER", "Pool", "Resources", "Share", "default_workers", "divide"]

_T = TypeVar("_T")
_Job_contra = TypeVar("_Job_contra", contravariant=True)

MIN_BUFFER = 128 * 1024
"""The least that one worker can work with, bytes."""

_MAX_WORKERS = 8
_RESERVED_FILES = 24
_FILES_PER_WORKER = 64
_MAX_FILES = 65536


@dataclass(frozen=True, slots=True)
class Resources:
    """What a run may use: a number of threads, and bytes of buffers for all of them together."""

    workers: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Share:
    """The number of workers, and the bytes of buffers and open files of each."""

    workers: int
    buffer_bytes: int
    open_files: int


def default_workers() -> int:
    """Return the number of threads that suits this machine."""
    return min(_MAX_WORKERS, os.cpu_count() or 1)


def divide(resources: Resources) -> Share:
    """Divide the resources among workers: fewer than given if memory or open files are short."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _MAX_FILES if soft == resource.RLIM_INFINITY else max(2, soft - _RESERVED_FILES)
    workers = max(1, min(resources.workers, resources.memory_bytes // MIN_BUFFER, files // 2))
    open_files = min(_FILES_PER_WORKER, files // workers)
    return Share(workers, resources.memory_bytes // workers, open_files)


class _Worker(Protocol[_Job_contra]):
    """What a thread does its jobs with, one after another; closed at the end."""

    def close(self) -> None: ...

    def do(self, job: _Job_contra, /) -> int:
        """Do a job; return the bytes of progress it makes."""


class Pool(Generic[_T]):
    """Threads that take jobs from one iterator until it ends or one of them fails."""

    def __init__(self, jobs: Iterator[_T], listener: Listener) -> None:
        self._jobs = jobs
        self._listener = listener
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []
        self._stopped = False

    def run(self, count: int, make_worker: Callable[[], _Worker[_T]]) -> None:
        """Work with `count` threads, each with its own worker; raise the first error."""
        threads = [
            threading.Thread(target=self._work, args=(make_worker,), daemon=True)
            for _ in range(count)
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:  # Ctrl-C arrives here, in the main thread: let the others finish their job
            self._stopped = True
            with uninterrupted():
                for thread in threads:
                    if thread.ident is not None:
                        thread.join()
        if self._errors:
            raise self._errors[0]

    def _work(self, make_worker: Callable[[], _Worker[_T]]) -> None:
        try:
            with closing(make_worker()) as worker:
                while (job := self._next()) is not None:
                    done = worker.do(job)
                    with self._lock:
                        self._listener(Advanced(done))
        except BaseException as error:  # noqa: BLE001 (raised by the main thread)
            self._errors.append(error)
            self._stopped = True

    def _next(self) -> _T | None:
        with self._lock:
            return None if self._stopped else next(self._jobs, None)
