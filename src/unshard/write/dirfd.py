"""Steps on files beneath a directory that is held open; no link is followed.

Even if another process renames or replaces directories in the meantime, these steps stay inside it.
Staging and recovery work this way, and so does everything in a run's `_unshard`.
"""

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypeVar
from weakref import WeakSet

_LONGEST = 64 << 20
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_RENAME_EXCHANGE = 2
_RENAME_SWAP = 2
_NO_EXCHANGE = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP})

_Lock = TypeVar("_Lock", FileIO, ExitStack)
_held: WeakSet[FileIO | ExitStack] = WeakSet()
os.register_at_fork(after_in_child=lambda: [lock.close() for lock in list(_held)])

Identity = tuple[int, int, int]
"""What distinguishes a file from a later one of its name: inode, bytes, modification time in ns."""


def check_path(path: str) -> tuple[str, ...]:
    """Return the names that a relative path consists of; ValueError if one is not a plain name."""
    names = tuple(path.split("/"))
    if any(name in {"", ".", ".."} or "\0" in name for name in names):
        raise ValueError(f"{path!r} is not a path inside a directory")
    return names


def open_inside(names: Sequence[str], *, within: int, make: bool = False) -> int:
    """Open a directory inside another, one name after the other; `make` makes those missing.

    Raises:
        OSError: one is missing (ENOENT), or is a link or something else (ELOOP); `filename` is the
            path from `within` to it.
    """
    fd, passed = os.dup(within), PurePosixPath()
    try:
        for name in names:
            (single,) = check_path(name)
            passed /= single
            if make:
                with suppress(FileExistsError):
                    os.mkdir(single, dir_fd=fd)
            inner = os.open(single, _DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = inner
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.ELOOP, errno.ENOTDIR):  # which one depends on the system
            why = "not a directory; links are not followed here"
            raise OSError(errno.ELOOP, why, str(passed)) from error
        error.filename = str(passed)
        raise
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def closing(fd: int) -> Iterator[int]:
    """Yield a descriptor, and close it in the end."""
    try:
        yield fd
    finally:
        os.close(fd)


def opened(*names: str, within: int, make: bool = False) -> AbstractContextManager[int]:
    """Yield the descriptor of a directory, as `open_inside` opens it."""
    return closing(open_inside(names, within=within, make=make))


@contextmanager
def folder_of(path: str, *, within: int, make: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the directory that holds a path, as `open_inside` opens it, and the last name."""
    *folders, name = check_path(path)
    with opened(*folders, within=within, make=make) as fd:
        yield fd, name


def status_of(path: str, *, within: int) -> os.stat_result | None:
    """Return the status of a file, or of the link itself; None where there is nothing."""
    try:
        with folder_of(path, within=within) as (folder, name):
            return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        return None


def identity(status: os.stat_result) -> Identity:
    """Return what changes if a file is replaced, or rewritten in place."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def open_regular(path: Path | str, flags: int, *, within: int | None = None) -> int:
    """Open a regular file by its path, or by its name in `within`; `flags` are those of open(2).

    Raises:
        OSError: it is missing, a link, a pipe, or anything else that is not a regular file.
    """
    if within is not None:
        (path,) = check_path(str(path))
    # Without O_NONBLOCK opening a pipe would wait for its other end.
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, 0o666, dir_fd=within)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def try_lock(fd: int) -> bool:
    """Lock an open file or directory; return False if another process has locked it.

    The lock is released when the file is closed, however its process ends.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def hold(lock: _Lock) -> _Lock:
    """Return a file to lock, or what closes one, which every fork of this process closes at once.

    A fork inherits locks, and would go on holding those of a parent that is killed.
    """
    _held.add(lock)
    return lock


@contextmanager
def whole_file(name: str, *, within: int, durable: bool) -> Iterator[BinaryIO]:
    """Yield a new file that takes its name, also from an earlier one, when it is complete.

    A durable one is flushed to disk before. If it cannot be written, nothing is left of it.
    """
    draft = f".{name}-{secrets.token_hex(4)}.partial"
    fd = open_regular(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, within=within)
    try:
        with os.fdopen(fd, "wb") as stream:
            yield stream
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        os.rename(draft, name, src_dir_fd=within, dst_dir_fd=within)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft, dir_fd=within)
        raise


def write_whole(path: Path, data: bytes) -> None:
    """Write a file durably in one step: readers find all of it, or what was there before."""
    with (
        closing(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as folder,
        whole_file(path.name, within=folder, durable=True) as file,
    ):
        file.write(data)


def sync(path: Path) -> None:
    """Flush a file or a directory to disk."""
    with closing(os.open(path, os.O_RDONLY)) as fd:
        os.fsync(fd)


def sync_tree(root: Path) -> None:
    """Flush every file and directory below `root`, and `root`, to disk."""
    for folder, _, names in os.walk(root, topdown=False):
        paths = [Path(folder, name) for name in names]
        for path in (*(one for one in paths if not one.is_symlink()), Path(folder)):
            sync(path)


def exchange(first: int, first_name: str, second: int, second_name: str) -> bool:
    """Swap two directories in one atomic step; return False where the system cannot.

    Each is named by the descriptor of the directory that holds it, and its name there.
    Sources: renameat2(2) with RENAME_EXCHANGE on Linux, renameatx_np(2) with RENAME_SWAP on macOS.
    """
    paths = first, os.fsencode(first_name), second, os.fsencode(second_name)
    library = ctypes.CDLL(None, use_errno=True)
    try:
        if sys.platform == "darwin":
            result = library.renameatx_np(*paths, _RENAME_SWAP)
        else:
            result = library.renameat2(*paths, _RENAME_EXCHANGE)
    except AttributeError:
        return False
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), first_name, None, second_name)


def read_file(name: str, *, within: int) -> bytes:
    """Return what a regular file of at most 64 MiB contains."""
    return read_with_status(name, within=within)[0]


def read_with_status(name: str, *, within: int) -> tuple[bytes, os.stat_result]:
    """Return what a regular file of at most 64 MiB contains, and its status."""
    with os.fdopen(open_regular(name, os.O_RDONLY, within=within), "rb") as stream:
        status = os.fstat(stream.fileno())
        if status.st_size > _LONGEST:
            raise OSError(errno.EFBIG, f"more than {_LONGEST} bytes", name)
        return stream.read(_LONGEST), status


def names_in(directory: int) -> list[str]:
    """Return the names in a directory, in order."""
    return sorted(os.listdir(directory))


def walk(directory: int, before: str = "") -> Iterator[tuple[str, bool]]:
    """Yield every path in a directory, sorted, and whether it is a directory, which comes first."""
    with os.scandir(directory) as entries:
        found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
    for name, is_folder in found:
        path = str(PurePosixPath(before, name))
        yield path, is_folder
        if is_folder:
            with opened(name, within=directory) as inner:
                yield from walk(inner, path)


def remove(name: str, *, within: int) -> None:
    """Remove a file, or a directory with all it contains; OSError if something is left."""
    status = status_of(name, within=within)
    if status is None:
        return
    if stat.S_ISDIR(status.st_mode):
        shutil.rmtree(name, ignore_errors=True, dir_fd=within)
        if status_of(name, within=within) is not None:
            raise OSError(errno.ENOTEMPTY, "not all of it can be removed", name)
    else:
        os.unlink(name, dir_fd=within)
