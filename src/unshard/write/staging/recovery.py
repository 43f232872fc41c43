"""What killed processes of this user left next to a target: finished, removed, or gone on with."""

import logging
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path

from unshard.errors import OutputError
from unshard.write.dirfd import names_in, opened, remove, status_of
from unshard.write.staging.commit import finish
from unshard.write.staging.finished import FINISHED_NAME
from unshard.write.staging.journal import JOURNAL_NAME, OUTPUT, read_journal
from unshard.write.staging.owners import (
    OWNER_NAME,
    STAGING_PREFIX,
    Locked,
    Owner,
    StagingDirectory,
    claim,
    dead_owner,
    mtime_in,
)
from unshard.write.staging.turns import end_left_turns

_log = logging.getLogger(__name__)


def recover(directory: Path, *, target: str = "", resume: bool = False) -> None:
    """Finish or remove what killed processes of this user left in a directory.

    What may be alive is left alone. So is what cannot be shown to be this user's own, made in this
    very directory (a log message names it): a journal is an instruction to move files, and a
    downloaded checkpoint may contain one.

    Args:
        directory: where to look; it need not exist.
        target: name of the output that will be made there; "" for none.
        resume: whether what was made for that target is left to `adopt`. What a merge to another
            one left to be gone on with is always left.
    """
    with _left_in(directory) as (parent, names):
        for name in names:
            try:
                found = StagingDirectory(directory / name, parent, -1)
                _recover(found, target, resume=resume)
            except OSError as error:
                _log.warning("left alone: %s: %s", directory / name, error)
    end_left_turns(directory)


def _recover(found: StagingDirectory, target: str, *, resume: bool) -> None:
    if not _may_be_own(found):
        return
    with opened(found.path.name, within=found.parent) as fd:
        place = StagingDirectory(found.path, found.parent, fd)
        with dead_owner(place) as dead:
            if dead is None:
                _log.info("left alone: %s, whose owner may be alive", place.path)
                return
            owner = dead.owner
            journal = read_journal(place)
            if journal is not None:
                try:
                    for sentence in finish(place, journal):
                        _log.warning("%s: %s", place.path.parent / journal.target, sentence)
                except OutputError as error:  # nothing of it had taken its place
                    _log.info("removed: %s: %s", place.path, error)
            elif _has_output(place) and (resume if owner.target == target else owner.keeps):
                _log.info("left to be gone on with: %s", place.path)
                return
            remove_staging(place, dead.file)
            remove_empty(owner.made)


def adopt(
    parent: int, directory: Path, owner: Owner, held: ExitStack
) -> tuple[StagingDirectory, Locked] | None:
    """Take over what a dead process left of an output, to go on with it; None if there is nothing.

    Args:
        parent: descriptor of the directory.
        directory: that holds what was left, and the target.
        owner: what to record; `made` is added to.
        held: keeps what was taken over open and locked.
    """
    with _left_in(directory) as (_, names):
        for name in names:
            with ExitStack() as opening:
                try:
                    if not _may_be_own(StagingDirectory(directory / name, parent, -1)):
                        continue
                    fd = opening.enter_context(opened(name, within=parent))
                    place = StagingDirectory(directory / name, parent, fd)
                    taken = _take_over(place, owner, opening)
                except OSError as error:
                    _log.warning("left alone: %s: %s", directory / name, error)
                    continue
                if taken is not None:
                    held.push(opening.pop_all())
                    return place, taken
    return None


def _take_over(place: StagingDirectory, owner: Owner, held: ExitStack) -> Locked | None:
    with dead_owner(place) as dead:
        if dead is None or dead.owner.target != owner.target or not _has_output(place):
            return None
        if status_of(JOURNAL_NAME, within=place.fd) is not None:
            return None
        for name in names_in(place.fd):
            if name not in (OWNER_NAME, OUTPUT, FINISHED_NAME):
                remove(name, within=place.fd)
        taken = Owner((*owner.made, *dead.owner.made), owner.target, owner.keeps)
        file = held.enter_context(claim(place, taken))
    return Locked(taken, file)


@contextmanager
def _left_in(directory: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the descriptor of a directory, and the names of the staging directories in it."""
    try:
        names = sorted(path.name for path in directory.glob(STAGING_PREFIX + "*"))
        parent = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) if names else -1
    except OSError as error:
        _log.debug("nothing to recover: %s", error)
        yield -1, []
        return
    try:
        yield parent, names
    finally:
        if names:
            os.close(parent)


def _may_be_own(found: StagingDirectory) -> bool:
    status = status_of(found.path.name, within=found.parent)
    if status is None:  # its owner, or another run, has just removed it
        return False
    if stat.S_ISDIR(status.st_mode) and status.st_uid != os.geteuid():
        _log.info("left alone: %s, which belongs to another user", found.path)
        return False
    return True


def _has_output(place: StagingDirectory) -> bool:
    status = status_of(OUTPUT, within=place.fd)
    return status is not None and stat.S_ISDIR(status.st_mode)


def remove_staging(place: StagingDirectory, file: FileIO | None) -> None:
    """Remove a staging directory: its journal first, because half an output must not be moved.

    Its owner file goes last: until then the next run can tell that its owner is dead. `file` is
    that file, open, and is closed: NFS and FUSE keep a removed file under another name until then,
    and so the directory.
    """
    if file is not None and file.closed:
        return  # this process is a fork of the owner, which goes on
    try:
        names = names_in(place.fd)
        for name in sorted(names, key=lambda name: (name != JOURNAL_NAME, name == OWNER_NAME)):
            remove(name, within=place.fd)
        if file is not None:
            file.close()
        os.rmdir(place.path.name, dir_fd=place.parent)
        mtime = mtime_in(place.path.name)
        if mtime is not None:
            os.utime(place.parent, ns=(os.fstat(place.parent).st_atime_ns, mtime))
    except OSError as error:
        _log.warning("%s is left for the next run: %s", place.path, error)


def remove_empty(made: Sequence[Path]) -> None:
    """Remove directories that were made for an output, innermost first, while they are empty."""
    with suppress(OSError):
        for directory in made:
            directory.rmdir()
