"""Staging: an output is made apart, then takes its place in one commit, or leaves nothing behind.

A staging directory is `_unshard-partial-<random>/`, beside the target. In it stand `owner.json`,
`output/`, and in the end perhaps a journal. What a killed process left there is finished or removed
by the next run. Where the target lies inside a checkpoint, the name also records the modification
time to give back to the directory that holds both.
"""

import errno
import fcntl
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from unshard.errors import OutputError
from unshard.write.commit import Mode, commit, finish
from unshard.write.files import set_mtime
from unshard.write.interrupts import uninterrupted
from unshard.write.owners import OWNER_NAME, claim, if_dead, made_for
from unshard.write.targets import check_space, choose_mode

__all__ = ["Stage", "recover"]

_PREFIX = "_unshard-partial-"
_MTIME = "-mtime-"

_log = logging.getLogger(__name__)


def recover(directory: Path) -> None:
    """Finish or remove what killed processes left in a directory.

    What may be alive is left alone, and so is what another user put there: a journal is an
    instruction to move files.
    """
    for staging in sorted(directory.glob(_PREFIX + "*")):
        try:
            status = staging.lstat()
        except FileNotFoundError:  # its owner, or another run, has just removed it
            continue
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            continue
        with if_dead(staging) as dead:
            if dead:
                made = made_for(staging)
                _finish_and_remove(staging)
                _remove_empty(made)
            else:
                _log.info("left alone: %s, whose owner may be alive", staging)


class Stage:
    """A directory to fill, which `commit` turns into the target. Left without it, nothing remains.

    Args:
        target: where the output goes; parents are made (and removed again on failure).
        needed_bytes: what the output will take.
        sources: the directories that hold the checkpoint; if the output goes into one of them, it
            keeps its modification time (trainers rotate checkpoints by it).
        overwrite: whether weights that are there may be replaced.

    Raises:
        OutputError: on entering: the target exists, or is not writable, or lacks space.
    """

    def __init__(
        self,
        target: Path,
        needed_bytes: int,
        *,
        sources: Sequence[Path] = (),
        overwrite: bool = False,
    ) -> None:
        self._target = target
        self._needed = needed_bytes
        self._sources = tuple(sources)
        self._overwrite = overwrite
        self._mode = Mode.NEW
        self._made_parents: list[Path] = []
        self._root: Path | None = None
        self._locks: list[int] = []

    @property
    def directory(self) -> Path:
        """Where to write the output's files."""
        return self._staging / "output"

    @property
    def scratch(self) -> Path:
        """A path for a file that is needed while the output is made, and removed with the stage."""
        return self._staging / "scratch"

    @property
    def _staging(self) -> Path:
        if self._root is None:
            raise RuntimeError("the stage has not been entered")
        return self._root

    def __enter__(self) -> Self:
        try:
            self._enter()
        except BaseException as error:
            self._clean_up()
            if isinstance(error, OSError):
                raise unwritable(self._target, error) from error
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._clean_up()
        if isinstance(error, OSError):
            raise unwritable(self._target, error) from error

    def commit(self, *, replaced: Collection[str] = ()) -> None:
        """Make everything durable and let it take the target's place; Ctrl-C waits for that.

        Args:
            replaced: names of companions that take the place of those in a checkpoint's own
                directory, because they were asked for.

        Raises:
            OutputError: a new target has come to exist meanwhile.
        """
        with uninterrupted():
            commit(self._staging, self._target, self._mode, replaced)
            self._made_parents.clear()
            self._clean_up()

    def _enter(self) -> None:
        recover(self._target.parent)
        self._make_parents()
        self._mode = choose_mode(self._target, self._sources, overwrite=self._overwrite)
        self._target = self._target.resolve()
        if self._mode is not Mode.NEW:
            _check_same_disk(self._target)
        if self._mode is Mode.IN_PLACE:
            self._locks.append(_lock(self._target))
        check_space(self._target.parent, self._needed)
        self._root = self._target.parent / self._name()
        self._root.mkdir()
        self._locks.append(claim(self._root, self._made_parents))
        self.directory.mkdir()

    def _name(self) -> str:
        name = _PREFIX + secrets.token_hex(8)
        holder = self._target.parent
        if _is_inside(holder, self._sources):
            name += f"{_MTIME}{holder.stat().st_mtime_ns}"
        return name

    def _make_parents(self) -> None:
        missing = [p for p in (self._target.parent, *self._target.parent.parents) if not p.exists()]
        for parent in reversed(missing):
            parent.mkdir(exist_ok=True)
            self._made_parents.append(parent)

    def _clean_up(self) -> None:
        """Leave nothing; but finish a commit that has begun, now, or else at the next run."""
        with uninterrupted():
            if self._root is not None and self._root.is_dir():
                _finish_and_remove(self._root)
            while self._locks:
                os.close(self._locks.pop())
            _remove_empty(self._made_parents[::-1])


def unwritable(target: Path, error: OSError) -> OutputError:
    """Return the error that says why an output could not be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return OutputError(
        f"{target}: cannot be written: {error.strerror or error}",
        hint="free some space and run it again; nothing was left behind" if full else "",
    )


def _is_inside(directory: Path, sources: Sequence[Path]) -> bool:
    """Tell whether a directory is part of the checkpoint."""
    return any(directory.is_relative_to(source.resolve()) for source in sources)


def _lock(directory: Path) -> int:
    """Lock a directory against other merges into it; return the descriptor that locks it."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise OutputError(f"{directory}: another merge into it is under way") from error
    except OSError as error:  # a file system without locks
        _log.debug("%s cannot be locked: %s", directory, error)
    return fd


def _check_same_disk(target: Path) -> None:
    if target.stat().st_dev != target.parent.stat().st_dev:
        raise OutputError(
            f"{target}: is a mount point, and cannot be replaced in one step",
            hint="give a directory inside it",
        )


def _finish_and_remove(staging: Path) -> None:
    """Do what a journal says, if there is one, and remove the staging directory."""
    try:
        finish(staging)
    except OSError as error:
        _log.warning("%s is left for the next run to finish: %s", staging, error)
    else:
        _remove(staging)


def _remove_empty(made: Sequence[Path]) -> None:
    """Remove directories that were made for an output, innermost first, while they are empty."""
    for directory in made:
        try:
            directory.rmdir()
        except OSError:
            break


def _remove(staging: Path) -> None:
    """Remove a staging directory, its owner file last: until then it can be told to be dead."""
    for path in staging.glob("*"):
        if path.name == OWNER_NAME:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    (staging / OWNER_NAME).unlink(missing_ok=True)
    try:
        staging.rmdir()
    except OSError as error:
        _log.warning("%s cannot be removed: %s", staging, error)
    mtime = staging.name.partition(_MTIME)[2]
    if mtime.isdigit():
        set_mtime(staging.parent, int(mtime))
