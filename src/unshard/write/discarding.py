"""Remove an output of a merge whole, if nothing that others wrote is in it."""

import os
from contextlib import ExitStack
from pathlib import Path

from unshard.errors import OutputError
from unshard.read.hub_files import RECORD_NAME
from unshard.showing import listed as some_of
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
    """Remove an output; from a disk in one step, and what a killed process leaves, the next one.

    From a store its config goes first, so that no reader takes what is left for a model, and the
    record last.

    Raises:
        OutputError: it has files that unshard did not write, or that were changed since, or is a
            link; all of it is left.
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
            made = held.enter_context(opened(name, within=parent))
            place = StagingDirectory(output.parent / name, parent, made)
            file = held.enter_context(claim(place, Owner()))
            os.rename(output.name, OUTPUT, src_dir_fd=parent, dst_dir_fd=made)
            remove_staging(place, file)


def _others(output: int) -> list[str]:
    """Return what an output has that is not as unshard wrote it; its record was written last."""
    found = list(walk(output))
    files = [path for path, is_folder in found if not is_folder]
    status = status_of(RECORD_NAME, within=output)
    written = 0 if status is None else status.st_mtime_ns
    times = {path: status_of(path, within=output) for path in files}
    later = [path for path, one in times.items() if one is None or one.st_mtime_ns > written]
    empty = [
        path
        for path, is_folder in found
        if is_folder and not any(one.startswith(f"{path}/") for one in files)
    ]
    return [*find_strangers(output, files), *later, *empty]


def _discard_objects(output: RemotePath) -> None:
    found = listed(output.bucket, output.key)
    record = parse_record((output / RECORD_NAME).read_bytes()) if RECORD_NAME in found else None
    sizes = {name: one.size for name, one in found.items()}
    _refuse(output, [one for one in sizes if record is None or not record.lists(one, sizes[one])])
    for name in sorted(found, key=lambda name: (name == RECORD_NAME, not is_last(name))):
        remove(output.bucket, f"{output.key}/{name}")


def _refuse(output: Path, strangers: list[str]) -> None:
    if strangers:
        raise OutputError(
            f"{output} is not removed: unshard did not write all of it, or it was changed since: "
            f"{some_of(sorted({*strangers}))}"
        )
