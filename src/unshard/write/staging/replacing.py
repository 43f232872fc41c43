"""Keep other processes' files of the old output in the new one, including concurrent changes.

The new directory first gets all files that stay. After the swap the two are compared again: a file
that was saved, created or removed in the old directory meanwhile is saved, created or removed in
the new one too. If both have changed, both stay.
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
    """Descriptors of the old directory, the new one, and one for incomplete copies."""

    old: int
    new: int
    scratch: int


def carry_over(sides: Sides, *, leave: Collection[str]) -> dict[str, Identity]:
    """Add all files of the old directory to the new one, except the paths in `leave`.

    Files are hard-linked, or copied where that is impossible. Return the identities of the files.
    """
    carried = {}
    for path, status in _files(sides):
        if path not in leave:
            carried[path] = identity(status)
            if status_of(path, within=sides.new) is None:
                _give(sides, path)
    return carried


def settle(sides: Sides, journal: Journal) -> list[str]:
    """After the swap, repeat the changes that others have made in the old directory since.

    Return notes about files that were changed on both sides.
    """
    notes, existing = [], set()
    for path, status in _files(sides):
        existing.add(path)
        if identity(status) not in (journal.goes.get(path), journal.carried.get(path)):
            notes += _carry_again(sides, path, journal.carried.get(path))
    for path, before in journal.carried.items():
        if path not in existing and _is_carried(status_of(path, within=sides.new), before):
            with folder_of(path, within=sides.new) as (folder, name):
                os.unlink(name, dir_fd=folder)  # its owner removed it from the old directory
    return notes


def set_aside(directory: int, path: str, *, unless: Identity | None) -> list[str]:
    """Rename a file at our path, unless it has the identity `unless`; return a note."""
    status = status_of(path, within=directory)
    if status is None or identity(status) == unless:
        return []
    free = next(name for name in _spare(path) if status_of(name, within=directory) is None)
    with folder_of(path, within=directory) as (folder, name):
        os.rename(name, free.rpartition("/")[2], src_dir_fd=folder, dst_dir_fd=folder)
    return [_NOTE.format(path, free)]


def _files(sides: Sides) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files of `old` with their status; create its directories in `new`."""
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
    """Add a changed file to the new directory; return a note if its name is taken there."""
    old = status_of(path, within=sides.old)
    for free in _spare(path):
        new = status_of(path, within=sides.new)
        if old is None or (new is not None and new.st_ino == old.st_ino):
            return []
        if new is None or _is_carried(new, carried):
            _give(sides, path)
            return []
        spare = status_of(free, within=sides.new)
        if spare is None or spare.st_ino == old.st_ino:
            break
    _give(sides, path, to=free)
    return [_NOTE.format(path, free)]


def _is_carried(status: os.stat_result | None, carried: Identity | None) -> bool:
    """Return whether a file was carried over, as a link or a copy."""
    if status is None or carried is None:
        return False
    return status.st_ino == carried[0] or identity(status)[1:] == carried[1:]


def _spare(path: str) -> Iterator[str]:
    """Yield spare names for a file."""
    yield f"{path}.kept"
    yield from (f"{path}.kept-{number}" for number in count(2))


def _give(sides: Sides, path: str, *, to: str = "") -> None:
    """Link or copy a file into the new directory, atomically."""
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
            scratch = sides.scratch
            try:
                os.link(name, draft, src_dir_fd=source, dst_dir_fd=scratch, follow_symlinks=False)
            except OSError:
                _copy(source, name, scratch, draft)
            os.rename(draft, free, src_dir_fd=scratch, dst_dir_fd=target)


def _copy(source: int, name: str, target: int, draft: str) -> None:
    """Copy a file with its mode and time, or a symbolic link."""
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
