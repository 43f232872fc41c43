"""Where an output may go, before anything is made: what is there, what would be lost, what fits."""

import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from unshard.errors import OutputError
from unshard.write.adapter import ADAPTER_CONFIG_NAME
from unshard.write.companions import EXTRA_STATE_NAME, SCHEDULER_NAME
from unshard.write.files import is_weight_file
from unshard.write.record import RECORD_NAME
from unshard.write.staging.journal import Mode
from unshard.write.staging.taking import (
    find_in_the_way,
    find_strangers,
    may_be_same,
    refuse_strangers,
)

__all__ = ["check_space", "choose_mode", "refuse_sources"]

_SLACK = 1 << 20


def choose_mode(
    target: Path,
    sources: Sequence[Path],
    *,
    overwrite: bool | str,
    names: Collection[str] = (),
) -> Mode:
    """Return how an output would take its place.

    Args:
        target: where the output goes.
        sources: the directories of the checkpoint.
        overwrite: whether what unshard wrote there may be replaced; "all": other files too.
        names: the paths that the output will have.

    Raises:
        OutputError: the target exists and may not be replaced.
    """
    if not (target.exists() or target.is_symlink()):
        return Mode.NEW
    if not target.is_dir():
        raise OutputError(f"{target}: exists already and is not a directory")
    if not target.is_symlink() and not any(target.iterdir()):
        return Mode.NEW
    if not overwrite:
        raise OutputError(
            f"{target}: exists already",
            hint="give another output, or replace the weights there: --overwrite",
        )
    inside = any(source.resolve().is_relative_to(target.resolve()) for source in sources)
    mode = Mode.IN_PLACE if inside else Mode.REPLACE
    if overwrite != "all":
        _check_strangers(target, mode, names)
    return mode


def _check_strangers(target: Path, mode: Mode, names: Collection[str]) -> None:
    """Refuse, before an output is made, what its commit would refuse.

    In place, weights that may be equal to those of the output can only be compared in the end.
    """
    fd = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    try:
        paths = {*find_in_the_way(fd), RECORD_NAME}
        if mode is Mode.IN_PLACE:
            paths -= {ADAPTER_CONFIG_NAME} & set(names)
            paths |= {EXTRA_STATE_NAME, SCHEDULER_NAME} & set(names)
        else:
            paths |= set(names)
        found = find_strangers(fd, paths)
        if mode is not Mode.IN_PLACE or not may_be_same(fd, found):
            refuse_strangers(target, found)
    finally:
        os.close(fd)


def refuse_sources(target: Path, files: Iterable[Path]) -> None:
    """Refuse to replace the files that are merged.

    Raises:
        OutputError: a weight file of the output would replace one of them.
    """
    place = target.resolve()
    own = sorted(file.name for file in files if file.resolve().parent == place)
    lost = [name for name in own if is_weight_file(name)]
    if lost:
        raise OutputError(
            f"{target}: contains the weights that are merged ({lost[0]}); they would be lost",
            hint="give another output",
        )


def check_space(directory: Path, needed_bytes: int) -> None:
    """Refuse to begin what does not fit on the file system.

    Raises:
        OutputError: there is not enough free space.
    """
    stats = os.statvfs(directory)
    free = stats.f_bavail * stats.f_frsize
    if free < needed_bytes + _SLACK:
        raise OutputError(
            f"{directory}: not enough free space",
            expected=f"{needed_bytes + _SLACK:,} bytes",
            found=f"{free:,} bytes",
            hint="free some space, or use another file system: an output elsewhere, or TMPDIR for "
            "temporary files",
        )
