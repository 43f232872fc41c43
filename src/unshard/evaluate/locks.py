"""One process at a time: locks on files, which end with the process."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from unshard.evaluate.folders import STATE, opened
from unshard.write.staging.beneath import open_regular

__all__ = ["lock", "lock_file", "unlock"]

_FLAGS = os.O_RDWR | os.O_CREAT


def lock_file(path: Path) -> int | None:
    """Lock a file, made if need be; return the descriptor that holds it, None if another does.

    A file system without locks lets everybody in.

    Raises:
        OSError: it cannot be opened, or is a link.
    """
    return _locked(open_regular(path, _FLAGS))


def lock(run: Path, name: str) -> int | None:
    """Lock `<run>/_unshard/<name>` as `lock_file` does; the mtime of the run's directory stays."""
    run.mkdir(parents=True, exist_ok=True)
    with opened(run, STATE, make=True) as state:
        return _locked(open_regular(name, _FLAGS, within=state))


def _locked(fd: int) -> int | None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        pass  # there are no locks here
    return fd


def unlock(fd: int) -> None:
    """Give a lock up, also for processes that were forked meanwhile (loaders of data)."""
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
