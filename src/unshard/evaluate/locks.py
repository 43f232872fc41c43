"""One process at a time: locks on files beside a run, which end with the process."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

__all__ = ["lock", "unlock"]


def lock(run: Path, name: str) -> int | None:
    """Lock `<run>/_unshard/<name>`; return the descriptor that holds it, None if another does.

    The mtime of the run's directory stays. A file system without locks lets everybody in.
    """
    state = run / "_unshard"
    before = run.stat() if run.is_dir() else None
    is_new = not state.is_dir()
    state.mkdir(parents=True, exist_ok=True)
    if is_new and before is not None:
        os.utime(run, ns=(before.st_atime_ns, before.st_mtime_ns))
    fd = os.open(state / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if isinstance(error, BlockingIOError):
            os.close(fd)
            return None
    return fd


def unlock(fd: int) -> None:
    """Give a lock up, also for processes that were forked meanwhile (loaders of data)."""
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
