"""Files beneath a directory that is held open: by names without a slash, and no link is followed.

Whatever the paths of a directory are made to mean meanwhile, these steps stay inside it.
"""

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath

__all__ = [
    "check_path",
    "folder_of",
    "open_directory",
    "opened",
    "read_file",
    "remove",
    "status_of",
    "walk",
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
        OSError: there is no such directory.
    """
    (single,) = check_path(name)
    return os.open(single, _DIRECTORY, dir_fd=within)


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
    fd = os.dup(within)
    try:
        for folder in folders:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(folder, dir_fd=fd)
            inner = open_directory(folder, within=fd)
            os.close(fd)
            fd = inner
        yield fd, name
    finally:
        os.close(fd)


def status_of(path: str, *, within: int) -> os.stat_result | None:
    """Return the status of a file, or of the link itself; None where there is nothing."""
    try:
        with folder_of(path, within=within) as (folder, name):
            return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_file(
    name: str, *, within: int, check: Callable[[os.stat_result], None] = lambda _status: None
) -> bytes:
    """Return what a small regular file contains.

    Args:
        name: of the file.
        within: the directory that holds it.
        check: called with the status of the open file; what it raises is raised.

    Raises:
        OSError: it is missing, a link, not a regular file, or larger than 64 MiB.
    """
    (single,) = check_path(name)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(single, flags, dir_fd=within), "rb") as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LONGEST:
            raise PermissionError(f"{name} is not a small regular file")
        check(status)
        return stream.read(_LONGEST)


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
