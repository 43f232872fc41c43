"""Directories and small files that we keep in a run's `_unshard`, where others may have put theirs.

A run may have been copied or unpacked from elsewhere, and other users may write to it. Directories
are therefore opened from the run downwards, one name at a time, without following links, and are
used through their descriptors. Only regular files are read, up to a bound. A record of ours names
its own inode, which an archive or a copy cannot do; whatever does not is left alone. Devices are
not compared: their numbers change when a disk is mounted again.
"""

import errno
import json
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

__all__ = [
    "STATE",
    "Record",
    "empty",
    "left_alone",
    "names_in",
    "open_regular",
    "opened",
    "opened_in",
    "read_record",
    "write_record",
]

STATE = "_unshard"
"""The directory of a run that holds everything of ours."""

_MOST_BYTES = 64 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_INODE = "inode"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Record:
    """What a file says; `is_ours`: this user wrote it, here."""

    fields: dict[str, object]
    is_ours: bool


@contextmanager
def opened(run: Path, *names: str, make: bool = False) -> Iterator[int]:
    """Yield the descriptor of a directory inside a run; the mtime of the run stays.

    Args:
        run: the run's directory, which may be reached by links.
        names: of the directories on the way, the last one included.
        make: whether to make those that are missing.

    Raises:
        OSError: it is missing, or one of the names is a link or a file.
    """
    folder, place = os.open(run, _FOLDER), run
    try:
        for name in names:
            place = place / name
            if make:
                _make(folder, name)
            inner = _open_folder(folder, place)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


@contextmanager
def opened_in(folder: int, place: Path) -> Iterator[int]:
    """Yield the descriptor of the directory `place`, whose parent is `folder`.

    Raises:
        OSError: it is missing, a link or a file.
    """
    inner = _open_folder(folder, place)
    try:
        yield inner
    finally:
        os.close(inner)


def _open_folder(folder: int, place: Path) -> int:
    try:
        return os.open(place.name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            why = "not a directory; links are not followed here"
            raise OSError(errno.ELOOP, why, str(place)) from error
        raise OSError(error.errno, error.strerror, str(place)) from error


def _make(folder: int, name: str) -> None:
    before = os.fstat(folder)
    try:
        os.mkdir(name, dir_fd=folder)
    except FileExistsError:
        return
    if name == STATE:  # trainers remove the run or checkpoint that is "oldest" by its mtime
        os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))


def open_regular(path: Path | str, flags: int, *, folder: int | None = None) -> int:
    """Open a regular file that is not a link; return its descriptor.

    Args:
        path: of the file, or its name in `folder`.
        flags: of open(2).
        folder: the descriptor of the directory that holds it.

    Raises:
        OSError: it is missing, a link, a pipe, or anything else that is not a regular file.
    """
    # Without O_NONBLOCK opening a pipe would wait for its other end.
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(path, flags, 0o666, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_record(folder: int, name: str) -> Record:
    """Return what a file of JSON says.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
        ValueError, TypeError: it is too large, or not a JSON object.
    """
    with os.fdopen(open_regular(name, os.O_RDONLY, folder=folder), "rb") as file:
        status = os.fstat(file.fileno())
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"more than {_MOST_BYTES} bytes")
    try:
        fields = json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(fields, dict):
        raise TypeError("not a JSON object")
    is_written_here = fields.pop(_INODE, None) == status.st_ino
    return Record(fields, is_written_here and status.st_uid == os.geteuid())


def write_record(folder: int, name: str, fields: Mapping[str, object]) -> None:
    """Write a record of ours in one step: it is whole or not there."""
    draft = f".{name}-{secrets.token_hex(4)}.partial"
    file = open_regular(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder=folder)
    try:
        with os.fdopen(file, "w", encoding="utf-8") as stream:
            stream.write(json.dumps({**fields, _INODE: os.fstat(file).st_ino}))
        os.replace(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft, dir_fd=folder)
        raise


def names_in(folder: int) -> list[str]:
    """Return the names in a directory, in order."""
    return sorted(os.listdir(folder))


def empty(folder: int, *, last: str) -> None:
    """Remove everything in a directory, the file `last` after all others; links as such."""
    for name in sorted(names_in(folder), key=lambda name: name == last):
        try:
            os.unlink(name, dir_fd=folder)
        except (IsADirectoryError, PermissionError):  # macOS says the latter
            shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
        except FileNotFoundError:
            continue  # another process removes it, too


@lru_cache(maxsize=1000)
def left_alone(what: str) -> None:
    """Log once that something is not touched."""
    log.warning("%s; left alone", what)
