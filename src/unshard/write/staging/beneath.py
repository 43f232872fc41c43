"""Files beneath a directory that is held open: by names without a slash, and no link is followed.

Even if another process renames or replaces directories in the meantime, these steps stay inside it.
Staging and recovery work this way, and so does everything in a run's `_unshard`.
"""

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO

__all__ = [
    "check_path",
    "folder_of",
    "names_in",
    "open_directory",
    "open_inside",
    "open_regular",
    "opened",
    "read_file",
    "read_with_status",
    "remove",
    "status_of",
    "walk",
    "whole_file",
]

_LONGEST = 64 << 20
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def check_path(path: str) -> tuple[str, ...]:
    """Return the names that a relative path consists of.

    Raises:
        ValueError: one of them is not the name of a file or directory.
    """
    names = tuple(path.split("/"))
    if any(name in {"", ".", ".."} or "\0" in name for name in names):
        raise ValueError(f"{path!r} is not a path inside a directory")
    return names


def open_directory(name: str, *, within: int) -> int:
    """Open a directory; a link to one is refused.

    Raises:
        OSError: there is no such directory (ENOENT), or it is a link or something else (ELOOP).
    """
    (single,) = check_path(name)
    try:
        return os.open(single, _DIRECTORY, dir_fd=within)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):  # which one depends on the system
            raise
        why = "not a directory; links are not followed here"
        raise OSError(errno.ELOOP, why, name) from error


def open_inside(names: Sequence[str], *, within: int, make: bool = False) -> int:
    """Open a directory inside another, one name after the other.

    Args:
        names: of the directories on the way, the last one included; none for `within` itself.
        within: where it begins.
        make: make the directories that are missing.

    Raises:
        OSError: see `open_directory`; `filename` is the path from `within` to the one that failed.
    """
    fd, passed = os.dup(within), PurePosixPath()
    try:
        for name in names:
            passed /= name
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=fd)
            inner = open_directory(name, within=fd)
            os.close(fd)
            fd = inner
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError):
            error.filename = str(passed)
        raise
    return fd


@contextmanager
def opened(name: str, *, within: int) -> Iterator[int]:
    """Yield the descriptor of a directory, as `open_directory` opens it."""
    fd = open_directory(name, within=within)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def folder_of(path: str, *, within: int, make: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the directory that holds `path`, and the last name of the path.

    Args:
        path: relative to `within`; every directory in it is opened by itself.
        within: where it begins.
        make: make the directories that are missing.

    Raises:
        OSError: a directory is missing, or a link, or something else.
    """
    *folders, name = check_path(path)
    fd = open_inside(folders, within=within, make=make)
    try:
        yield fd, name
    finally:
        os.close(fd)


def status_of(path: str, *, within: int) -> os.stat_result | None:
    """Return the status of a file, or of the link itself; None where there is nothing."""
    try:
        with folder_of(path, within=within) as (folder, name):
            return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        return None


def open_regular(path: Path | str, flags: int, *, within: int | None = None) -> int:
    """Open a regular file that is not a link; return its descriptor.

    Args:
        path: of the file, or its name in `within`.
        flags: of open(2).
        within: the directory that holds it.

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


@contextmanager
def whole_file(name: str, *, within: int, durable: bool) -> Iterator[BinaryIO]:
    """Yield a new file that takes its name in one step, when it is complete.

    Args:
        name: of the file; an earlier one is replaced.
        within: the directory.
        durable: flush the file to disk before it takes its name.

    Raises:
        OSError: it cannot be written; nothing is left of it.
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


def read_file(name: str, *, within: int) -> bytes:
    """Return what a small regular file contains: see `read_with_status`."""
    return read_with_status(name, within=within)[0]


def read_with_status(name: str, *, within: int) -> tuple[bytes, os.stat_result]:
    """Return what a small regular file contains, and its status.

    Raises:
        OSError: it is missing, a link, not a regular file, or larger than 64 MiB.
    """
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
    """Remove a file, or a directory with all it contains.

    Raises:
        OSError: something is left.
    """
    status = status_of(name, within=within)
    if status is None:
        return
    if stat.S_ISDIR(status.st_mode):
        shutil.rmtree(name, ignore_errors=True, dir_fd=within)
        if status_of(name, within=within) is not None:
            raise OSError(errno.ENOTEMPTY, "not all of it can be removed", name)
    else:
        os.unlink(name, dir_fd=within)
