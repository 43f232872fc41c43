"""Open files, local or in a bucket, and caches of open files for one or several threads."""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import LifoQueue
from threading import Lock
from typing import Self

from unshard.containers.file_states import FileStates, check_regular, noted_here
from unshard.errors import CorruptError, UsageError
from unshard.stores import gone
from unshard.stores.remote_file import RemoteFile
from unshard.stores.remote_path import RemotePath

AT_ONCE = 8
"""How many threads read from `LentFiles` at the same time by default."""
_OPEN_FILES = 32  # per thread
_AHEAD = 2048  # reads that are announced together, before the first is made
_CAN_ADVISE = hasattr(os, "posix_fadvise")  # not on macOS
_BLOCK = 1 << 30  # Linux reads up to 2 GiB at a time

Opened = int | RemoteFile
"""An open file to read: a descriptor, or an object in a bucket."""

Pread = Callable[[int, int], bytes]


@contextmanager
def opened(path: Path) -> Iterator[Opened]:
    """Open a regular file for reading.

    Raises:
        OSError: it cannot be opened, or is not a regular file.
        CorruptError: it has changed since `file_states.noting` recorded it.
    """
    if isinstance(path, RemotePath):
        file = path.opened()
        try:
            _see(path, file, noted_here())
            yield file
        finally:
            file.close()
        return
    check_regular(path)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        _see(path, fd, noted_here())
        yield fd
    finally:
        os.close(fd)


def read_whole(path: Path) -> bytes:
    """Return all bytes of a file; errors as of `opened`."""
    with opened(path) as file:
        whole, size = bytearray(), size_of(file)
        while block := pread(file, min(size - len(whole), _BLOCK), len(whole)):
            whole += block
    return bytes(whole)


def _see(path: Path, file: Opened, states: FileStates | None) -> None:
    if states is not None:
        states.see(path, lambda: file.status if isinstance(file, RemoteFile) else os.fstat(file))


def size_of(file: Opened) -> int:
    """Return the size of an open file, bytes."""
    return file.size if isinstance(file, RemoteFile) else os.fstat(file).st_size


def pread(file: Opened, count: int, at: int) -> bytes:
    """Return `count` bytes from `at` on, or fewer at the end of the file, as `os.pread` does."""
    return preader(file)(count, at)


def preader(file: Opened) -> Pread:
    """Return a function of count and offset that returns bytes, as `os.pread` does."""
    return file.pread if isinstance(file, RemoteFile) else partial(os.pread, file)


def pread_many(file: Opened, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Return the bytes of many ranges (count, offset); a bucket merges neighbouring ranges."""
    if isinstance(file, RemoteFile):
        return file.pread_many(ranges)
    blocks: list[bytes] = []
    for start in range(0, len(ranges), _AHEAD):
        part = ranges[start : start + _AHEAD]
        # A cold disk serves announced reads in parallel instead of one after another.
        for count, at in part if len(part) > 1 and _CAN_ADVISE else ():
            os.posix_fadvise(file, at, count, os.POSIX_FADV_WILLNEED)
        blocks += [os.pread(file, count, at) for count, at in part]
    return blocks


def name_of(file: Opened) -> str:
    """Return the path of an open file, for messages."""
    if isinstance(file, RemoteFile):
        return file.name
    try:
        return str(Path(f"/proc/self/fd/{file}").readlink())
    except OSError:
        return "a source file"


class OpenFiles:
    """Descriptors by path, opened with `flags` on first use. For one thread.

    At most `limit` are open at a time, at least 1. Files are compared with their `states`, by
    default those of `noted_here()`.
    """

    def __init__(self, flags: int, *, limit: int, states: FileStates | None = None) -> None:
        self._flags = flags
        self._limit = limit
        self._states = noted_here() if states is None else states
        self._used: set[Path] = set()
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._remote: dict[Path, RemoteFile] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def source(self, path: Path) -> Opened:
        """Return a file to read: a descriptor as of `fd`, or an object, which stays valid.

        Raises:
            CorruptError: as for `fd`.
        """
        if not isinstance(path, RemotePath):
            return self.fd(path)
        if path not in self._remote:
            try:
                file = path.opened()
            except FileNotFoundError as error:
                raise gone(str(path)) from error
            _see(path, file, self._states)
            self._remote[path] = file
        return self._remote[path]

    def fd(self, path: Path) -> int:
        """Return a descriptor of this file; valid until `limit` other files have been opened.

        Raises:
            CorruptError: the file is gone or has changed, or a file to read cannot be opened.
        """
        self._used.add(path)
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        if len(self._open) >= self._limit:
            self._close_first()
        try:
            if self._flags == os.O_RDONLY:
                check_regular(path)
            fd = self._open[path] = os.open(path, self._flags)
        except FileNotFoundError as error:
            raise gone(str(path)) from error
        except OSError as error:
            if self._flags != os.O_RDONLY:
                raise
            raise CorruptError(f"{path}: cannot be opened: {error.strerror}") from error
        _see(path, fd, self._states)
        return fd

    def _close_first(self) -> None:
        path, fd = self._open.popitem(last=False)
        try:
            if path in self._used:  # `check` cannot see a closed file
                _see(path, fd, self._states)
        finally:
            os.close(fd)

    def check(self) -> None:
        """Check that the files that were used since the last check have not changed.

        Raises:
            CorruptError: a file was written to.
        """
        used, self._used = self._used, set()
        for path in used & self._open.keys():
            _see(path, self._open[path], self._states)

    def close(self) -> None:
        """Close all files."""
        self._remote.clear()
        while self._open:
            os.close(self._open.popitem()[1])


class LentFiles:
    """Open files to read, for several threads: `at_once` threads may borrow files at a time.

    Args:
        what: the message of the error after `close`.
        at_once: how many threads may read at the same time.
        states: states with which files are compared when opened and after each loan.
    """

    def __init__(
        self, what: str, *, at_once: int = AT_ONCE, states: FileStates | None = None
    ) -> None:
        self._what = what
        self._at_once = at_once
        self._closing = Lock()
        self._closed = False
        self._idle: LifoQueue[OpenFiles] = LifoQueue()
        for _ in range(at_once):
            self._idle.put(OpenFiles(os.O_RDONLY, limit=_OPEN_FILES, states=states))

    def close(self) -> None:
        """Close all files, once borrowed files are back; later loans are refused."""
        self._closed = True
        with self._closing:
            returned = [self._idle.get() for _ in range(self._at_once)]
            for files in returned:
                files.close()
                self._idle.put(files)

    def check(self) -> None:
        """Raise the error of `borrow` if the files are closed."""
        if self._closed:
            raise UsageError(self._what, hint="open it again")

    @contextmanager
    def borrow(self) -> Iterator[OpenFiles]:
        """Lend the files that were used last; wait if all are lent.

        Raises:
            UsageError: they are closed.
            CorruptError: a file was written to during the loan, so the bytes may be mixed.
        """
        files = self._idle.get()
        try:
            self.check()
            yield files
            files.check()
        finally:
            self._idle.put(files)
