"""Read files below a directory of a node, for the other nodes of its Ray cluster.

`NodeFiles` is the class of a Ray actor on each node. This module does not import Ray.
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
    """A file on its node.

    Attributes:
        size: bytes.
        modified: time of the last write, nanoseconds since 1970.
        stamp: changes if the file is replaced or written to.
    """

    size: int
    modified: int
    stamp: str


class Copy(NamedTuple):
    """A file on one of the nodes that have a file of its name.

    Attributes:
        node: Ray's id of the node.
        root: the user's directory that contains the file.
        size: bytes.
        stamp: as of `NodeFile`.
    """

    node: str
    root: str
    size: int
    stamp: str


class Handshake(NamedTuple):
    """The first answer of an actor.

    Attributes:
        version: the version of unshard on its node.
        kind: "file" or "directory" for the path in the question, "" if it does not exist.
    """

    version: str
    kind: str


class NodeFiles:
    """Lists and reads files below a root directory, without links that lead out of it.

    Thread-safe. Methods return errors of the system.
    """

    def hello(self, root: str) -> Handshake:
        """Return version and kind of a path."""
        kind = "directory" if Path(root).is_dir() else "file" * Path(root).is_file()
        return Handshake(__version__, kind)

    def listing(self, root: str, path: str) -> dict[str, NodeFile | None] | OSError:
        """Return the files of a directory by name, and None for each directory in it.

        The result is empty for a missing directory. A link out of the root is listed as a file, but
        cannot be read.
        """
        return _or_error(partial(_list, root, path))

    def read(self, root: str, path: str, stamp: str, start: int, length: int) -> bytes | OSError:
        """Return bytes of a file, fewer at its end; ESTALE if the file has changed."""
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
    return {name: file for name, file in listed.items() if not isinstance(file, bool)}


def _entry(root: str, path: str, entry: "os.DirEntry[str]") -> NodeFile | bool | None:
    """Return a file, None for a directory, or False for any other entry."""
    try:
        if entry.is_symlink() and not _is_inside(os.path.realpath(f"{path}/{entry.name}"), root):
            return _described(entry.stat(follow_symlinks=False))
        status = entry.stat()
    except FileNotFoundError:  # a broken link, or the entry was just removed
        return False
    if stat.S_ISDIR(status.st_mode):
        return None
    return stat.S_ISREG(status.st_mode) and _described(status)


def _read(root: str, path: str, stamp: str, start: int, length: int) -> bytes:
    with _opened(root, path, _FILE) as fd:
        _check(fd, stamp)
        return os.pread(fd, length, start)


def _digest(root: str, path: str, stamp: str) -> str:
    digest = blake2b(digest_size=32)
    with _opened(root, path, _FILE) as fd:
        _check(fd, stamp)
        while block := os.read(fd, _DIGESTED):
            digest.update(block)
        _check(fd, stamp)
    return digest.hexdigest()


def _is_inside(real: str, root: str) -> bool:
    return Path(real).is_relative_to(os.path.realpath(root))


@contextmanager
def _opened(root: str, path: str, flags: int) -> Iterator[int]:
    """Open the target of a path, which must be below the root.

    Opens each directory without following links, because a link may be created after the check.

    Raises:
        PermissionError: the target is not below the root.
        OSError: it cannot be opened.
    """
    real = os.path.realpath(path)
    if not _is_inside(real, root):
        raise PermissionError(errno.EPERM, f"is a link that leads out of {root}", path)
    root = os.path.realpath(root)
    fd = os.open(root, _FOLDER)
    try:
        *folders, last = (".", *Path(real).relative_to(root).parts)
        for name, kind in (*((name, _FOLDER) for name in folders), (last, flags)):
            inner = os.open(name, kind, dir_fd=fd)
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def read_here(path: str, stamps: set[str], start: int, length: int) -> bytes | None:
    """Return bytes of a file, as an actor does, if this process can read it; else None.

    Inode, size and time identify the file on any file system.
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
