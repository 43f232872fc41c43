"""The four ways to commit an output; each leaves the old state or the new state, never a mix.

* *new*: the target does not exist: one rename.
* *replace*: the target is an earlier output: the two are swapped atomically or, if the system
  cannot, the target is moved aside first.
* *in place*: the target contains the checkpoint itself: files are moved into it one by one.
* *here*: the target is the current directory: like in place, but all files of the output are moved.

The last three follow a journal. It is written first, after everything is durable, so that the next
run can finish the commit; every step is idempotent. It identifies directories by inode too, so that
directories that have replaced them since are left alone. Trainers rotate checkpoints by
modification time, so a merge in place restores it.
"""

import errno
import os
import stat
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from unshard.errors import OutputError
from unshard.read.hub_files import INDEX_NAMES, RECORD_NAME
from unshard.write.companions import ADAPTER_CONFIG_NAME, is_state_file
from unshard.write.dirfd import (
    Identity,
    exchange,
    folder_of,
    identity,
    opened,
    read_file,
    status_of,
    sync_tree,
    walk,
)
from unshard.write.record import add_companions, is_weight_file, read_record
from unshard.write.staging.journal import ASIDE, OUTPUT, Journal, Mode
from unshard.write.staging.owners import StagingDirectory
from unshard.write.staging.targets import (
    find_in_the_way,
    find_strangers,
    have_same_tensors,
    refuse_strangers,
)


def take_new(staging: StagingDirectory, target: Path) -> None:
    """Make the output durable and rename it to a target that does not exist.

    Raises:
        OutputError: another process made the target in the meantime.
    """
    with opened(OUTPUT, within=staging.fd) as output:
        _list_companions(output, output, _paths(output))
    sync_tree(staging.path / OUTPUT)
    try:
        os.rename(OUTPUT, target.name, src_dir_fd=staging.fd, dst_dir_fd=staging.parent)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise OutputError(
                f"{target}: another process made it in the meantime",
                hint="use that output, or run this again",
            ) from error
        raise


def begin(
    staging: StagingDirectory,
    target: Path,
    mode: Mode,
    *,
    replaced: Collection[str],
    lose_strangers: bool,
) -> Journal:
    """Make the output durable, and return the journal of its commit; the target does not change.

    `mode` is REPLACE, IN_PLACE or HERE. Companions in `replaced` may replace a checkpoint's own;
    with `lose_strangers`, files that unshard did not write may be lost.

    Raises:
        OutputError: files in the target would be lost.
    """
    from unshard.write.staging.replacing import Sides, carry_over

    with (
        opened(target.name, within=staging.parent) as old,
        opened(OUTPUT, within=staging.fd) as new,
    ):
        status, in_place = os.fstat(old), mode is not Mode.REPLACE
        over = _paths(new) if mode is Mode.HERE else replaced
        placed = _in_order(target, old, new, over) if in_place else _paths(new)
        goes = _going(old, new, placed, mode)
        strangers = [] if lose_strangers else find_strangers(old, goes.keys() - set(replaced))
        if strangers and not have_same_tensors(target, old, staging.path / OUTPUT, strangers):
            refuse_strangers(target, strangers)
        _list_companions(old, new, placed)
        kind = Mode.IN_PLACE if in_place else mode
        journal = Journal(kind, target.name, status.st_ino, goes=goes)
        if in_place:
            journal = replace(journal, place=tuple(placed), mtime_ns=status.st_mtime_ns)
        else:
            carried = carry_over(Sides(old, new, staging.fd), leave=goes)
            os.fchmod(new, stat.S_IMODE(status.st_mode))
            journal = replace(journal, new=os.fstat(new).st_ino, carried=carried)
    sync_tree(staging.path / OUTPUT)
    return journal


def finish(staging: StagingDirectory, journal: Journal) -> list[str]:
    """Follow a journal; return notes about files that others changed in the meantime.

    Raises:
        OutputError: another process replaced the target before the commit changed anything.
        OSError: a step failed, or the target is another directory; the commit can be retried.
    """
    if journal.mode is Mode.REPLACE:
        return _replace(staging, journal)
    with opened(journal.target, within=staging.parent) as target:
        if os.fstat(target).st_ino != journal.old:
            path = staging.path.parent / journal.target
            raise FileExistsError(f"{path} was replaced by another directory")
        with opened(OUTPUT, within=staging.fd) as output:
            notes = _move_in(output, target, journal)
        os.utime(target, ns=(os.fstat(target).st_atime_ns, journal.mtime_ns))
        os.fsync(target)
    return notes


def is_begun(staging: StagingDirectory, journal: Journal) -> bool:
    """Return whether a step of the journal has already changed the target."""
    if journal.mode is Mode.REPLACE:
        return _inode(ASIDE, staging.fd) is not None or _inode(OUTPUT, staging.fd) != journal.new
    with opened(OUTPUT, within=staging.fd) as output:
        return any(status_of(path, within=output) is None for path in journal.place)


def _replace(staging: StagingDirectory, journal: Journal) -> list[str]:
    from unshard.write.staging.replacing import Sides, settle

    fd, parent = staging.fd, staging.parent
    if not is_begun(staging, journal):
        _take_old(staging, journal)
    if _inode(OUTPUT, fd) == journal.new and _inode(journal.target, parent) is None:
        os.rename(OUTPUT, journal.target, src_dir_fd=fd, dst_dir_fd=parent)
    os.fsync(parent)
    old_name = OUTPUT if _inode(ASIDE, fd) is None else ASIDE
    if _inode(OUTPUT, fd) == journal.new:  # another process has just made the target, ...
        if old_name == OUTPUT:
            raise _overtaken(staging, journal)
        journal = replace(journal, carried={})  # ... without the files of the old output
    if None in (_inode(old_name, fd), _inode(journal.target, parent)):
        return []  # another process has removed the old output or the new one
    with opened(old_name, within=fd) as old, opened(journal.target, within=parent) as new:
        notes = settle(Sides(old, new, fd), journal)
        os.fsync(new)
    return notes


