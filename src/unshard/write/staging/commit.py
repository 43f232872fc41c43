"""The four ways an output takes its place; each leaves the old state or the new one, never a mix.

* *new*: the target does not exist: one rename.
* *replace*: the target is an earlier output: it is exchanged with the new one in one atomic step,
  or, where the system cannot, moved aside first.
* *in place*: the target contains the checkpoint itself: files are moved into it one by one.
* *here*: the target is the current directory: as in place, but all files of the output are moved.

The last three follow a journal, which is written first, when everything is durable, so that the
next run finishes what was begun. Every step of it may be done twice. It names directories by their
inodes too: what has come to be in their place since is left alone. Trainers rotate checkpoints by
modification time, so a merge in place gives it back.
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
from unshard.write.staging.journal import (
    ASIDE,
    OUTPUT,
    Journal,
    Mode,
)
from unshard.write.staging.owners import StagingDirectory
from unshard.write.staging.targets import (
    find_in_the_way,
    find_strangers,
    have_same_tensors,
    refuse_strangers,
)


def take_new(place: StagingDirectory, target: Path) -> None:
    """Make the output durable and rename it to a target that does not exist.

    Raises:
        OutputError: the target was made by another process in the meantime.
    """
    with opened(OUTPUT, within=place.fd) as output:
        _list_companions(output, output, _paths(output))
    sync_tree(place.path / OUTPUT)
    try:
        os.rename(OUTPUT, target.name, src_dir_fd=place.fd, dst_dir_fd=place.parent)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise OutputError(
                f"{target}: another process made it in the meantime",
                hint="use what it made, or run this again",
            ) from error
        raise


def begin(
    place: StagingDirectory,
    target: Path,
    mode: Mode,
    *,
    replaced: Collection[str],
    lose_strangers: bool,
) -> Journal:
    """Make the output durable; return what has to be done with it. The target is as it was.

    `mode` is REPLACE, IN_PLACE or HERE. Companions in `replaced` may replace those in a
    checkpoint's own directory; `lose_strangers`: files that unshard did not write may be lost.

    Raises:
        OutputError: the target has something in the way.
    """
    from unshard.write.staging.replacing import Sides, carry_over

    with opened(target.name, within=place.parent) as old, opened(OUTPUT, within=place.fd) as new:
        status, in_place = os.fstat(old), mode is not Mode.REPLACE
        over = _paths(new) if mode is Mode.HERE else replaced
        placed = _in_order(target, old, new, over) if in_place else _paths(new)
        goes = _going(old, new, placed, mode)
        found = [] if lose_strangers else find_strangers(old, goes.keys() - set(replaced))
        if found and not have_same_tensors(target, old, place.path / OUTPUT, found):
            refuse_strangers(target, found)
        _list_companions(old, new, placed)
        kind = Mode.IN_PLACE if in_place else mode
        journal = Journal(kind, target.name, status.st_ino, goes=goes)
        if in_place:
            journal = replace(journal, place=tuple(placed), mtime_ns=status.st_mtime_ns)
        else:
            carried = carry_over(Sides(old, new, place.fd), leave=goes)
            os.fchmod(new, stat.S_IMODE(status.st_mode))
            journal = replace(journal, new=os.fstat(new).st_ino, carried=carried)
    sync_tree(place.path / OUTPUT)
    return journal


def finish(place: StagingDirectory, journal: Journal) -> list[str]:
    """Follow a journal; return notes about files that others changed in the meantime.

    Raises:
        OutputError: another process has replaced the target, before anything was done.
        OSError: a step failed, or the target is not what it was; it can be tried again.
    """
    if journal.mode is Mode.REPLACE:
        return _replace(place, journal)
    with opened(journal.target, within=place.parent) as target:
        if os.fstat(target).st_ino != journal.old:
            path = place.path.parent / journal.target
            raise FileExistsError(f"{path} is not the directory that was to be written to")
        with opened(OUTPUT, within=place.fd) as output:
            notes = _move_in(output, target, journal)
        os.utime(target, ns=(os.fstat(target).st_atime_ns, journal.mtime_ns))
        os.fsync(target)
    return notes


def is_begun(place: StagingDirectory, journal: Journal) -> bool:
    """Return whether a step of the journal has already changed the target."""
    if journal.mode is Mode.REPLACE:
        return _inode(ASIDE, place.fd) is not None or _inode(OUTPUT, place.fd) != journal.new
    with opened(OUTPUT, within=place.fd) as output:
        return any(status_of(path, within=output) is None for path in journal.place)


def _replace(place: StagingDirectory, journal: Journal) -> list[str]:
    from unshard.write.staging.replacing import Sides, settle

    if not is_begun(place, journal):
        _take_old(place, journal)
    if _inode(OUTPUT, place.fd) == journal.new and _inode(journal.target, place.parent) is None:
        os.rename(OUTPUT, journal.target, src_dir_fd=place.fd, dst_dir_fd=place.parent)
    os.fsync(place.parent)
    taken = OUTPUT if _inode(ASIDE, place.fd) is None else ASIDE
    if _inode(OUTPUT, place.fd) == journal.new:  # another process made the target just now, ...
        if taken == OUTPUT:
            raise _overtaken(place, journal)
        journal = replace(journal, carried={})  # ... without anything of the old one
    if None in (_inode(taken, place.fd), _inode(journal.target, place.parent)):
        return []  # somebody has removed the old one, or the new one
    with opened(taken, within=place.fd) as old, opened(journal.target, within=place.parent) as new:
        notes = settle(Sides(old, new, place.fd), journal)
        os.fsync(new)
    return notes


def _take_old(place: StagingDirectory, journal: Journal) -> None:
    """Take the old output, if there is one: in exchange for the new one, or aside.

    Raises:
        OutputError: another process has replaced it.
    """
    there = _inode(journal.target, place.parent)
    if there is None:
        return
    taken = OUTPUT
    if there == journal.old and not exchange(place.fd, OUTPUT, place.parent, journal.target):
        taken = ASIDE
        os.rename(journal.target, ASIDE, src_dir_fd=place.parent, dst_dir_fd=place.fd)
    if _inode(taken, place.fd) == journal.old:
        return
    if there == journal.old:  # it was replaced after the first look: give back what replaced it
        if taken == ASIDE:
            os.rename(ASIDE, journal.target, src_dir_fd=place.fd, dst_dir_fd=place.parent)
        else:
            exchange(place.fd, OUTPUT, place.parent, journal.target)
    raise _overtaken(place, journal)


def _overtaken(place: StagingDirectory, journal: Journal) -> OutputError:
    target = place.path.parent / journal.target
    return OutputError(f"{target}: another process replaced it in the meantime")


def _inode(name: str, within: int) -> int | None:
    status = status_of(name, within=within)
    return None if status is None else status.st_ino


def _paths(directory: int) -> list[str]:
    """Return the paths of all files in a directory, sorted."""
    return [path for path, is_folder in walk(directory) if not is_folder]


def _going(old: int, new: int, placed: Collection[str], mode: Mode) -> dict[str, Identity]:
    """Return the files of a target that go, as they are.

    Obsolete are weights, and training state of an earlier merge, that the output does not have; if
    it has no config, also that merge's config and tokenizer, unless they were saved after it.
    """
    record, written = read_record(old), status_of(RECORD_NAME, within=old)
    known = [*find_in_the_way(old), *(record.state if record is not None else ())]
    is_alone = mode is not Mode.IN_PLACE and status_of("config.json", within=new) is None
    for path, size in record.sizes.items() if is_alone and record else ():
        now = status_of(path, within=old)
        if now and written and now.st_size == size and now.st_mtime_ns <= written.st_mtime_ns:
            known.append(path)
    obsolete = [name for name in known if status_of(name, within=new) is None]
    found = {path: status_of(path, within=old) for path in sorted({*placed, *obsolete})}
    return {path: identity(status) for path, status in found.items() if status is not None}


def _list_companions(old: int, new: int, placed: Collection[str]) -> None:
    """Add the files that are not weights to the record: those of the output, and kept own ones."""
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

    Between them are files that belong to the weights, and those that the checkpoint lacks.
    """
    _check_folders(target, old, new)
    paths = _paths(new)
    weights = [path for path in paths if is_weight_file(path) and path not in INDEX_NAMES]
    last = [path for path in (*INDEX_NAMES, RECORD_NAME) if path in paths]
    over = {*replaced, *filter(is_state_file, paths)}
    if not find_strangers(old, [ADAPTER_CONFIG_NAME]):
        over.add(ADAPTER_CONFIG_NAME)
    state = [path for path in paths if path in over and path not in weights]
    known = {*weights, *state, *last}
    lacking = [p for p in paths if p not in known and status_of(p, within=old) is None]
    return [*weights, *state, *lacking, *last]


def _check_folders(target: Path, old: int, new: int) -> None:
    """Refuse folders of the output whose place is taken by a file, or by a link to elsewhere."""
    for folder in (path for path, is_folder in walk(new) if is_folder):
        try:
            with folder_of(f"{folder}/-", within=old):
                pass
        except FileNotFoundError:
            continue
        except OSError as error:
            raise OutputError(
                f"{target / folder}: is not a directory, and the output has one of that name",
                hint="move it away, or give another output",
            ) from error


def _move_in(output: int, target: int, journal: Journal) -> list[str]:
    """Move the files of a journal into the target, and remove what is obsolete."""
    from unshard.write.staging.replacing import set_aside

    notes = []
    for path in journal.place:
        if status_of(path, within=output) is None:  # moved before a process died
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
