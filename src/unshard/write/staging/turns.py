"""Turns: one of several processes makes an output, and the others wait.

A turn is the lock of a small file next to the target, which contains the name of its process. The
kernel drops the lock when that process ends, however it ends, and the next process gets the turn.
The holder of the lock removes the file, so a process that has locked a removed file tries again.
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
_SHORTEST_S, _LONGEST_S = 0.1, 0.5  # between two attempts
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
    """Wait until the output exists or no other process makes it; let others wait meanwhile.

    Merges that do not take turns are waited for, too.

    Args:
        target: the output, with links resolved.
        is_made: as for `OutputStage.turn`.
        listener: as for `OutputStage.turn`.
        make_parents: creates the parent directory of the target.
        keeps_mtime: whether that directory keeps its modification time.

    Raises:
        OutputError: the file system has no locks.
        OSError: no file can be created next to the target.
    """
    digest = hashlib.blake2b(os.fsencode(target.name), digest_size=8).hexdigest()
    own = _Turn(target.parent, TURN_PREFIX + digest, keeps_mtime=keeps_mtime)
    pause, is_reported, retries = _SHORTEST_S, False, _RETRIES
    try:
        while not is_made():
            try:
                with uninterrupted():
                    make_parents()
                    other = own.take() or who_makes(target.parent, target.name)
            except FileNotFoundError:  # another process failed and removed the directory
                retries -= 1
                if not retries:
                    raise
                continue
            if not other:
                break
            if not is_reported:
                listener(Chosen(f"waiting for {other}, which makes {target}"))
            is_reported = True
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)
        yield
    finally:
        own.end()


class _Turn:
    """The turn of this process; call `end` whether it was taken or not."""

    def __init__(self, folder: Path, name: str, *, keeps_mtime: bool) -> None:
        self._folder, self._name = folder, name
        self._keeps_mtime = keeps_mtime
        self._file: FileIO | None = None

    def take(self) -> str:
        """Try to take it; return the process that has it, or "" if this process does.

        Raises:
            OutputError: the file system has no locks.
            OSError: the file cannot be created or opened.
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
        """Give it to the next process, and remove its file, even if a dead process left it."""
        with suppress(OSError, OutputError), uninterrupted():
            if self._file is not None and self._file.closed:
                return  # this process is a fork of the turn's process
            with closing(os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)) as folder:
                if self._file is None:
                    self._file, _ = self._lock(folder)
                if self._file is not None:
                    with self._file, self._mtime_kept(folder):
                        os.unlink(self._name, dir_fd=folder)

    @contextmanager
    def _mtime_kept(self, folder: int) -> Iterator[None]:
        """Restore a directory's modification time, if it is to be kept."""
        before = os.fstat(folder)
        yield
        if self._keeps_mtime:
            with suppress(OSError):  # another user owns the directory
                os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))

    def _lock(self, folder: int) -> tuple[FileIO | None, str]:
        """Return the locked file and ""; or None and the process that has the turn."""
        other = "another process"
        try:
            fd = open_regular(self._name, os.O_RDWR, within=folder)
        except FileNotFoundError:  # its turn has just ended
            return None, other
        except PermissionError:  # another user's file; only NFS needs write access for a lock
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
    """Remove the turn files of killed processes from a directory."""
    for path in directory.glob(TURN_PREFIX + "*"):
        _Turn(directory, path.name, keeps_mtime=False).end()


def lock_directory(directory: Path) -> ExitStack:
    """Lock a directory against other merges into it, until the returned stack is closed.

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
