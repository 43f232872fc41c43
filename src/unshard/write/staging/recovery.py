"""Staging directories of killed processes next to a target: finish, remove or adopt them."""

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
    """Finish or remove the staging directories of this user's killed processes.

    A directory whose owner may be alive is left alone. So is a directory without proof that this
    user made it here (a log message names it), because a journal is an instruction to move files,
    and a downloaded checkpoint may contain one.

    Args:
        directory: the directory to search; it need not exist.
        target: name of the output that will be made there; "" for none.
        resume: whether `adopt` will continue an output for that target. Outputs of other targets
            that can be resumed always stay.
    """
    with _left_in(directory) as (parent, names):
        for name in names:
            try:
                _recover(StagingDirectory(directory / name, parent, -1), target, resume=resume)
            except OSError as error:
                _log.warning("left alone: %s: %s", directory / name, error)
    end_left_turns(directory)


def _recover(left: StagingDirectory, target: str, *, resume: bool) -> None:
    if not _may_be_own(left):
        return
    with opened(left.path.name, within=left.parent) as fd:
        staging = left._replace(fd=fd)
        with dead_owner(staging) as dead:
            if dead is None:
                _log.info("left alone: %s, whose owner may be alive", staging.path)
                return
            owner = dead.owner
            journal = read_journal(staging)
            if journal is not None:
                try:
                    for note in finish(staging, journal):
                        _log.warning("%s: %s", staging.path.parent / journal.target, note)
                except OutputError as error:  # the target was not changed
                    _log.info("removed: %s: %s", staging.path, error)
            elif _has_output(staging) and (resume if owner.target == target else owner.keeps):
                _log.info("left to be resumed: %s", staging.path)
                return
            remove_staging(staging, dead.file)
            remove_empty(owner.made)


def adopt(
    parent: int, directory: Path, owner: Owner, held: ExitStack
) -> tuple[StagingDirectory, Locked] | None:
    """Take over a dead process's staging directory, to continue its output; None if there is none.

    Args:
        parent: descriptor of the directory.
        directory: the parent of the staging directory and the target.
        owner: the new owner, to whose `made` the dead owner's is added.
        held: keeps the staging directory open and locked.
    """
    with _left_in(directory) as (_, names):
        for name in names:
            with ExitStack() as opening:
                try:
                    if not _may_be_own(StagingDirectory(directory / name, parent, -1)):
                        continue
                    fd = opening.enter_context(opened(name, within=parent))
                    staging = StagingDirectory(directory / name, parent, fd)
                    locked = _take_over(staging, owner, opening)
                except OSError as error:
                    _log.warning("left alone: %s: %s", directory / name, error)
                    continue
                if locked is not None:
                    held.push(opening.pop_all())
                    return staging, locked
    return None


def _take_over(staging: StagingDirectory, owner: Owner, held: ExitStack) -> Locked | None:
    with dead_owner(staging) as dead:
        if dead is None or dead.owner.target != owner.target or not _has_output(staging):
            return None
        if status_of(JOURNAL_NAME, within=staging.fd) is not None:
            return None
        for name in names_in(staging.fd):
            if name not in (OWNER_NAME, OUTPUT, FINISHED_NAME):
                remove(name, within=staging.fd)
        heir = owner._replace(made=(*owner.made, *dead.owner.made))
        file = held.enter_context(claim(staging, heir))
    return Locked(heir, file)


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


def _may_be_own(staging: StagingDirectory) -> bool:
    status = status_of(staging.path.name, within=staging.parent)
    if status is None:  # its owner, or another run, has just removed it
        return False
    if stat.S_ISDIR(status.st_mode) and status.st_uid != os.geteuid():
        _log.info("left alone: %s, which belongs to another user", staging.path)
        return False
    return True


def _has_output(staging: StagingDirectory) -> bool:
    status = status_of(OUTPUT, within=staging.fd)
    return status is not None and stat.S_ISDIR(status.st_mode)


def remove_staging(staging: StagingDirectory, file: FileIO | None) -> None:
    """Remove a staging directory, its journal first: half an output must not be moved.

    Its owner file goes last, so that the next run can tell that the owner is dead. That `file` is
    open, and is closed here: NFS and FUSE keep a removed file, and so the directory, until then.
    """
    if file is not None and file.closed:
        return  # this process is a fork of the owner, which still works
    try:
        names = names_in(staging.fd)
        for name in sorted(names, key=lambda name: (name != JOURNAL_NAME, name == OWNER_NAME)):
            remove(name, within=staging.fd)
        if file is not None:
            file.close()
        os.rmdir(staging.path.name, dir_fd=staging.parent)
        mtime = mtime_in(staging.path.name)
        if mtime is not None:
            os.utime(staging.parent, ns=(os.fstat(staging.parent).st_atime_ns, mtime))
    except OSError as error:
        _log.warning("%s is left for the next run: %s", staging.path, error)


def remove_empty(directories: Sequence[Path]) -> None:
    """Remove directories, innermost first, while they are empty."""
    with suppress(OSError):
        for directory in directories:
            directory.rmdir()
