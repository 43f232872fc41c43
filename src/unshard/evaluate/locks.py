"""One process at a time: locks on files, which end with the process."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from unshard.write.staging.beneath import open_regular

__all__ = ["lock_file", "unlock"]


def lock_file(path: Path | str, *, within: int | None = None) -> int | None:
    """Lock a file, made if need be; return the descriptor that holds it, None if another does.

    Without locks on the file system every process gets one.

    Args:
        path: of the file, or its name in `within`.
        within: the directory that holds it.

    Raises:
        OSError: it cannot be opened, or is a link.
    """
    fd = open_regular(path, os.O_RDWR | os.O_CREAT, within=within)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        pass  # there are no locks here
    return fd


def unlock(fd: int) -> None:
    """Release a lock, also for processes that were forked since (data loaders)."""
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
