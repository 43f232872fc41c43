"""Whether files are still those that were opened first: a trainer may save over what is read.

Such a save is as valid as the one before it, with checksums of its own, so nothing in the bytes
shows that one half of them is of another step. What shows it is the status of the file.
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
from unshard.stores.remote_path import RemotePath

_TICK_NS = 20_000_000
"""Longer than a tick of the kernel's clock, by which times of files are rounded: 1 to 10 ms."""
_COARSE_NS = 2_000_000_000 + _TICK_NS
"""The same of file systems that keep whole seconds, or every other one, as FAT does."""
_PATIENCE_S = 5.0
"""How long to wait for a file that is written again and again; then its next write will show."""
_SECOND_NS = 10**9

_OF_KERNEL = ("/proc/", "/sys/")
Look = Callable[[], os.stat_result]
"""Returns the status of an open file."""


class FileState(NamedTuple):
    """What tells a file from another one in its place, and from itself with other bytes.

    Attributes:
        device, inode, size, modified_ns: as of its status.
        links: its hard links.
        changed_ns: ctime, which nobody can set back.
    """

    device: int
    inode: int
    size: int
    modified_ns: int
    links: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileState":
        """Return the state that a status describes."""
        identity = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        return cls(*identity, status.st_nlink, status.st_ctime_ns)

    def is_same(self, later: "FileState") -> bool:
        """Return whether the bytes are the same as far as a status shows.

        A hard link that was made or removed changes ctime, too: pins are hard links, and so is what
        is left of a pinned checkpoint when its trainer removes it. File systems in user space may
        give a file another inode when it is looked up again.
        """
        if (self.device, self.size, self.modified_ns) != (
            later.device,
            later.size,
            later.modified_ns,
        ):
            return False
        is_linked = self.links != later.links
        if self.inode != later.inode:
            return self.changed_ns == later.changed_ns and not is_linked
        return self.changed_ns == later.changed_ns or is_linked


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
        if path not in self.states:  # as when it was gone when it was to be added
            self._look_at(path)
        return self.states[path]

    def add(self, path: Path) -> None:
        """Take note of a file that will be opened later, if it is not; errors are left to that."""
        if path not in self.states:
            with suppress(OSError):
                self.see(path, partial(_status, path))

    def see(self, path: Path, look: Look) -> None:
        """Take note of a file that has just been opened, or compare it with its state.

        Raises:
            CorruptError: it is not the same.
        """
        first = self.states.get(path)
        if first is None:
            self.states.setdefault(path, _settled(path, look))
        elif not first.is_same(FileState.of(look())):
            from unshard.stores.changes import changed

            raise changed(str(path))

    def include(self, other: "FileStates") -> None:
        """Take over the files of another one."""
        self.states.update(other.states)

    def check(self) -> None:
        """Check that every file is there, and is the same.

        Raises:
            CorruptError: one is gone, was replaced, or was written to.
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
            from unshard.stores.changes import gone

            raise gone(str(path)) from error
        except OSError as error:
            raise CorruptError(f"{path}: cannot be opened: {error.strerror}") from error


_noting: ContextVar[FileStates | None] = ContextVar("noting", default=None)


@contextmanager
def noting(states: FileStates) -> Iterator[FileStates]:
    """Have every file noted that this thread opens meanwhile to read it.

    Headers, pickles and JSON are read in many places, none of which has to know of it.
    """
    token = _noting.set(states)
    try:
        yield states
    finally:
        _noting.reset(token)


def noted_here() -> FileStates | None:
    """Return what notes the files that this thread opens; None if nothing does."""
    return _noting.get()


def _settled(path: Path, look: Look) -> FileState:
    """Return the state of a file, once a later write to it would change its times.

    Files that were written within the same tick have the same time.
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
    """Raise OSError if a path is not a regular file: to open a device or a pipe may act, or wait.

    Files of the kernel, such as /proc/kmsg, have the mode of regular files, and a size of 0.
    """
    if isinstance(path, RemotePath):
        return
    status = path.stat()
    is_file = stat.S_ISREG(status.st_mode)
    if not is_file or (not status.st_size and os.path.realpath(path).startswith(_OF_KERNEL)):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def _status(path: Path) -> os.stat_result:
    """Return the status of a path; of a network file system, as its server knows it."""
    if isinstance(path, RemotePath):
        return path.stat()
    check_regular(path)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening asks the server, a status may not
    try:
        return os.fstat(fd)
    finally:
        os.close(fd)
