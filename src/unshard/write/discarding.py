"""Remove the output of a merge, if all of it was written by unshard."""

import os
from contextlib import ExitStack
from pathlib import Path

from unshard.console import listed as some_of
from unshard.errors import OutputError
from unshard.read.hub_files import RECORD_NAME
from unshard.signals import uninterrupted
from unshard.stores.objects import listed, remove
from unshard.stores.remote_path import RemotePath
from unshard.write.dirfd import closing, opened, status_of, walk
from unshard.write.record import is_last, parse_record
from unshard.write.staging.journal import OUTPUT
from unshard.write.staging.owners import Owner, StagingDirectory, claim, staging_name
from unshard.write.staging.recovery import remove_staging
from unshard.write.staging.targets import find_strangers

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def discard(output: Path) -> None:
    """Remove an output.

    On a disk it is first renamed into a staging directory, so that the next run removes the rest if
    this process is killed. In a store the config goes first, so that no reader regards the rest as
    a model, and the record last.

    Raises:
        OutputError: it is a link, or has files that unshard did not write, or that were changed
            since; nothing is removed.
        OSError, StoreError: it cannot be removed.
    """
    if isinstance(output, RemotePath):
        _discard_objects(output)
    elif output.is_symlink():
        raise OutputError(f"{output} is not removed: it is a link")
    else:
        _discard_directory(output)


def _discard_directory(output: Path) -> None:
    with closing(os.open(output.parent, _DIRECTORY)) as parent, ExitStack() as held:
        with opened(output.name, within=parent) as fd:
            _refuse(output, _others(fd))
        name = staging_name(parent, None)
        with uninterrupted():
            os.mkdir(name, 0o700, dir_fd=parent)
            fd = held.enter_context(opened(name, within=parent))
            staging = StagingDirectory(output.parent / name, parent, fd)
            file = held.enter_context(claim(staging, Owner()))
            os.rename(output.name, OUTPUT, src_dir_fd=parent, dst_dir_fd=fd)
            remove_staging(staging, file)


def _others(output: int) -> list[str]:
    """Return the paths in an output that unshard did not write, or that changed after its record.

    The record is written last, so a file with a later time was changed.
    """
    paths = list(walk(output))
    files = [path for path, is_folder in paths if not is_folder]
    status = status_of(RECORD_NAME, within=output)
    written = 0 if status is None else status.st_mtime_ns
    statuses = {path: status_of(path, within=output) for path in files}
    later = [path for path, at in statuses.items() if at is None or at.st_mtime_ns > written]
    empty = [
        folder
        for folder, is_folder in paths
        if is_folder and not any(path.startswith(f"{folder}/") for path in files)
    ]
    return [*find_strangers(output, files), *later, *empty]


def _discard_objects(output: RemotePath) -> None:
    objects = listed(output.bucket, output.key)
    record = parse_record((output / RECORD_NAME).read_bytes()) if RECORD_NAME in objects else None
    strangers = [
        name
        for name, stored in objects.items()
        if record is None or not record.lists(name, stored.size)
    ]
    _refuse(output, strangers)
    for name in sorted(objects, key=lambda name: (name == RECORD_NAME, not is_last(name))):
        remove(output.bucket, f"{output.key}/{name}")


def _refuse(output: Path, strangers: list[str]) -> None:
    if strangers:
        raise OutputError(
            f"{output} is not removed: some files were not written by unshard, or changed since: "
            f"{some_of(sorted({*strangers}))}"
        )
