"""Run a plan with threads of this process. Moving bytes and casting hold no interpreter lock."""

import os
import resource
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unshard.plan.operations import Plan
from unshard.plan.work import Unit, units
from unshard.progress import Advanced, Listener
from unshard.write.execute import Executor

__all__ = ["MIN_BUFFER", "Settings", "default_workers", "run_plan"]

MIN_BUFFER = 128 * 1024
_MAX_WORKERS = 8
_RESERVED_FILES = 24
_FILES_PER_WORKER = 64


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run: number of threads, and bytes of buffers for all of them together."""

    workers: int
    memory_bytes: int


def default_workers() -> int:
    """Return how many threads suit this machine."""
    return min(_MAX_WORKERS, os.cpu_count() or 1)


def run_plan(plan: Plan, directory: Path, settings: Settings, listener: Listener) -> None:
    """Make the output files in `directory`: headers, and every operation of the plan.

    The bytes do not depend on the settings. The first error stops all workers and is raised.
    """
    outputs = tuple(directory / file.filename for file in plan.layout.files)
    for path, file in zip(outputs, plan.layout.files, strict=True):
        _create(path, file.header, file.size)
    workers = max(1, min(settings.workers, settings.memory_bytes // MIN_BUFFER))
    buffer_bytes = settings.memory_bytes // workers
    pool = _Pool(units(plan, buffer_bytes=buffer_bytes), listener)
    pool.run(workers, outputs, open_files=_open_files(workers), buffer_bytes=buffer_bytes)


def _create(path: Path, header: bytes, size: int) -> None:
    with path.open("xb") as file:
        file.write(header)
        file.truncate(size)


def _open_files(workers: int) -> int:
    """Return how many descriptors each worker may hold under the process's limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _FILES_PER_WORKER
    return max(2, min(_FILES_PER_WORKER, (soft - _RESERVED_FILES) // workers))


class _Pool:
    """Threads that take units from one iterator until it ends or one of them fails."""

    def __init__(self, work: Iterator[Unit], listener: Listener) -> None:
        self._work = work
        self._listener = listener
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []
        self._stopped = False

    def run(
        self, workers: int, outputs: tuple[Path, ...], *, open_files: int, buffer_bytes: int
    ) -> None:
        def work() -> None:
            with Executor(outputs, open_files=open_files, buffer_bytes=buffer_bytes) as executor:
                self._work_with(executor)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(workers)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:  # Ctrl-C arrives here, in the main thread: let the others finish their unit
            self._stopped = True
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        if self._errors:
            raise self._errors[0]

    def _work_with(self, executor: Executor) -> None:
        try:
            while (unit := self._next()) is not None:
                written = executor.do(unit)
                with self._lock:
                    self._listener(Advanced(written))
        except BaseException as error:  # noqa: BLE001 (raised by the main thread)
            self._errors.append(error)
            self._stopped = True

    def _next(self) -> Unit | None:
        with self._lock:
            return None if self._stopped else next(self._work, None)
