"""File operations relative to an open directory; links are not followed.

They stay inside that directory even if another process renames or replaces directories meanwhile.
Staging, recovery, and everything in a run's `_unshard` use them.
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
"""Inode, bytes, and modification time in ns: they tell a file from a later file of its name."""


def check_path(path: str) -> tuple[str, ...]:
    """Split a relative path into names; ValueError if one is not a plain name."""
    names = tuple(path.split("/"))
    if any(name in {"", ".", ".."} or "\0" in name for name in names):
        raise ValueError(f"{path!r} is not a path inside a directory")
    return names


def open_inside(names: Sequence[str], *, within: int, make: bool = False) -> int:
    """Open a directory inside another, name by name; with `make`, create missing directories.

    Raises:
        OSError: a name is missing (ENOENT), or is not a directory (ELOOP); `filename` is its path
            from `within`.
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
        if error.errno in (errno.ELOOP, errno.ENOTDIR):  # for a link, this depends on the system
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
    """Yield a descriptor, and close it afterwards."""
    try:
        yield fd
    finally:
        os.close(fd)


def opened(*names: str, within: int, make: bool = False) -> AbstractContextManager[int]:
    """Yield the descriptor of a directory, as `open_inside` opens it."""
    return closing(open_inside(names, within=within, make=make))


@contextmanager
def folder_of(path: str, *, within: int, make: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the descriptor of a path's parent, as `open_inside` opens it, and the last name."""
    *folders, name = check_path(path)
    with opened(*folders, within=within, make=make) as fd:
        yield fd, name


def status_of(path: str, *, within: int) -> os.stat_result | None:
    """Return the status of a file, or of the link itself; None if it does not exist."""
    try:
        with folder_of(path, within=within) as (folder, name):
            return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        return None


def identity(status: os.stat_result) -> Identity:
    """Return a value that changes when a file is replaced or rewritten."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def open_regular(path: Path | str, flags: int, *, within: int | None = None) -> int:
    """Open a regular file by its path, or by its name in `within`, with the flags of open(2).

    Raises:
        OSError: it is missing, or is not a regular file (a link, a pipe).
    """
    if within is not None:
        (path,) = check_path(str(path))
    # Without O_NONBLOCK, opening a pipe would wait for its other end.
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, 0o666, dir_fd=within)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def try_lock(fd: int) -> bool:
    """Lock an open file or directory; return False if another process holds the lock.

    The kernel releases it when the file is closed or the process ends, however it ends.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def hold(lock: _Lock) -> _Lock:
    """Close a file to lock, or the stack that closes it, in every fork of this process; return it.

    A fork inherits locks, and would still hold them after its parent was killed.
    """
    _held.add(lock)
    return lock


@contextmanager
def whole_file(name: str, *, within: int, durable: bool) -> Iterator[BinaryIO]:
    """Yield a new file, renamed to `name` when it is complete; replaces an earlier file.

    With `durable`, flush it to disk before. On an error, remove it.
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
    """Write a file durably and atomically: readers find the old or the new content."""
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
        for path in (Path(folder, name) for name in names):
            if not path.is_symlink():
                sync(path)
        sync(Path(folder))


def exchange(first: int, first_name: str, second: int, second_name: str) -> bool:
    """Swap two directories atomically; return False if the system cannot.

    Each is given by its parent's descriptor and its name. Sources: renameat2(2) with
    RENAME_EXCHANGE on Linux, renameatx_np(2) with RENAME_SWAP on macOS.
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
    """Return the content of a regular file of at most 64 MiB."""
    return read_with_status(name, within=within)[0]


def read_with_status(name: str, *, within: int) -> tuple[bytes, os.stat_result]:
    """Return the content of a regular file of at most 64 MiB, and its status."""
    with os.fdopen(open_regular(name, os.O_RDONLY, within=within), "rb") as stream:
        status = os.fstat(stream.fileno())
        if status.st_size > _LONGEST:
            raise OSError(errno.EFBIG, f"more than {_LONGEST} bytes", name)
        return stream.read(_LONGEST), status


def names_in(directory: int) -> list[str]:
    """Return the sorted names in a directory."""
    return sorted(os.listdir(directory))


def walk(directory: int, before: str = "") -> Iterator[tuple[str, bool]]:
    """Yield every path below a directory, sorted, parents first, and whether it is a directory."""
    with os.scandir(directory) as scan:
        entries = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in scan)
    for name, is_folder in entries:
        path = str(PurePosixPath(before, name))
        yield path, is_folder
        if is_folder:
            with opened(name, within=directory) as inner:
                yield from walk(inner, path)


def remove(name: str, *, within: int) -> None:
    """Remove a file, or a directory with its content; OSError if something is left."""
    status = status_of(name, within=within)
    if status is None:
        return
    if stat.S_ISDIR(status.st_mode):
        shutil.rmtree(name, ignore_errors=True, dir_fd=within)
        if status_of(name, within=within) is not None:
            raise OSError(errno.ENOTEMPTY, "not all of it can be removed", name)
    else:
        os.unlink(name, dir_fd=within)
