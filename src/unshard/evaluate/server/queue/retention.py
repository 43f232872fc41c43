"""Removes the directories of ended jobs, with their logs, after some time.

The results and samples of completed jobs are kept longer, compressed: see `job_files`.

The row of a job is never removed: clients look up whether they have submitted a checkpoint before,
and a failed or cancelled evaluation must not run again because time has passed. Only directories
of jobs that the database has are removed, without following a link.
"""

import logging
import os
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unshard.evaluate.run_folder import leave_alone, opened
from unshard.evaluate.server.queue.job_files import JOBS, keep_files
from unshard.evaluate.server.store.store import Store
from unshard.write.dirfd import remove, status_of

_DAY_S = 24 * 3600.0
_GB = 1e9
_EVERY_S = 3600.0
_AT_ONCE = 100  # jobs in one transaction

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Retention:
    """Removes the directories of old jobs, once an hour.

    Attributes:
        work_dir: with the directories.
        keep_days: how long a directory stays after the end of its job; None: for ever.
        keep_gb: how many GB the directories of ended jobs have together; None: any number.
        keep_samples_mb: how many MiB of a job's results and samples are kept afterwards.
    """

    store: Store
    work_dir: Path
    keep_days: float | None
    keep_gb: float | None = None
    keep_samples_mb: int = 64
    _next: float = float("-inf")

    def begin_turn(self) -> bool:
        """Return whether a sweep is due: the first, or an hour after the last."""
        is_never = self.keep_days is None and self.keep_gb is None
        if is_never or time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + _EVERY_S
        return True

    def sweep(self, is_stopped: Callable[[], bool]) -> int:
        """Remove directories that are too old or too large together; return of how many jobs.

        A job is first marked in the database, which ends its log, then its directory is removed,
        then the mark: the next server finishes the jobs that a killed server has marked.
        """
        if self.keep_days is not None:
            before = time.time() - self.keep_days * _DAY_S
            self._forget(self.store.leftovers.list_ended(before), before, is_stopped)
        if self.keep_gb is not None:
            now = time.time()
            self._forget(self._list_excess(now, self.keep_gb * _GB), now, is_stopped)
        removed = 0
        for job_id in self.store.leftovers.list_forgotten():
            if is_stopped():
                break
            if self._is_removed(job_id):
                self.store.leftovers.record_removed(job_id)
                removed += 1
        if removed:
            limits = f"keep_days {self.keep_days or 'null'}, keep_gb {self.keep_gb or 'null'}"
            _log.info("removed the directories of %d jobs (%s)", removed, limits)
        return removed

    def _forget(self, jobs: Sequence[str], before: float, is_stopped: Callable[[], bool]) -> None:
        for begin in range(0, len(jobs), _AT_ONCE):
            ready = [
                job_id
                for job_id in jobs[begin : begin + _AT_ONCE]
                if not is_stopped() and self._are_files_kept(job_id)
            ]
            self.store.leftovers.forget(ready, before)

    def _are_files_kept(self, job_id: str) -> bool:
        """Keep the results and samples of a job; return False if its directory must stay."""
        job = self.store.get(job_id)
        try:
            if job is not None:
                keep_files(self.work_dir, job, self.keep_samples_mb << 20)
        except OSError as error:
            _log.warning("job %s: its files cannot be kept, its directory stays: %s", job_id, error)
            return False
        return True

    def _list_excess(self, before: float, most: float) -> list[str]:
        """Return the jobs whose directories must go for the others to fit into `most` bytes.

        The oldest are first; failed jobs, whose logs explain the failure, are last.
        """
        ended = self.store.leftovers.list_ended(before)
        sizes = {job_id: _size_of(self.work_dir / JOBS / job_id) for job_id in ended}
        total = sum(sizes.values())
        excess = list[str]()
        for job_id in ended:
            if total <= most:
                break
            total -= sizes[job_id]
            excess.append(job_id)
        return excess

    def _is_removed(self, job_id: str) -> bool:
        """Remove the directory of a job; return False if that failed."""
        path = self.work_dir / JOBS / job_id
        try:
            with opened(self.work_dir, JOBS) as folder:
                status = status_of(job_id, within=folder)
                if status is not None and not stat.S_ISDIR(status.st_mode):
                    leave_alone(f"{path}: not a directory")
                else:
                    remove(job_id, within=folder)
        except FileNotFoundError:  # no job has begun so far
            return True
        except OSError as error:
            _log.warning("%s: cannot be removed: %s", path, error)
            return False
        return True


def _size_of(directory: Path) -> int:
    """Return the bytes on disk of the files below a directory; follow no links."""
    size = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):  # removed meanwhile
                size += Path(folder, name).lstat().st_blocks * 512
    return size
