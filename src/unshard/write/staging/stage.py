"""Staging: an output is made apart, then takes its place in one commit, or leaves nothing behind.

A staging directory is `_unshard-partial-<random>/`, next to the target, and only its owner may
enter it. It contains `owner.json`, `output/`, and in the end perhaps a journal. What a killed
process left there is finished or removed by the next run, if it can be shown to be that user's own
(see `owners`). Where the target is inside a checkpoint, the name also records the modification time
to give back to the directory that holds both.
"""

import errno
import logging
import os
import stat
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from unshard.errors import OutputError
from unshard.signals import uninterrupted
from unshard.write.staging.beneath import names_in, opened, remove, status_of, try_lock
from unshard.write.staging.commit import begin, finish, is_begun, take_new
from unshard.write.staging.journal import JOURNAL_NAME, OUTPUT, Mode, read_journal, write_journal
from unshard.write.staging.owners import (
    OWNER_NAME,
    STAGING_PREFIX,
    StagingDirectory,
    claim,
    dead_owner,
    mtime_in,
    staging_name,
)
from unshard.write.staging.targets import check_space, choose_mode

__all__ = ["Staging", "recover"]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_log = logging.getLogger(__name__)


def recover(directory: Path) -> None:
    """Finish or remove what killed processes of this user left in a directory.

    What may be alive is left alone. So is what cannot be shown to be this user's own, made in this
    very directory (a log message names it): a journal is an instruction to move files, and a
    downloaded checkpoint may contain one.
    """
    try:
        names = sorted(path.name for path in directory.glob(STAGING_PREFIX + "*"))
        parent = os.open(directory, _DIRECTORY) if names else -1
    except OSError as error:
        _log.debug("nothing to recover: %s", error)
        return
    for name in names:
        try:
            _recover(directory / name, parent)
        except OSError as error:
            _log.warning("left alone: %s: %s", directory / name, error)
    if names:
        os.close(parent)


def _recover(path: Path, parent: int) -> None:
    status = status_of(path.name, within=parent)
    if status is None:  # its owner, or another run, has just removed it
        return
    if stat.S_ISDIR(status.st_mode) and status.st_uid != os.geteuid():
        _log.info("left alone: %s, which belongs to another user", path)
        return
    with opened(path.name, within=parent) as fd:
        place = StagingDirectory(path, parent, fd)
        with dead_owner(place) as made:
            if made is None:
                _log.info("left alone: %s, whose owner may be alive", path)
                return
            journal = read_journal(place)
            if journal is not None:
                for sentence in finish(place, journal):
                    _log.warning("%s: %s", path.parent / journal.target, sentence)
            _remove(place)
            _remove_empty(made)


