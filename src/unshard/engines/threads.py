"""Run a plan with threads of this process, and divide its resources among them.

Threads are enough: moving bytes and casting release the interpreter lock.
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
"""The least that one worker can work with, bytes."""

_MAX_WORKERS = 8
_RESERVED_FILES = 24
_FILES_PER_WORKER = 64
_MAX_FILES = 65536


class Resources(NamedTuple):
    """What a run may use: a number of threads, and bytes of buffers for all of them together."""

    workers: int
    memory_bytes: int


class Share(NamedTuple):
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


class _Jobs(Generic[_T]):
    """Jobs in parts, for several threads; `lock` is held while a part is taken."""

    def __init__(self, parts: Iterator[Iterable[_T]]) -> None:
        self.lock = threading.Lock()
        self._parts = parts
        self._stopped = False

    def stop(self) -> None:
        """Let every worker end after its job."""
        self._stopped = True

    def of_one_worker(self) -> Iterator[_T]:
        """Yield the jobs of the next part that no other worker has taken, and so on."""
        while (part := self._next_part()) is not None:
            for job in part:
                if self._stopped:
                    return
                yield job

    def _next_part(self) -> Iterable[_T] | None:
        with self.lock:
            return None if self._stopped else next(self._parts, None)


def work_off(
    parts: Iterator[Iterable[_T]],
    listener: Listener,
    count: int,
    make_worker: Callable[[], _Worker[_T]],
) -> None:
    """Do jobs with `count` threads, each with its own worker, until they end or one fails.

    The jobs of a part are done by one worker, in their order. The first error is raised when all
    threads have ended.
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
    finally:  # Ctrl-C arrives here, in the main thread: let the others finish their job
        jobs.stop()
        with uninterrupted():
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
    if errors:
        raise errors[0]


def one_by_one(jobs: Iterable[_T]) -> Iterator[Iterable[_T]]:
    """Yield each job as a part of its own, which any worker may do at any time."""
    return ((job,) for job in jobs)


def run_plan(
    plan: Plan,
    directory: Path,
    resources: Resources,
    listener: Listener,
    finished: Finished = lambda _number, _overflows: None,
) -> Overflows:
    """Make the output files in `directory`: headers, and every operation of the plan.

    The bytes do not depend on the resources. The first error stops all workers and is raised.

    Returns:
        How many finite values became infinite.
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
        if not plan.layout.files[number].data_bytes:  # no worker has seen it
            finished(number, Overflows())
    return finishing.overflows


def _in_turn(
    files: Iterable[tuple[Iterable[_T], Iterable[_T]]], *, behind: int
) -> Iterator[Iterable[_T]]:
    """Yield the work on each file, so that one file after the other is finished.

    The copies into a file are one part: two threads that write into one file wait for one another,
    because its inode is locked. For that reason its tiles, which any worker may make, come when
    the copies of `behind` files were begun.
    """
    waiting: deque[Iterable[_T]] = deque()
    for copies, made in files:
        yield copies
        waiting.append(made)
        if len(waiting) >= behind:
            yield from one_by_one(waiting.popleft())
    yield from one_by_one(chain.from_iterable(waiting))


class _Finishing:
    """Notices when an output file has all its bytes. For several threads.

    Attributes:
        overflows: what became infinite so far, in all files.
    """

    def __init__(self, plan: Plan, finished: Finished) -> None:
        self.overflows = Overflows()
        self._left = [file.data_bytes for file in plan.layout.files]
        self._finished = finished
        self._lock = threading.Lock()

    def did(self, units: Iterable[Unit], overflows: Overflows) -> None:
        """Take note of units of work that were done, and of what became infinite in them."""
        whole: dict[int, Overflows] = {}
        with self._lock:
            self.overflows.update(overflows)
            for unit in units:
                number, size = file_of(unit), unit_bytes(unit)
                self._left[number] -= size
                if size and not self._left[number]:
                    found = self.overflows.items()
                    whole[number] = Overflows({at: count for at, count in found if at[0] == number})
        for number, lost in whole.items():
            self._finished(number, lost)


class _Recorded:
    """A worker of the pool, whose work `finishing` takes note of."""

    def __init__(self, executor: Executor, finishing: _Finishing) -> None:
        self._executor = executor
        self._finishing = finishing
        self._begun: list[Unit] = []  # of one file; what comes from a bucket is not all there yet

    def do(self, unit: Unit) -> int:
        """Do a unit of work, or begin it; return its bytes."""
        if self._begun and file_of(self._begun[0]) != file_of(unit):
            self._finish()
        begun, self._begun = self._begun, []  # after an error none of them counts as done
        done = self._executor.do(unit)
        self._begun = [*begun, unit]
        if not self._executor.is_waiting:
            self._finish()
        return done

    def close(self) -> None:
        """Finish what was begun, and close all files."""
        try:
            self._finish()
        finally:
            self._executor.close()

    def _finish(self) -> None:
        begun, self._begun = self._begun, []
        self._executor.finish()
        self._finishing.did(begun, self._executor.take_overflows())


def _create_files(plan: Plan, directory: Path) -> tuple[Path, ...]:
    """Make the plan's files at full size, their headers written; return the paths of all files."""
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


def find_differences(  # noqa: PLR0913 (what is checked, with what, and what part of it)
    plan: Plan,
    catalogs: Sequence[Catalog],
    directory: Path,
    resources: Resources,
    listener: Listener,
    *,
    part: tuple[int, int] = (0, 1),
) -> list[UnshardError]:
    """Check sources, replicas and every byte of the output in `directory`; return what differs.

    `part` is its number, from 0 on, and how many there are. Each has some of the output files, and
    some of what there is to check about the sources.
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
    """Raise what was found: an error of the sources before one of the output.

    Raises:
        CorruptError: a source file is damaged, or replicas differ.
        OutputError: the output differs from its sources.
    """
    for kind in (CorruptError, OutputError):
        found = sorted((p for p in problems if isinstance(p, kind)), key=str)
        raise_all(kind, "verification found differences", found)
