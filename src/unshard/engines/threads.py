"""Run a plan with threads of this process, and divide its resources among them.

Threads suffice, because moving bytes and casting release the interpreter lock.
"""

import os
import resource
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

from unshard.errors import CorruptError, OutputError, UnshardError, raise_all
from unshard.plan.operations import Plan
from unshard.plan.work import Unit, file_of, split_into_units, unit_bytes, units_by_file
from unshard.progress import Advanced, Listener
from unshard.signals import uninterrupted
from unshard.tensors.catalog import Catalog
from unshard.write.execute import Executor
from unshard.write.stage import Finished, Overflows
from unshard.write.verification.output import Check, Checker, source_jobs

_T = TypeVar("_T")
_Job_contra = TypeVar("_Job_contra", contravariant=True)

MIN_BUFFER = 128 * 1024
"""The smallest buffer of a worker, bytes."""

_MAX_WORKERS = 8
_RESERVED_FILES = 24
_FILES_PER_WORKER = 64
_MAX_FILES = 65536


class Resources(NamedTuple):
    """The limits of a run: a number of threads, and the bytes of all buffers."""

    workers: int
    memory_bytes: int


class Share(NamedTuple):
    """The number of workers, and the bytes of buffers and open files of each."""

    workers: int
    buffer_bytes: int
    open_files: int


def default_workers() -> int:
    """Return the default number of threads on this machine."""
    return min(_MAX_WORKERS, os.cpu_count() or 1)


def divide(resources: Resources) -> Share:
    """Divide the resources among workers, fewer than requested if memory or files are short."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = _MAX_FILES if soft == resource.RLIM_INFINITY else max(2, soft - _RESERVED_FILES)
    workers = max(1, min(resources.workers, resources.memory_bytes // MIN_BUFFER, files // 2))
    open_files = min(_FILES_PER_WORKER, files // workers)
    return Share(workers, resources.memory_bytes // workers, open_files)


class _ThreadWorker(Protocol[_Job_contra]):
    """Executes the jobs of a thread, one after another; closed when the thread ends."""

    def close(self) -> None: ...

    def do(self, job: _Job_contra, /) -> int:
        """Execute a job; return its bytes of progress."""


class _Jobs(Generic[_T]):
    """Jobs in parts, for several threads; `lock` guards the parts."""

    def __init__(self, parts: Iterator[Iterable[_T]]) -> None:
        self.lock = threading.Lock()
        self._parts = parts
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Let every worker end after its current job."""
        self._stopped.set()

    def of_one_worker(self) -> Iterator[_T]:
        """Yield the jobs of the next untaken part, and so on."""
        while not self._stopped.is_set():
            with self.lock:
                part = next(self._parts, None)
            if part is None:
                return
            for job in part:
                if self._stopped.is_set():
                    return
                yield job


def work_off(
    parts: Iterator[Iterable[_T]],
    listener: Listener,
    count: int,
    make_worker: Callable[[], _ThreadWorker[_T]],
) -> None:
    """Execute jobs with `count` threads, each with its own worker, until all are done or one fails.

    One worker executes the jobs of a part, in order. The first error is raised after all threads
    have ended.
    """
    jobs = _Jobs(parts)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with closing(make_worker()) as worker:
                for job in jobs.of_one_worker():
                    done = worker.do(job)
                    with jobs.lock:
                        listener(Advanced(done))
        except BaseException as error:  # noqa: BLE001 (raised by the main thread)
            errors.append(error)
            jobs.stop()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:  # Ctrl-C arrives here, in the main thread; the others finish their current job
        jobs.stop()
        with uninterrupted():
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
    if errors:
        raise errors[0]


def one_by_one(jobs: Iterable[_T]) -> Iterator[Iterable[_T]]:
    """Yield each job as its own part, for any worker."""
    return ((job,) for job in jobs)


def run_plan(
    plan: Plan,
    directory: Path,
    resources: Resources,
    listener: Listener,
    finished: Finished = lambda _number, _overflows: None,
) -> Overflows:
    """Write the output files into `directory`: headers, and every operation of the plan.

    The bytes do not depend on the resources. The first error stops all workers and is raised.

    Returns:
        The number of finite values that became infinite.
    """
    outputs = _create_files(plan, directory)
    share = divide(resources)
    files = units_by_file(plan, buffer_bytes=share.buffer_bytes)
    parts: Iterator[Iterable[Unit]] = _in_turn(files, behind=share.workers)
    finishing = _Finishing(plan, finished)

    def worker() -> _Recorded:
        limits = {"open_files": share.open_files, "buffer_bytes": share.buffer_bytes}
        return _Recorded(Executor(outputs, **limits), finishing)

    work_off(parts, listener, share.workers, worker)
    for number in plan.numbers:
        if not plan.layout.files[number].data_bytes:  # no unit of work belongs to it
            finished(number, Overflows())
    return finishing.overflows


