"""Files below a directory of a node, for the other nodes of its Ray cluster.

`NodeFiles` is an actor of Ray on each node. This module does not import Ray.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, TypeVar

from unshard import __version__

_DIGESTED = 1 << 20
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW

_T = TypeVar("_T")


class NodeFile(NamedTuple):
    """A file, as its node has it.

    Attributes:
        size: bytes.
        modified: when it was last written, nanoseconds since 1970.
        stamp: changes if the file is replaced or written to.
    """

    size: int
    modified: int
    stamp: str


class Copy(NamedTuple):
    """A file of one name on one of the nodes that have it.

    Attributes:
        node: Ray's id of the node.
        root: the directory that a user gave, which it is in.
        size: bytes.
        stamp: as that of a `NodeFile`.
    """

    node: str
    root: str
    size: int
    stamp: str


class Hello(NamedTuple):
    """What an actor finds where it is.

    Attributes:
        version: of the unshard there.
        kind: what the path is that it was given: "file", "directory", or "" if there is nothing.
    """

    version: str
    kind: str


class NodeFiles:
    """Lists and reads what is below a root, a directory, and follows no link that leads out of it.

    Its methods are called from several threads. They return errors of the system.
    """

    def hello(self, root: str) -> Hello:
        """Return what is here."""
        kind = "directory" if Path(root).is_dir() else "file" * Path(root).is_file()
        return Hello(__version__, kind)

    def listing(self, root: str, path: str) -> dict[str, NodeFile | None] | OSError:
        """Return what is directly in a directory, by name: files, and None for each directory.

        It is empty if there is no such directory. A link out of the root is a file that cannot be
        read.
        """
        return _or_error(partial(_list, root, path))

    def read(self, root: str, path: str, stamp: str, start: int, length: int) -> bytes | OSError:
        """Return bytes of a file, fewer at its end; ESTALE if it is another one now."""
        return _or_error(partial(_read, root, path, stamp, start, length))

    def digest(self, root: str, path: str, stamp: str) -> str | OSError:
        """Return a digest of all bytes of a file."""
        return _or_error(partial(_digest, root, path, stamp))


def _list(root: str, path: str) -> dict[str, NodeFile | None]:
    try:
        with _opened(root, path, _FOLDER) as fd, os.scandir(fd) as entries:
            listed = {entry.name: _entry(root, path, entry) for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return {name: one for name, one in listed.items() if not isinstance(one, bool)}


def _entry(root: str, path: str, entry: "os.DirEntry[str]") -> NodeFile | bool | None:
    """Return a file, None for a directory, or False for what is neither."""
    try:
        if entry.is_symlink() and not _is_inside(os.path.realpath(f"{path}/{entry.name}"), root):
            return _described(entry.stat(follow_symlinks=False))
        status = entry.stat()
    except FileNotFoundError:  # a link to nothing, or it was removed just now
        return False
    if stat.S_ISDIR(status.st_mode):
        return None
    return stat.S_ISREG(status.st_mode) and _described(status)


def _read(root: str, path: str, stamp: str, start: int, length: int) -> bytes:
    with _opened(root, path, _FILE) as fd:
        _check(fd, stamp)
        return os.pread(fd, length, start)


def _digest(root: str, path: str, stamp: str) -> str:
    found = blake2b(digest_size=32)
    with _opened(root, path, _FILE) as fd:
        _check(fd, stamp)
        while block := os.read(fd, _DIGESTED):
            found.update(block)
        _check(fd, stamp)
    return found.hexdigest()


def _is_inside(real: str, root: str) -> bool:
    return Path(real).is_relative_to(os.path.realpath(root))


@contextmanager
def _opened(root: str, path: str, flags: int) -> Iterator[int]:
    """Open what a path leads to, if that is below the root; then no link is followed any more.

    Raises:
        PermissionError: it is not.
        OSError: it cannot be opened.
    """
    real = os.path.realpath(path)
    if not _is_inside(real, root):
        raise PermissionError(errno.EPERM, f"is a link that leads out of {root}", path)
    root = os.path.realpath(root)
    fd = os.open(root, _FOLDER)
    try:
        *way, last = (".", *Path(real).relative_to(root).parts)
        for name, kind in (*((name, _FOLDER) for name in way), (last, flags)):
            inner = os.open(name, kind, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def read_here(path: str, stamps: set[str], start: int, length: int) -> bytes | None:
    """Return bytes of a file, as an actor does, if this process sees it; else None.

    Inode, size and time distinguish a file from every other one, wherever that is.
    """
    try:
        fd = os.open(path, _FILE)
    except OSError:
        return None
    try:
        return os.pread(fd, length, start) if _stamp_of(os.fstat(fd)) in stamps else None
    except OSError:
        return None
    finally:
        os.close(fd)


def _check(fd: int, stamp: str) -> None:
    if _stamp_of(os.fstat(fd)) != stamp:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def _described(status: os.stat_result) -> NodeFile:
    return NodeFile(status.st_size, status.st_mtime_ns, _stamp_of(status))


def _stamp_of(status: os.stat_result) -> str:
    return f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"


def _or_error(answer: Callable[[], _T]) -> _T | OSError:
    try:
        return answer()
    except OSError as error:
        return error
