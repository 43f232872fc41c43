"""The owner of a staging directory, and whether that process is provably dead.

What a tree that was copied or downloaded contains proves nothing, so two codes that only this user
can compute must be right before anything of a staging directory is believed (see `seals`): one in
its name, for the directory that holds it, and one in `owner.json`, for the staging directory
itself. Both are bound to inodes, which a copy does not share. Devices are left out: their
numbers change when a machine starts again, which is when something is left to finish.

`owner.json` names host, pid and start time, for people. What proves a death is its lock: the kernel
drops the locks of a process that ends, however it ends. A free lock on this host is a dead owner;
of another host's owner nothing is known.
"""

import fcntl
import json
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from unshard.write.staging.seals import is_sealed, seal

__all__ = [
    "OWNER_NAME",
    "PREFIX",
    "StagingDirectory",
    "claim",
    "dead_owner",
    "mtime_in",
    "staging_name",
]

OWNER_NAME = "owner.json"
PREFIX = "_unshard-partial-"
_MTIME = "-mtime-"
_ABANDONED_AFTER_S = 60
_OTHERS = 0o077
_LONGEST = 1 << 20


@dataclass(frozen=True, slots=True)
class StagingDirectory:
    """A staging directory, held open.

    Attributes:
        path: of it, for messages; no step depends on it.
        parent: descriptor of the directory that holds it.
        fd: its own descriptor.
    """

    path: Path
    parent: int
    fd: int

    @property
    def name(self) -> str:
        """Its name in its parent."""
        return self.path.name


def staging_name(parent: int, mtime_ns: int | None) -> str:
    """Return a new name for a staging directory.

    Args:
        parent: descriptor of the directory that will hold it.
        mtime_ns: modification time to give back to that directory.
    """
    drawn = secrets.token_hex(8)
    mtime = "" if mtime_ns is None else f"{_MTIME}{mtime_ns}"
    code = seal("name", drawn, mtime, os.fstat(parent).st_ino)
    return f"{PREFIX}{drawn}{code}{mtime}"


def mtime_in(name: str) -> int | None:
    """Return the modification time that a name of `staging_name` records."""
    text = name.partition(_MTIME)[2]
    return int(text) if text.isdigit() else None


def claim(staging: int, made: Sequence[Path]) -> int:
    """Write the owner file, locked from the start; return the descriptor that locks it.

    Args:
        staging: descriptor of the directory to own.
        made: directories above it that were made for it.
    """
    fields: dict[str, object] = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": time.time(),
        "made": [str(path.resolve()) for path in made],
    }
    fields["seal"] = seal("owner", fields, os.fstat(staging).st_ino)
    draft = f"{OWNER_NAME}.new"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(draft, flags, 0o600, dir_fd=staging)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(fd, json.dumps(fields).encode())
        os.rename(draft, OWNER_NAME, src_dir_fd=staging, dst_dir_fd=staging)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def dead_owner(place: StagingDirectory) -> Iterator[list[Path] | None]:
    """Yield the directories that a dead process made for a staging directory; None if it may live.

    Its lock is held for as long, so that only one process cleans up.

    Raises:
        PermissionError: nothing proves that this user made the staging directory, here.
    """
    _check_made_here(place)
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(OWNER_NAME, flags, dir_fd=place.fd)
    except FileNotFoundError:
        yield [] if _is_abandoned(place.fd) else None
        return
    try:
        fields = _owner(place, fd)
        yield _made(place, fields) if _is_ours_to_lock(fd, fields) else None
    finally:
        os.close(fd)


def _check_made_here(place: StagingDirectory) -> None:
    status = os.fstat(place.fd)
    if status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
        raise PermissionError("it is not a private directory of this user")
    drawn, mark, mtime = place.name.removeprefix(PREFIX).partition(_MTIME)
    if not is_sealed(drawn[16:], "name", drawn[:16], mark + mtime, os.fstat(place.parent).st_ino):
        raise PermissionError("its name does not prove that this user made it in this directory")


def _owner(place: StagingDirectory, fd: int) -> dict[str, object]:
    """Return the fields of an owner file.

    Raises:
        PermissionError: this user did not write it for this staging directory.
    """
    try:
        fields = json.loads(os.read(fd, _LONGEST)) if stat.S_ISREG(os.fstat(fd).st_mode) else None
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or not is_sealed(
        fields.pop("seal", None), "owner", fields, os.fstat(place.fd).st_ino
    ):
        raise PermissionError(f"its {OWNER_NAME} was not written by this user, for this directory")
    return fields


def _made(place: StagingDirectory, fields: dict[str, object]) -> list[Path]:
    made = fields["made"]
    known = {str(path) for path in made} if isinstance(made, list) else set()
    return [path for path in place.path.resolve().parents if str(path) in known]


def _is_ours_to_lock(fd: int, fields: dict[str, object]) -> bool:
    if fields["host"] != socket.gethostname():
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_abandoned(staging: int) -> bool:
    """Return whether a process died before it named itself, or after: unchanged for a minute."""
    age = time.time() - os.fstat(staging).st_mtime
    return set(os.listdir(staging)) <= {f"{OWNER_NAME}.new"} and age > _ABANDONED_AFTER_S