def _in_turn(
    files: Iterable[tuple[Iterable[_T], Iterable[_T]]], *, behind: int
) -> Iterator[Iterable[_T]]:
    """Yield the work on each file, so that files are finished one after another.

    The copies into a file are one part, because the kernel locks the inode, so that two threads
    that write into the same file would wait for each other. For the same reason its tiles, for any
    worker, come after the copies of `behind` files have begun.
    """
    waiting: deque[Iterable[_T]] = deque()
    for copies, file_tiles in files:
        yield copies
        waiting.append(file_tiles)
        if len(waiting) >= behind:
            yield from one_by_one(waiting.popleft())
    yield from one_by_one(chain.from_iterable(waiting))


class _Finishing:
    """Detects when an output file has all its bytes. For several threads.

    Attributes:
        overflows: the overflows in all files so far.
    """

    def __init__(self, plan: Plan, finished: Finished) -> None:
        self.overflows = Overflows()
        self._left = [file.data_bytes for file in plan.layout.files]
        self._finished = finished
        self._lock = threading.Lock()

    def did(self, units: Iterable[Unit], overflows: Overflows) -> None:
        """Record completed units of work, and their overflows."""
        complete: list[int] = []
        with self._lock:
            self.overflows.update(overflows)
            for unit in units:
                number, size = file_of(unit), unit_bytes(unit)
                self._left[number] -= size
                if size and not self._left[number]:
                    complete.append(number)
            finished = {number: overflows_of(self.overflows, number) for number in complete}
        for number, file_overflows in finished.items():
            self._finished(number, file_overflows)


def overflows_of(overflows: Overflows, number: int) -> Overflows:
    """Return the overflows of an output file."""
    return Overflows({at: count for at, count in overflows.items() if at[0] == number})


class _Recorded:
    """A worker of the pool that records its work in `finishing`."""

    def __init__(self, executor: Executor, finishing: _Finishing) -> None:
        self._executor = executor
        self._finishing = finishing
        self._begun: list[Unit] = []  # units of one file, whose downloads may not be complete

    def do(self, unit: Unit) -> int:
        """Execute a unit, or begin its downloads; return its bytes."""
        if self._begun and file_of(self._begun[0]) != file_of(unit):
            self._finish()
        begun, self._begun = self._begun, []  # after an error, none of them counts as done
        done = self._executor.do(unit)
        self._begun = [*begun, unit]
        if not self._executor.is_waiting:
            self._finish()
        return done

    def close(self) -> None:
        """Finish the downloads, and close all files."""
        try:
            self._finish()
        finally:
            self._executor.close()

    def _finish(self) -> None:
        begun, self._begun = self._begun, []
        self._executor.finish()
        self._finishing.did(begun, self._executor.take_overflows())


def _create_files(plan: Plan, directory: Path) -> tuple[Path, ...]:
    """Create the plan's files at full size, with their headers; return the paths of all files."""
    outputs = tuple(directory / file.filename for file in plan.layout.files)
    for number in plan.numbers:
        file = plan.layout.files[number]
        outputs[number].parent.mkdir(parents=True, exist_ok=True)
        with outputs[number].open("xb") as stream:
            stream.write(file.header)
            stream.truncate(file.size)
            for at, piece in file.rest:
                stream.seek(at)
                stream.write(piece)
    return outputs


def find_differences(  # noqa: PLR0913 (the objects, the resources, and the part)
    plan: Plan,
    catalogs: Sequence[Catalog],
    directory: Path,
    resources: Resources,
    listener: Listener,
    *,
    part: tuple[int, int] = (0, 1),
) -> list[UnshardError]:
    """Check sources, replicas and every byte of the output in `directory`; return the problems.

    `part` is (number, count), with numbers from 0. Each part has some of the output files, and some
    of the checks of the sources.
    """
    number, count = part
    share = divide(resources)
    block = share.buffer_bytes // 2
    problems: list[UnshardError] = []
    output = plan if count == 1 else plan.only(plan.numbers[number::count])
    jobs: Iterator[Check] = chain(
        islice(source_jobs(catalogs), number, None, count),
        split_into_units(output, buffer_bytes=block),
    )

    limits = {"open_files": share.open_files, "block_bytes": block // 2}
    checker = partial(Checker, catalogs, plan.layout, directory, problems, **limits)
    work_off(one_by_one(jobs), listener, share.workers, checker)
    return problems


def raise_differences(problems: Sequence[UnshardError]) -> None:
    """Raise the problems of the sources or else those of the output, if there are any.

    Raises:
        CorruptError: a source file is damaged, or replicas differ.
        OutputError: the output differs from its sources.
    """
    for kind in (CorruptError, OutputError):
        of_kind = sorted((p for p in problems if isinstance(p, kind)), key=str)
        raise_all(kind, "verification found differences", of_kind)
