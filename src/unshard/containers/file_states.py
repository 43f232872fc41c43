"""Detect files that changed since they were opened first: a trainer may save over them.

The new file is valid, with checksums of its own, so the bytes do not show that half of them belong
to another step. The status of the file does.
"""

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from unshard.errors import CorruptError
from unshard.stores import changed, gone
from unshard.stores.remote_path import RemotePath

_TICK_NS = 20_000_000
"""Longer than a tick of the kernel's clock, 1 to 10 ms, to which times of files are rounded."""
_COARSE_NS = 2_000_000_000 + _TICK_NS
"""The same for file systems that keep whole seconds, or even seconds only, such as FAT."""
_PATIENCE_S = 5.0
"""How long to wait for a file that is written continuously: a later write changes its times."""
_SECOND_NS = 10**9

_OF_KERNEL = ("/proc/", "/sys/")
Look = Callable[[], os.stat_result]
"""Returns the status of an open file."""


class FileState(NamedTuple):
    """The parts of a file's status that change if the file is replaced or written to.

    Attributes:
        device, inode, size, modified_ns: fields of the status.
        links: the number of hard links.
        changed_ns: ctime, which programs cannot set.
    """

    device: int
    inode: int
    size: int
    modified_ns: int
    links: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileState":
        """Return the state in a status."""
        identity = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        return cls(*identity, status.st_nlink, status.st_ctime_ns)

    def is_same(self, later: "FileState") -> bool:
        """Return whether the bytes are the same, as far as a status shows.

        Making or removing a hard link changes ctime, too: pins are hard links, and a trainer may
        remove a pinned checkpoint. File systems in user space may change the inode of a file.
        """
        is_linked, is_changed = self.links != later.links, self.changed_ns != later.changed_ns
        return (
            self.device == later.device
            and self.size == later.size
            and self.modified_ns == later.modified_ns
            and (not is_changed or is_linked)
            and (self.inode == later.inode or not is_linked)
        )


@dataclass(slots=True, eq=False)
class FileStates:
    """The state of each file when it was opened first. Thread-safe.

    Attributes:
        states: by path.
    """

    states: dict[Path, FileState] = field(default_factory=dict)

    def __contains__(self, path: Path) -> bool:
        return path in self.states

    def __getitem__(self, path: Path) -> FileState:
        if path not in self.states:  # it was missing when it was added
            self._look_at(path)
        return self.states[path]

    def add(self, path: Path) -> None:
        """Record a file that will be opened later; opening it reports errors."""
        if path not in self.states:
            with suppress(OSError):
                self.see(path, partial(_status, path))

    def see(self, path: Path, look: Look) -> None:
        """Record a file that has just been opened, or compare it with its state.

        Raises:
            CorruptError: it is not the same.
        """
        first = self.states.get(path)
        if first is None:
            self.states.setdefault(path, _settled(path, look))
        elif not first.is_same(FileState.of(look())):
            raise changed(str(path))

    def include(self, other: "FileStates") -> None:
        """Add the states of `other`."""
        self.states.update(other.states)

    def check(self) -> None:
        """Check that every file exists and is the same.

        Raises:
            CorruptError: a file is gone, was replaced, or was written to.
        """
        paths = list(self.states)
        for bucket in {path.bucket for path in paths if isinstance(path, RemotePath)}:
            bucket.forget()
        for path in paths:
            self._look_at(path)

    def _look_at(self, path: Path) -> None:
        try:
            self.see(path, partial(_status, path))
        except FileNotFoundError as error:
            raise gone(str(path)) from error
        except OSError as error:
            raise CorruptError(f"{path}: cannot be opened: {error.strerror}") from error


_noting: ContextVar[FileStates | None] = ContextVar("noting", default=None)


@contextmanager
def noting(states: FileStates) -> Iterator[FileStates]:
    """Record every file that this thread opens for reading inside the context.

    A context variable, because headers, pickles and JSON are read in many modules.
    """
    token = _noting.set(states)
    try:
        yield states
    finally:
        _noting.reset(token)


def noted_here() -> FileStates | None:
    """Return the record of files that this thread opens, or None."""
    return _noting.get()


def _settled(path: Path, look: Look) -> FileState:
    """Return the state of a file, once a later write to it would change its times.

    Two writes within one tick give a file the same time.
    """
    state, until = FileState.of(look()), time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        written = max(state.modified_ns, state.changed_ns)
        is_coarse = not (state.modified_ns % _SECOND_NS or state.changed_ns % _SECOND_NS)
        age, settled = time.time_ns() - written, _COARSE_NS if is_coarse else _TICK_NS
        if isinstance(path, RemotePath) or not 0 <= age < settled:
            break
        time.sleep((settled - age) / _SECOND_NS)
        state = FileState.of(look())
    return state


def check_regular(path: Path) -> None:
    """Raise OSError if a path is not a regular file: opening a device or a pipe may act, or block.

    Files of the kernel, such as /proc/kmsg, have the mode of regular files, and a size of 0.
    """
    if isinstance(path, RemotePath):
        return
    status = path.stat()
    is_file = stat.S_ISREG(status.st_mode)
    if not is_file or (not status.st_size and os.path.realpath(path).startswith(_OF_KERNEL)):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def _status(path: Path) -> os.stat_result:
    """Return the status of a path, on a network file system from its server."""
    if isinstance(path, RemotePath):
        return path.stat()
    check_regular(path)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # NFS revalidates on open, not always on stat
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)
