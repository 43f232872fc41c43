"""How long the server keeps what ended jobs leave on the disk: their directories, with the logs.

The row of a job stays, whatever its end was: clients ask it whether they have submitted a
checkpoint before, and an evaluation that failed or was cancelled is not to run again because time
has passed. Only directories of jobs that the database has are removed, without following a link.
"""

import logging
import stat
import time
from collections.abc import Callable
from pathlib import Path

from unshard.evaluate.run_folder import leave_alone, opened
from unshard.evaluate.server.store.store import Store
from unshard.write.staging.beneath import remove, status_of

__all__ = ["JOBS", "Retention"]

JOBS = "jobs"
"""The directory, in the server's work directory, with a directory for each job."""

_DAY_S = 24 * 3600.0
_EVERY_S = 3600.0
_AT_ONCE = 100  # jobs in one transaction

_log = logging.getLogger(__name__)


class Retention:
    """Removes what old jobs have left, once an hour; never if `keep_days` is None."""

    def __init__(self, store: Store, work_dir: Path, keep_days: float | None) -> None:
        self._store = store
        self._work_dir = work_dir
        self._keep_days = keep_days
        self._next = float("-inf")

    def begin_turn(self) -> bool:
        """Return whether a sweep is due: the first one, or an hour after the last time."""
        if self._keep_days is None or time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + _EVERY_S
        return True

    def sweep(self, is_stopped: Callable[[], bool]) -> int:
        """Remove what is too old; return how many jobs had something to remove.

        A job is first marked in the database, which ends its log, then its directory is removed,
        then the mark: what a killed server left marked is finished by the next.
        """
        if self._keep_days is None:
            return 0
        before = time.time() - self._keep_days * _DAY_S
        old = self._store.leftovers.list_ended(before)
        for begin in range(0, len(old), _AT_ONCE):
            if not is_stopped():
                self._store.leftovers.forget(old[begin : begin + _AT_ONCE], before)
        removed = 0
        for job_id in self._store.leftovers.list_forgotten():
            if is_stopped():
                break
            if self._is_removed(job_id):
                self._store.leftovers.record_removed(job_id)
                removed += 1
        if removed:
            days = self._keep_days
            _log.info("removed the directories of %d jobs older than %g days", removed, days)
        return removed

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
