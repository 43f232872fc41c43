"""How long the server keeps what ended jobs leave on the disk: their directories, with the logs.

The results and samples of completed jobs are kept longer, compressed: see `job_files`.

The row of a job stays, whatever its end was: clients ask it whether they have submitted a
checkpoint before, and an evaluation that failed or was cancelled is not to run again because time
has passed. Only directories of jobs that the database has are removed, without following a link.
"""

import logging
import os
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
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


class Retention:
    """Removes what old jobs have left, once an hour.

    Args:
        store: with the jobs.
        work_dir: has their directories.
        keep_days: how long a directory stays after the end of its job; None: for ever.
        keep_gb: how many GB the directories of ended jobs have together; None: any number.
        keep_samples_mb: how many MiB of a job's results and samples are kept afterwards.
    """

    def __init__(
        self,
        store: Store,
        work_dir: Path,
        keep_days: float | None,
        keep_gb: float | None = None,
        keep_samples_mb: int = 64,
    ) -> None:
        self._store = store
        self._work_dir = work_dir
        self._keep_days = keep_days
        self._keep_gb = keep_gb
        self._keep_bytes = keep_samples_mb << 20
        self._next = float("-inf")

    def begin_turn(self) -> bool:
        """Return whether a sweep is due: the first one, or an hour after the last time."""
        is_never = self._keep_days is None and self._keep_gb is None
        if is_never or time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + _EVERY_S
        return True

    def sweep(self, is_stopped: Callable[[], bool]) -> int:
        """Remove what is too old or too much; return how many jobs had something to remove.

        A job is first marked in the database, which ends its log, then its directory is removed,
        then the mark: what a killed server left marked is finished by the next.
        """
        if self._keep_days is not None:
            before = time.time() - self._keep_days * _DAY_S
            self._forget(self._store.leftovers.list_ended(before), before, is_stopped)
        if self._keep_gb is not None:
            now = time.time()
            self._forget(self._list_excess(now, self._keep_gb * _GB), now, is_stopped)
        removed = 0
        for job_id in self._store.leftovers.list_forgotten():
            if is_stopped():
                break
            if self._is_removed(job_id):
                self._store.leftovers.record_removed(job_id)
                removed += 1
        if removed:
            days, size = self._keep_days, self._keep_gb
            limits = f"keep_days {days or 'null'}, keep_gb {size or 'null'}"
            _log.info("removed the directories of %d jobs (%s)", removed, limits)
        return removed

    def _forget(self, jobs: Sequence[str], before: float, is_stopped: Callable[[], bool]) -> None:
        for begin in range(0, len(jobs), _AT_ONCE):
            kept = [
                job_id
                for job_id in jobs[begin : begin + _AT_ONCE]
                if not is_stopped() and self._are_files_kept(job_id)
            ]
            self._store.leftovers.forget(kept, before)

    def _are_files_kept(self, job_id: str) -> bool:
        """Keep the results and samples of a job; return false if its directory must stay."""
        job = self._store.get(job_id)
        try:
            if job is not None:
                keep_files(self._work_dir, job, self._keep_bytes)
        except OSError as error:
            _log.warning("job %s: its files cannot be kept, its directory stays: %s", job_id, error)
            return False
        return True

    def _list_excess(self, before: float, most: float) -> list[str]:
        """Return the jobs whose directories are to go for the others to have `most` bytes.

        The oldest go first, but those of failed jobs last: their logs say why.
        """
        ended = self._store.leftovers.list_ended(before)
        sizes = {job_id: _size_of(self._work_dir / JOBS / job_id) for job_id in ended}
        total = sum(sizes.values())
        chosen = list[str]()
        for job_id in ended:
            if total <= most:
                break
            total -= sizes[job_id]
            chosen.append(job_id)
        return chosen

    def _is_removed(self, job_id: str) -> bool:
        """Remove the directory of a job; return whether nothing of ours is left."""
        place = self._work_dir / JOBS / job_id
        try:
            with opened(self._work_dir, JOBS) as folder:
                status = status_of(job_id, within=folder)
                if status is not None and not stat.S_ISDIR(status.st_mode):
                    leave_alone(f"{place}: not a directory")
                else:
                    remove(job_id, within=folder)
        except FileNotFoundError:  # no job has begun so far
            return True
        except OSError as error:
            _log.warning("%s: cannot be removed: %s", place, error)
            return False
        return True


def _size_of(directory: Path) -> int:
    """Return how many bytes the files below a directory have on the disk; follow no links."""
    size = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):  # removed meanwhile
                size += Path(folder, name).lstat().st_blocks * 512
    return size
