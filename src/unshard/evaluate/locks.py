"""One process at a time: locks on files, which end with the process."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

__all__ = ["lock", "lock_file", "unlock"]


def lock_file(path: Path) -> int | None:
    """Lock a file, made if need be; return the descriptor that holds it, None if another does.

    A file system without locks lets everybody in.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        pass  # there are no locks here
    return fd


def lock(run: Path, name: str) -> int | None:
    """Lock `<run>/_unshard/<name>` as `lock_file` does; the mtime of the run's directory stays."""
    state = run / "_unshard"
    before = run.stat() if run.is_dir() else None
    is_new = not state.is_dir()
    state.mkdir(parents=True, exist_ok=True)
    if is_new and before is not None:
        os.utime(run, ns=(before.st_atime_ns, before.st_mtime_ns))
    return lock_file(state / name)


def unlock(fd: int) -> None:
    """Give a lock up, also for processes that were forked meanwhile (loaders of data)."""
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