def _take_old(staging: StagingDirectory, journal: Journal) -> None:
    """Swap the old output, if any, with the new one, or move it aside.

    Raises:
        OutputError: another process has replaced it.
    """
    fd, parent = staging.fd, staging.parent
    current = _inode(journal.target, parent)
    if current is None:
        return
    old_name = OUTPUT
    if current == journal.old and not exchange(fd, OUTPUT, parent, journal.target):
        old_name = ASIDE
        os.rename(journal.target, ASIDE, src_dir_fd=parent, dst_dir_fd=fd)
    if _inode(old_name, fd) == journal.old:
        return
    if current == journal.old:  # replaced between the check and the swap: undo the swap
        if old_name == ASIDE:
            os.rename(ASIDE, journal.target, src_dir_fd=fd, dst_dir_fd=parent)
        else:
            exchange(fd, OUTPUT, parent, journal.target)
    raise _overtaken(staging, journal)


def _overtaken(staging: StagingDirectory, journal: Journal) -> OutputError:
    target = staging.path.parent / journal.target
    return OutputError(f"{target}: another process replaced it in the meantime")


def _inode(name: str, within: int) -> int | None:
    status = status_of(name, within=within)
    return None if status is None else status.st_ino


def _paths(directory: int) -> list[str]:
    """Return the paths of all files in a directory, sorted."""
    return [path for path, is_folder in walk(directory) if not is_folder]


def _going(old: int, new: int, placed: Collection[str], mode: Mode) -> dict[str, Identity]:
    """Return the files of a target that will be replaced or removed, with their identities.

    Weights, and training state of an earlier merge, are obsolete if the output does not have them.
    If the output has no config, so are that merge's config and tokenizer, unless they were saved
    after it.
    """
    record, written = read_record(old), status_of(RECORD_NAME, within=old)
    candidates = [*find_in_the_way(old), *(record.state if record is not None else ())]
    is_alone = mode is not Mode.IN_PLACE and status_of("config.json", within=new) is None
    for path, size in record.sizes.items() if is_alone and record else ():
        now = status_of(path, within=old)
        if now and written and now.st_size == size and now.st_mtime_ns <= written.st_mtime_ns:
            candidates.append(path)
    obsolete = [name for name in candidates if status_of(name, within=new) is None]
    statuses = {path: status_of(path, within=old) for path in sorted({*placed, *obsolete})}
    return {path: identity(status) for path, status in statuses.items() if status is not None}


def _list_companions(old: int, new: int, placed: Collection[str]) -> None:
    """Add companions to the record: the output's, and those of an earlier output that stay."""
    record, before = read_record(new), read_record(old)
    if record is None:
        return
    sizes = {}
    for path in _paths(new):
        status = status_of(path, within=new if path in placed else old)
        if status is None or path == RECORD_NAME or path in record.sizes:
            continue
        if path in placed or (before is not None and before.sizes.get(path) == status.st_size):
            sizes[path] = status.st_size
    text = add_companions(read_file(RECORD_NAME, within=new), sizes)
    flags = os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(RECORD_NAME, flags, dir_fd=new), "wb") as stream:
        stream.write(text)


def _in_order(target: Path, old: int, new: int, replaced: Collection[str]) -> list[str]:
    """Return the files to move into a checkpoint: weights first, index and record last.

    Between them are files that belong to the weights, and files that the checkpoint lacks.
    """
    _check_folders(target, old, new)
    paths = _paths(new)
    weights = [path for path in paths if is_weight_file(path) and path not in INDEX_NAMES]
    last = [path for path in (*INDEX_NAMES, RECORD_NAME) if path in paths]
    over = {*replaced, *filter(is_state_file, paths)}
    if not find_strangers(old, [ADAPTER_CONFIG_NAME]):
        over.add(ADAPTER_CONFIG_NAME)
    state = [path for path in paths if path in over and path not in weights]
    listed = {*weights, *state, *last}
    lacking = [p for p in paths if p not in listed and status_of(p, within=old) is None]
    return [*weights, *state, *lacking, *last]


def _check_folders(target: Path, old: int, new: int) -> None:
    """Refuse folders of the output if the target has a file or a link of that name."""
    for folder in (path for path, is_folder in walk(new) if is_folder):
        try:
            with folder_of(f"{folder}/-", within=old):
                pass
        except FileNotFoundError:
            continue
        except OSError as error:
            raise OutputError(
                f"{target / folder}: is not a directory, but the output has a directory there",
                hint="move it away, or give another output",
            ) from error


def _move_in(output: int, target: int, journal: Journal) -> list[str]:
    """Move the files of a journal into the target, and remove obsolete files."""
    from unshard.write.staging.replacing import set_aside

    notes = []
    for path in journal.place:
        if status_of(path, within=output) is None:  # a killed process has moved it
            continue
        notes += set_aside(target, path, unless=journal.goes.get(path))
        with (
            folder_of(path, within=output) as (source, name),
            folder_of(path, within=target, make=True) as (folder, _),
        ):
            os.replace(name, name, src_dir_fd=source, dst_dir_fd=folder)
            os.fsync(folder)
    for path in journal.goes:
        if path not in journal.place:
            notes += set_aside(target, path, unless=journal.goes.get(path))
            with folder_of(path, within=target) as (folder, name):
                if status_of(name, within=folder) is not None:
                    os.unlink(name, dir_fd=folder)
    return notes
