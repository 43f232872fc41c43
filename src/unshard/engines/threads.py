"""Run a plan with threads of this process. Moving bytes and casting hold no interpreter lock."""

import os
import resource
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from unshard.errors import CorruptError, OutputError, UnshardError, raise_all
from unshard.plan.operations import Plan
from unshard.plan.work import units
from unshard.progress import Advanced, Listener
from unshard.tensors.catalog import Catalog
from unshard.write.execute import Executor
from unshard.write.verify_full import Checker, Job, source_jobs

__all__ = [
    "MIN_BUFFER",
    "Pool",
    "Settings",
    "default_workers",
    "run_plan",
    "shares",
    "verify_full",
]

_T = TypeVar("_T")
_Job_contra = TypeVar("_Job_contra", contravariant=True)

MIN_BUFFER = 128 * 1024
_MAX_WORKERS = 8
_RESERVED_FILES = 24
_FILES_PER_WORKER = 64
_MAX_FILES = 65536


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run: number of threads, and bytes of buffers for all of them together."""

    workers: int
    memory_bytes: int


def default_workers() -> int:
    """Return how many threads suit this machine."""
    return min(_MAX_WORKERS, os.cpu_count() or 1)


def run_plan(plan: Plan, directory: Path, settings: Settings, listener: Listener) -> dict[str, int]:
    """Make the output files in `directory`: headers, and every operation of the plan.

    The bytes do not depend on the settings. The first error stops all workers and is raised.

    Returns:
        How many finite values became infinite as float16, by the name of the tensor.
    """
    outputs = tuple(directory / file.filename for file in plan.layout.files)
    for path, file in zip(outputs, plan.layout.files, strict=True):
        _create(path, file.header, file.size)
    workers, buffer_bytes, open_files = shares(settings)
    work = units(plan, buffer_bytes=buffer_bytes)

    executors: list[Executor] = []

    def executor() -> Executor:
        executors.append(Executor(outputs, open_files=open_files, buffer_bytes=buffer_bytes))
        return executors[-1]

    Pool(work, listener).run(workers, executor)
    overflows: Counter[tuple[int, int]] = Counter()
    for one in executors:
        overflows += one.overflows
    return _named(overflows, plan)


def _named(overflows: Counter[tuple[int, int]], plan: Plan) -> dict[str, int]:
    """Return the counts by the names of the tensors, in the order of the files."""
    return {
        tensor.name: count
        for number, file in enumerate(plan.layout.files)
        for tensor in file.tensors
        if (count := overflows[number, len(file.header) + tensor.data_offsets[0]])
    }


def verify_full(
    plan: Plan,
    catalogs: Sequence[Catalog],
    directory: Path,
    settings: Settings,
    listener: Listener,
) -> None:
    """Check sources, replicas and every byte of the output in `directory`.

    Raises:
        CorruptError: a source file is damaged, or replicas differ.
        OutputError: the output differs from its sources.
    """
    workers, buffer_bytes, open_files = shares(settings)
    block = buffer_bytes // 2
    problems: list[UnshardError] = []
    jobs: Iterator[Job] = chain(source_jobs(catalogs), units(plan, buffer_bytes=block))

    def checker() -> Checker:
        return Checker(
            catalogs,
            plan.layout,
            directory,
            problems,
            open_files=open_files,
            block_bytes=block // 2,
        )

    Pool(jobs, listener).run(workers, checker)
    for kind in (CorruptError, OutputError):
        found = sorted((p for p in problems if isinstance(p, kind)), key=str)
        raise_all(kind, "verification found differences", found)


def shares(settings: Settings) -> tuple[int, int, int]:
    """Return the number of workers, and each one's bytes of buffers and open files.

    There are fewer workers than asked for where memory or open files would not suffice for all.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _MAX_FILES if soft == resource.RLIM_INFINITY else max(2, soft - _RESERVED_FILES)
    workers = max(1, min(settings.workers, settings.memory_bytes // MIN_BUFFER, files // 2))
    return workers, settings.memory_bytes // workers, min(_FILES_PER_WORKER, files // workers)


def _create(path: Path, header: bytes, size: int) -> None:
    with path.open("xb") as file:
        file.write(header)
        file.truncate(size)


class _Worker(Protocol[_Job_contra]):
    """What a thread works with: given job after job, then closed."""

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
        """Work with `count` threads, each with a worker of its own; raise the first error."""
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
