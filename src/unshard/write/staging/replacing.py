"""Keep in a new output what others have in the old one, also what they change in the meantime.

The new directory first gets all files that do not go. When it has taken the place of the old one,
the two are compared again: what was saved, made or removed in the old one in between is saved, made
or removed in the new one too. Where both have changed, both stay.
"""

import os
import secrets
import shutil
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import count

from unshard.write.dirfd import Identity, folder_of, identity, opened, status_of, walk
from unshard.write.staging.journal import Journal

_NOTE = "{} was saved while it was being replaced: that file is now {}"


@dataclass(frozen=True, slots=True)
class Sides:
    """Descriptors of the old directory, the new one, and one for files that are half made."""

    old: int
    new: int
    scratch: int


def carry_over(sides: Sides, *, leave: Collection[str]) -> dict[str, Identity]:
    """Give a new directory everything of an old one, but for the paths in `leave`.

    Files are hard-linked, or copied where that is impossible; `old` stays as it is. Return what was
    carried over, as it was.
    """
    carried = {}
    for path, status in _files(sides):
        if path not in leave:
            carried[path] = identity(status)
            if status_of(path, within=sides.new) is None:
                _give(sides, path)
    return carried


def settle(sides: Sides, journal: Journal) -> list[str]:
    """Repeat, after the exchange, what others have done in the old directory since.

    Return notes about files that were changed on both sides.
    """
    notes, there = [], {}
    for path, status in _files(sides):
        there[path] = now = identity(status)
        if now not in (journal.goes.get(path), journal.carried.get(path)):
            notes += _carry_again(sides, path, journal.carried.get(path))
    for path, before in journal.carried.items():
        if path not in there and _is_carried(status_of(path, within=sides.new), before):
            with folder_of(path, within=sides.new) as (folder, name):
                os.unlink(name, dir_fd=folder)  # as its owner has done in the old one
    return notes


def set_aside(directory: int, path: str, *, unless: Identity | None) -> list[str]:
    """Rename a file whose name ours takes, but not the one that may go; return a note."""
    status = status_of(path, within=directory)
    if status is None or identity(status) == unless:
        return []
    free = next(one for one in _spare(path) if status_of(one, within=directory) is None)
    with folder_of(path, within=directory) as (folder, name):
        os.rename(name, free.rpartition("/")[2], src_dir_fd=folder, dst_dir_fd=folder)
    return [_NOTE.format(path, free)]


def _files(sides: Sides) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files of `old` with their status; its directories are made in `new`."""
    for path, is_folder in walk(sides.old):
        status = status_of(path, within=sides.old)
        if status is None:  # removed in the meantime
            continue
        if not is_folder:
            yield path, status
            continue
        with folder_of(path, within=sides.new, make=True) as (folder, name):
            if status_of(name, within=folder) is None:
                os.mkdir(name, dir_fd=folder)
                with opened(name, within=folder) as fd:
                    os.fchmod(fd, stat.S_IMODE(status.st_mode))


def _carry_again(sides: Sides, path: str, carried: Identity | None) -> list[str]:
    """Give the new directory a file that is not what it was; return a note about it."""
    now = status_of(path, within=sides.old)
    for free in _spare(path):
        there = status_of(path, within=sides.new)
        if now is None or (there is not None and there.st_ino == now.st_ino):
            return []
        if there is None or _is_carried(there, carried):
            _give(sides, path)
            return []
        kept = status_of(free, within=sides.new)
        if kept is None or kept.st_ino == now.st_ino:
            break
    _give(sides, path, to=free)
    return [_NOTE.format(path, free)]


def _is_carried(status: os.stat_result | None, carried: Identity | None) -> bool:
    """Return whether a file is the one that was carried over: the same, or its copy."""
    if status is None or carried is None:
        return False
    return status.st_ino == carried[0] or identity(status)[1:] == carried[1:]


def _spare(path: str) -> Iterator[str]:
    """Yield names to keep a file under."""
    yield f"{path}.kept"
    yield from (f"{path}.kept-{number}" for number in count(2))


def _give(sides: Sides, path: str, *, to: str = "") -> None:
    """Link a file into the new directory, or copy it, in one step."""
    with (
        folder_of(path, within=sides.old) as (source, name),
        folder_of(to or path, within=sides.new, make=True) as (target, free),
    ):
        draft = secrets.token_hex(8)
        try:
            os.link(name, free, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
        except FileNotFoundError:  # removed in the meantime
            return
        except OSError:  # the name is taken, or the file system has no hard links
            _link_or_copy(source, name, sides.scratch, draft)
            os.rename(draft, free, src_dir_fd=sides.scratch, dst_dir_fd=target)


def _link_or_copy(source: int, name: str, target: int, draft: str) -> None:
    try:
        os.link(name, draft, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
    except OSError:
        _copy(source, name, target, draft)


def _copy(source: int, name: str, target: int, draft: str) -> None:
    """Copy a file with its mode and time, or a link as it is."""
    status = os.stat(name, dir_fd=source, follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(name, dir_fd=source), draft, dir_fd=target)
        return
    reading = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    writing = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with (
        os.fdopen(os.open(name, reading, dir_fd=source), "rb") as stream,
        os.fdopen(os.open(draft, writing, 0o600, dir_fd=target), "wb") as copy,
    ):
        shutil.copyfileobj(stream, copy)
        copy.flush()
        os.fsync(copy.fileno())
        os.fchmod(copy.fileno(), stat.S_IMODE(status.st_mode))
        os.utime(copy.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