class Staging:
    """A directory to fill, which `commit` turns into the target. Left without it, nothing remains.

    Args:
        target: where the output goes; parents are made (and removed again on failure).
        needed_bytes: what the output will take.
        sources: the directories of the checkpoint; if the output goes into one of them, it
            keeps its modification time (trainers rotate checkpoints by it).
        overwrite: whether what unshard wrote there may be replaced; "all": other files too.
        names: the paths that the output will have, to refuse at once what would be refused later.

    Raises:
        OutputError: on entering: the target exists, is not writable or has no space, or its file
            system has no locks.
    """

    def __init__(
        self,
        target: Path,
        needed_bytes: int,
        *,
        sources: Sequence[Path] = (),
        overwrite: bool | str = False,
        names: Collection[str] = (),
    ) -> None:
        self._target = target
        self._needed = needed_bytes
        self._sources = tuple(sources)
        self._overwrite = overwrite
        self._names = names
        self._mode = Mode.NEW
        self._made_parents: list[Path] = []
        self._place: StagingDirectory | None = None
        self._held = ExitStack()
        self._quiet = ExitStack()  # holds signals back from a commit to the end of the stage
        self._is_complete = False

    @property
    def directory(self) -> Path:
        """Where to write the output's files."""
        return self._staging.path / OUTPUT

    @property
    def scratch(self) -> Path:
        """A path for a file that is needed while the output is made, and removed with the stage."""
        return self._staging.path / "scratch"

    @property
    def _staging(self) -> StagingDirectory:
        if self._place is None:
            raise RuntimeError("the stage has not been entered")
        return self._place

    def check(self) -> Mode:
        """Return how the output would take its place, as `choose_mode` does; touch nothing."""
        return choose_mode(
            self._target, self._sources, overwrite=self._overwrite, names=self._names
        )

    def __enter__(self) -> Self:
        try:
            self._enter()
            return self  # noqa: TRY300 (a signal just before it is caught, too)
        except BaseException as error:
            self._clean_up()
            if isinstance(error, OSError):
                raise unwritable(self._target, error) from error
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._clean_up()
            self._quiet.close()
            if isinstance(error, OSError):
                raise unwritable(self._target, error) from error
        except KeyboardInterrupt as late:
            if self._is_complete:
                late.args = (f"interrupted, but only after {self._target} was complete",)
            raise

    def commit(self, *, replaced: Collection[str] = ()) -> list[str]:
        """Make everything durable and let it take the target's place.

        Ctrl-C and the like wait until the stage is left, which then reports that they came too
        late. Companions in `replaced` replace those in a checkpoint's own directory. Return notes:
        what others changed in the target in the meantime, and whether the output might not survive
        a power failure.

        Raises:
            OutputError: another process made the target, or not all files could be moved.
        """
        with ExitStack() as quiet:
            quiet.enter_context(uninterrupted())
            notes = self._take_place(replaced)
            self._is_complete = True
            self._made_parents.clear()
            self._clean_up()
            self._quiet = quiet.pop_all()
        return notes

    def _take_place(self, replaced: Collection[str]) -> list[str]:
        place = self._staging
        if self._mode is Mode.NEW:
            take_new(place, self._target)
            return _durable(place.parent, self._target)
        journal = begin(
            place,
            self._target,
            self._mode,
            replaced=replaced,
            lose_strangers=self._overwrite == "all",
        )
        write_journal(place, journal)
        with suppress(OSError):  # every step may be done twice
            return finish(place, journal) + _durable(place.parent, self._target)
        try:
            return finish(place, journal) + _durable(place.parent, self._target)
        except OSError as error:
            if not is_begun(place, journal):
                raise
            self._place = None  # it is left for the next run
            raise OutputError(
                f"{self._target}: not all new files could be moved there: {error}",
                hint=f"the others are in {place.path}; the next merge to the same place moves them",
            ) from error

    def _enter(self) -> None:
        recover(self._target.parent)
        missing = [p for p in (self._target.parent, *self._target.parent.parents) if not p.exists()]
        for parent in reversed(missing):
            parent.mkdir(exist_ok=True)
            self._made_parents.append(parent)
        self._mode = self.check()
        self._target = self._target.resolve()
        is_new, disk = self._mode is Mode.NEW, self._target.parent.stat().st_dev
        if not is_new and self._target.stat().st_dev != disk:
            raise OutputError(
                f"{self._target}: is a mount point, and cannot be replaced in one step",
                hint="give a directory inside it",
            )
        if self._mode is Mode.IN_PLACE:
            self._held.callback(os.close, _lock(self._target))
        check_space(self._target.parent, self._needed)
        with uninterrupted():
            self._make()
        self.directory.mkdir()

    def _make(self) -> None:
        """Make the staging directory, and hold it open."""
        holder = self._target.parent
        parent = os.open(holder, _DIRECTORY)
        self._held.callback(os.close, parent)
        is_inside = any(holder.is_relative_to(source.resolve()) for source in self._sources)
        name = staging_name(parent, os.fstat(parent).st_mtime_ns if is_inside else None)
        os.mkdir(name, 0o700, dir_fd=parent)
        try:
            fd = self._held.enter_context(opened(name, within=parent))
        except OSError:
            os.rmdir(name, dir_fd=parent)
            raise
        self._place = StagingDirectory(holder / name, parent, fd)
        self._held.callback(os.close, claim(self._place, self._made_parents))

    def _clean_up(self) -> None:
        """Leave nothing, unless a commit is left for the next run."""
        try:
            self._remove_what_is_left()
        except BaseException:  # a signal, before it could be held back
            self._remove_what_is_left()
            raise

    def _remove_what_is_left(self) -> None:
        with uninterrupted():
            place, self._place = self._place, None
            if place is not None:
                _remove(place)
            self._held.close()
            _remove_empty(self._made_parents[::-1])


def unwritable(target: Path, error: OSError) -> OutputError:
    """Return the error for an output that could not be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return OutputError(
        f"{target}: cannot be written: {error.strerror or error}",
        hint="free some space and run it again; nothing was left behind" if full else "",
    )


def _lock(directory: Path) -> int:
    """Lock a directory against other merges into it; return the descriptor that locks it."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        is_ours = try_lock(fd)
    except OSError as error:  # a file system without locks
        _log.debug("%s cannot be locked: %s", directory, error)
        is_ours = True
    if is_ours:
        return fd
    os.close(fd)
    raise OutputError(f"{directory}: another merge into it is under way")


def _durable(directory: int, target: Path) -> list[str]:
    """Flush a rename; return a note if that fails: the rename itself is done."""
    try:
        os.fsync(directory)
    except OSError as error:
        return [f"{target} is complete, but may not survive a power failure: {error}"]
    return []


def _remove_empty(made: Sequence[Path]) -> None:
    """Remove directories that were made for an output, innermost first, while they are empty."""
    with suppress(OSError):
        for directory in made:
            directory.rmdir()


def _remove(place: StagingDirectory) -> None:
    """Remove a staging directory: its journal first, because half an output must not be moved.

    Its owner file goes last: until then the next run can tell that its owner is dead.
    """
    try:
        names = names_in(place.fd)
        for name in sorted(names, key=lambda name: (name != JOURNAL_NAME, name == OWNER_NAME)):
            remove(name, within=place.fd)
        os.rmdir(place.path.name, dir_fd=place.parent)
        mtime = mtime_in(place.path.name)
        if mtime is not None:
            os.utime(place.parent, ns=(os.fstat(place.parent).st_atime_ns, mtime))
    except OSError as error:
        _log.warning("%s is left for the next run: %s", place.path, error)
