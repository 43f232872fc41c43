"""Turns: of the processes that are asked for the same output, one makes it and the others wait.

A turn is the lock of a small file next to the target, which names the process that has it. The
kernel drops the lock when that process ends, however it ends, and another one goes on. Whoever has
the lock removes the file, so a process that got the lock of a file that is gone tries again.
"""

import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path

from unshard.errors import OutputError
from unshard.progress import Chosen, Listener
from unshard.signals import uninterrupted
from unshard.write.dirfd import closing, hold, open_regular, status_of, try_lock
from unshard.write.stage import BusyError
from unshard.write.staging.owners import no_locks, who_makes

TURN_PREFIX = "_unshard-turn-"
_SHORTEST_S, _LONGEST_S = 0.1, 0.5  # between two looks
_NAME_BYTES = 200
_RETRIES = 100

_log = logging.getLogger(__name__)


@contextmanager
def turn(
    target: Path,
    is_made: Callable[[], bool],
    listener: Listener,
    *,
    make_parents: Callable[[], None],
    keeps_mtime: bool,
) -> Iterator[None]:
    """Wait until no other process makes an output, or it is made; keep others waiting meanwhile.

    A merge that does not ask for its turn is waited for, too.

    Args:
        target: the output, without links.
        is_made: as for `Stage.turn`.
        listener: as for `Stage.turn`.
        make_parents: makes the directory that is to hold the target.
        keeps_mtime: whether that directory keeps its modification time.

    Raises:
        OutputError: the file system has no locks.
        OSError: there can be no file next to the target.
    """
    digest = hashlib.blake2b(os.fsencode(target.name), digest_size=8).hexdigest()
    own = _Turn(target.parent, TURN_PREFIX + digest, keeps_mtime=keeps_mtime)
    pause, is_told, retries = _SHORTEST_S, False, _RETRIES
    try:
        while not is_made():
            try:
                with uninterrupted():
                    make_parents()
                    other = own.take() or who_makes(target.parent, target.name)
            except FileNotFoundError:  # another process that failed has removed the directory
                retries -= 1
                if not retries:
                    raise
                continue
            if not other:
                break
            if not is_told:
                listener(Chosen(f"waiting for {other}, which makes {target}"))
            is_told = True
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)
        yield
    finally:
        own.end()


class _Turn:
    """The turn of this process; `end` it, taken or not."""

    def __init__(self, folder: Path, name: str, *, keeps_mtime: bool) -> None:
        self._folder, self._name = folder, name
        self._keeps_mtime = keeps_mtime
        self._file: FileIO | None = None

    def take(self) -> str:
        """Try to take it; return which process has it, or "" if it is this one's.

        Raises:
            OutputError: the file system has no locks.
            OSError: the file cannot be made or opened.
        """
        if self._file is not None:
            return ""
        with closing(os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)) as folder:
            with suppress(FileExistsError), self._mtime_kept(folder):
                os.close(
                    open_regular(self._name, os.O_RDWR | os.O_CREAT | os.O_EXCL, within=folder)
                )
            self._file, other = self._lock(folder)
        if self._file is not None:
            with suppress(OSError):  # the file may be another user's
                self._file.truncate(0)
                self._file.write(f"process {os.getpid()} on {os.uname().nodename}".encode())
        return other

    def end(self) -> None:
        """Let the next process have it; remove its file, also one that a dead process has left."""
        with suppress(OSError, OutputError), uninterrupted():
            if self._file is not None and self._file.closed:
                return  # this process is a fork of the one that has the turn
            with closing(os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)) as folder:
                if self._file is None:
                    self._file, _ = self._lock(folder)
                if self._file is not None:
                    with self._file, self._mtime_kept(folder):
                        os.unlink(self._name, dir_fd=folder)

    @contextmanager
    def _mtime_kept(self, folder: int) -> Iterator[None]:
        """Give a directory's modification time back, if it is to be kept."""
        before = os.fstat(folder)
        yield
        if self._keeps_mtime:
            with suppress(OSError):  # it is another user's
                os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))

    def _lock(self, folder: int) -> tuple[FileIO | None, str]:
        """Return the file, locked; or None, and which process has the turn."""
        other = "another process"
        try:
            fd = open_regular(self._name, os.O_RDWR, within=folder)
        except FileNotFoundError:  # its turn has just ended
            return None, other
        except PermissionError:  # another user's file; only NFS needs one to write into
            fd = open_regular(self._name, os.O_RDONLY, within=folder)
        file = hold(FileIO(fd, "r+"))
        try:
            is_ours = try_lock(fd)
        except OSError as error:
            file.close()
            raise no_locks(self._folder, error) from error
        named = status_of(self._name, within=folder)
        if is_ours and named is not None and named.st_ino == os.fstat(fd).st_ino:
            return file, ""
        with file:
            return None, os.pread(fd, _NAME_BYTES, 0).decode(errors="replace") or other


def end_left_turns(directory: Path) -> None:
    """Remove the files of turns that killed processes have left in a directory."""
    for path in directory.glob(TURN_PREFIX + "*"):
        _Turn(directory, path.name, keeps_mtime=False).end()


def lock_directory(directory: Path) -> ExitStack:
    """Lock a directory against other merges into it, until what is returned is closed.

    Raises:
        BusyError: another merge has locked it.
    """
    held, fd = hold(ExitStack()), os.open(directory, os.O_RDONLY)
    held.callback(os.close, fd)
    try:
        is_ours = try_lock(fd)
    except OSError as error:  # a file system without locks
        _log.debug("%s cannot be locked: %s", directory, error)
        is_ours = True
    if is_ours:
        return held
    held.close()
    raise BusyError(f"{directory}: another merge into it is under way")
