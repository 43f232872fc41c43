"""Checks that the server can store jobs: its work directory, the space there, its database.

Submissions are refused while it cannot. Our clients keep refused submissions and retry later.
"""

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryFile
from urllib.parse import quote

from unshard.errors import UnshardError

RETRY_AFTER_S = 30  # seconds until clients may try again
_LEAST_BYTES = 64 << 20
_PROBE_BYTES = 4096
_LOCKED_S = 2.0  # a longer lock of the database by another process is reported
_HUNG_S = 3.0  # no other probe waits for a disk that one has waited for this long
_EVERY_S = 5.0  # between two tries to write


class UnhealthyError(UnshardError):
    """The server accepts no jobs now; the same request may be sent again later."""


class HealthCheck:
    """Finds problems that would make the server lose a job.

    The database exists; its directory is the server's work directory.
    """

    def __init__(self, database: Path) -> None:
        self._database = database
        self._work_dir = database.parent
        self._identity = _identity(database)
        self._lock = threading.Lock()
        self._began = float("inf")  # when the probe that holds the lock began
        self._tried = float("-inf")
        self._problems: list[UnhealthyError] = []

    def check(self) -> None:
        """Raise the first problem, an UnhealthyError, if a job could be lost now."""
        for problem in self.problems():
            raise UnhealthyError(
                "the server accepts no jobs now: " + problem.subject,
                expected=problem.expected,
                found=problem.found,
                hint=problem.hint,
            )

    def problems(self) -> list[UnhealthyError]:
        """Return all problems.

        It takes about two seconds at most if the disk answers. If it does not, a single caller
        waits for it; the others get an error three seconds after that one began.
        """
        remaining_s = self._began + _HUNG_S - time.monotonic()
        if not self._lock.acquire(timeout=max(0.0, min(remaining_s, _HUNG_S))):
            return [
                UnhealthyError(
                    f"the disk of the work directory {self._work_dir} does not answer",
                    found=f"a probe has waited for more than {_HUNG_S:g} s",
                    hint="check the disk, and the network if it is a network disk",
                )
            ]
        try:
            self._began = time.monotonic()
            return list(self._probe())
        finally:
            self._began = float("inf")
            self._lock.release()

    def _probe(self) -> Iterator[UnhealthyError]:
        if _identity(self._database) != self._identity:
            yield UnhealthyError(
                f"the server's database {self._database} was moved, removed or replaced",
                hint="put the work directory back, or restart the server",
            )
            return
        try:
            status = os.statvfs(self._work_dir)
        except OSError as error:
            yield _unusable(self._work_dir, error)
        else:
            free = status.f_bavail * status.f_frsize
            if free < _LEAST_BYTES and status.f_blocks:  # some network disks report only zeros
                yield UnhealthyError(
                    f"the disk of {self._work_dir} is full",
                    expected=f"at least {_LEAST_BYTES >> 20} MiB free",
                    found=f"{free >> 20} MiB",
                    hint="make room on it",
                )
        if time.monotonic() - self._tried >= _EVERY_S:
            self._problems = list(self._try_to_write())
            self._tried = time.monotonic()
        yield from self._problems

    def _try_to_write(self) -> Iterator[UnhealthyError]:
        try:
            with TemporaryFile(dir=self._work_dir) as probe:
                probe.write(bytes(_PROBE_BYTES))
                probe.flush()
        except OSError as error:
            yield _unusable(self._work_dir, error)
        address = f"file:{quote(str(self._database))}?mode=rw"  # do not create a database
        try:
            with closing(
                sqlite3.connect(address, uri=True, timeout=_LOCKED_S, isolation_level=None)
            ) as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            yield UnhealthyError(
                f"the server's database {self._database} cannot be written",
                found=str(error),
                hint="end the process that has locked it (a backup, sqlite3)"
                if "locked" in str(error)
                else "check free space, and the owner of the file",
            )


def _unusable(work_dir: Path, error: OSError) -> UnhealthyError:
    return UnhealthyError(
        f"the work directory {work_dir} cannot be written",
        found=error.strerror or str(error),
        hint="check free space, quota, mount options and owner",
    )


def _identity(database: Path) -> tuple[int, int] | None:
    try:
        status = database.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
