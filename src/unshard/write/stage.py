"""Staging: an output is made beside its target and appears there by one rename, or not at all.

A staging directory is `_unshard-partial-<random>/` on the target's file system. In it: `owner.json`
(host, pid, start time, for people), locked as long as the owner lives, and `output/`, which becomes
the target. A later run removes the staging of an owner that is provably dead: same host, and its
lock is free (the kernel drops a dead process's locks).
"""

import errno
import fcntl
import json
import logging
import os
import secrets
import shutil
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from unshard.errors import OutputError

__all__ = ["Stage", "check_space", "check_target"]

_PREFIX = "_unshard-partial-"
_OWNER = "owner.json"
_SLACK = 1 << 20

_log = logging.getLogger(__name__)


def check_target(target: Path) -> None:
    """Refuse a target that exists, unless it is an empty directory.

    Raises:
        OutputError: it exists.
    """
    if target.is_symlink() or target.exists():
        empty = target.is_dir() and not target.is_symlink() and not any(target.iterdir())
        if not empty:
            raise OutputError(
                f"{target}: exists already", hint="give another output, or remove it first"
            )


def check_space(directory: Path, needed_bytes: int) -> None:
    """Refuse to begin what the file system cannot hold.

    Raises:
        OutputError: there is not enough free space.
    """
    stats = os.statvfs(directory)
    free = stats.f_bavail * stats.f_frsize
    if free < needed_bytes + _SLACK:
        raise OutputError(
            f"{directory}: not enough free space",
            expected=f"{needed_bytes + _SLACK:,} bytes",
            found=f"{free:,} bytes",
            hint="free some space, or give an output on another file system",
        )


class Stage:
    """A directory to fill, which `commit` turns into the target. Left without it, nothing remains.

    Args:
        target: where the output goes; parents are made (and removed again on failure).
        needed_bytes: what the output will take.

    Raises:
        OutputError: on entering: the target exists, or is not writable, or lacks space.
    """

    def __init__(self, target: Path, needed_bytes: int) -> None:
        self._target = target
        self._needed = needed_bytes
        self._made_parents: list[Path] = []
        self._root = target.parent / f"{_PREFIX}{secrets.token_hex(8)}"
        self._lock = -1

    @property
    def directory(self) -> Path:
        """Where to write the output's files."""
        return self._root / "output"

    def __enter__(self) -> Self:
        check_target(self._target)
        try:
            self._make_parents()
            _remove_dead(self._target.parent)
            check_space(self._target.parent, self._needed)
            self._root.mkdir()
            self._lock = _claim(self._root / _OWNER)
            self.directory.mkdir()
        except BaseException as error:
            self._clean_up()
            if isinstance(error, OSError):
                raise unwritable(self._target, error) from error
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._clean_up()
        if isinstance(error, OSError):
            raise unwritable(self._target, error) from error

    def commit(self) -> None:
        """Make everything durable and rename it to the target.

        Raises:
            OutputError: the target has come to exist meanwhile.
        """
        for folder, _, names in os.walk(self.directory):
            for name in names:
                sync(Path(folder) / name)
            sync(Path(folder))
        try:
            self.directory.rename(self._target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise OutputError(f"{self._target}: appeared while it was being made") from error
            raise
        self._made_parents.clear()
        sync(self._target.parent)

    def _make_parents(self) -> None:
        missing = [p for p in (self._target.parent, *self._target.parent.parents) if not p.exists()]
        for parent in reversed(missing):
            parent.mkdir(exist_ok=True)
            self._made_parents.append(parent)

    def _clean_up(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        for parent in reversed(self._made_parents):
            try:
                parent.rmdir()
            except OSError:
                break


def sync(path: Path) -> None:
    """Flush a file or directory to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def unwritable(target: Path, error: OSError) -> OutputError:
    """Return the error that says why an output could not be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return OutputError(
        f"{target}: cannot be written: {error.strerror or error}",
        hint="free some space and run it again; nothing was left behind" if full else "",
    )


def _claim(path: Path) -> int:
    """Write the owner file and lock it; return the descriptor that holds the lock."""
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": time.time()}
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    os.write(fd, json.dumps(owner).encode())
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # a file system without locks: nobody will ever call this owner dead
        _log.debug("%s cannot be locked: %s", path, error)
    return fd


def _remove_dead(parent: Path) -> None:
    """Remove the stagings of processes that died, and name those that cannot be told."""
    for root in parent.glob(_PREFIX + "*"):
        if _is_dead(root / _OWNER):
            shutil.rmtree(root, ignore_errors=True)
        else:
            _log.info("left alone: %s, whose owner may be alive", root)


def _is_dead(owner: Path) -> bool:
    try:
        fd = os.open(owner, os.O_RDWR)
    except OSError:
        return False
    try:
        fields = json.loads(os.read(fd, 65536))
        if not isinstance(fields, dict) or fields.get("host") != socket.gethostname():
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, ValueError):
        return False
    finally:
        os.close(fd)
    return True
