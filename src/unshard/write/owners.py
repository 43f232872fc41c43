"""Who a staging directory belongs to, and whether that process is provably dead.

`owner.json` names host, pid and start time, for people. What proves a death is its lock: the kernel
drops the locks of a process that ends, however it ends. A free lock on this host is a dead owner;
of another host's owner nothing is known.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["OWNER_NAME", "claim", "if_dead", "made_for"]

OWNER_NAME = "owner.json"
_ABANDONED_AFTER_S = 60


def claim(staging: Path, made: Sequence[Path]) -> int:
    """Write the owner file, locked from the start; return the descriptor that locks it.

    Args:
        staging: the directory to own.
        made: directories above it that were made for it.
    """
    fields = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": time.time(),
        "made": [str(path.resolve()) for path in made],
    }
    draft = staging / f"{OWNER_NAME}.new"
    fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(fd, json.dumps(fields).encode())
        draft.rename(staging / OWNER_NAME)
    except BaseException:
        os.close(fd)
        raise
    return fd


def made_for(staging: Path) -> list[Path]:
    """Return the directories above a staging directory that its owner made for it."""
    try:
        fields = json.loads((staging / OWNER_NAME).read_bytes())
        made = {str(path) for path in fields["made"]}
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [path for path in staging.resolve().parents if str(path) in made]


@contextmanager
def if_dead(staging: Path) -> Iterator[bool]:
    """Yield whether the owner of a staging directory is provably dead.

    Meanwhile its lock is held, so that only one process cleans up.
    """
    try:
        fd = os.open(staging / OWNER_NAME, os.O_RDWR)
    except OSError:
        yield _is_abandoned(staging)
        return
    try:
        yield _is_ours_to_lock(fd)
    finally:
        os.close(fd)


def _is_ours_to_lock(fd: int) -> bool:
    try:
        fields = json.loads(os.read(fd, 65536))
        if not isinstance(fields, dict) or fields.get("host") != socket.gethostname():
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, ValueError):
        return False
    return True


def _is_abandoned(staging: Path) -> bool:
    """Tell whether a process died before it named itself, or after: nothing there for a minute."""
    try:
        names = {path.name for path in staging.iterdir()}
        age = time.time() - staging.stat().st_mtime
    except OSError:
        return False
    return names <= {f"{OWNER_NAME}.new"} and age > _ABANDONED_AFTER_S
