"""Where an output may go, what of that place it takes, and whether that may be lost.

Only what unshard wrote there may: files that the target's `unshard.json` lists, by name and size.
Also files of the same tensors, byte for byte, as those of the output, because nothing is lost with
them: so a checkpoint that another tool merged in place can be merged again.
"""

import errno
import os
import stat
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from unshard.containers.safetensors_file import HeaderEntry, read_safetensors
from unshard.errors import CheckpointError, OutputError
from unshard.read.hub_files import INDEX_NAMES, RECORD_NAME
from unshard.showing import listed
from unshard.write.companions import ADAPTER_CONFIG_NAME, is_state_file
from unshard.write.dirfd import closing, status_of
from unshard.write.record import is_loaded, is_weight_file, read_record
from unshard.write.staging.journal import Mode

_NOTHING_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
_SLACK = 1 << 20
_SHOWN = 10
_BLOCK = 1 << 20

_Tensor = tuple[Path, int, HeaderEntry]
"""The file of a tensor, where the data of that file begin, and the tensor's entry there."""


def choose_mode(
    target: Path,
    sources: Sequence[Path],
    *,
    overwrite: bool | str,
    names: Collection[str] = (),
) -> Mode:
    """Return how an output would take its place; for the arguments see `Staging`.

    Raises:
        OutputError: the target exists and may not be replaced.
    """
    if not (target.exists() or target.is_symlink()):
        return Mode.NEW
    if not target.is_dir():
        raise OutputError(f"{target}: exists already and is not a directory")
    if not target.is_symlink() and not any(target.iterdir()):
        return Mode.HERE if _is_entered(target) else Mode.NEW
    if not overwrite:
        raise OutputError(
            f"{target}: exists already",
            hint="give another output, or replace the weights there: ⟦+--overwrite⟧",
        )
    mode = Mode.IN_PLACE if any(is_inside(one, target) for one in sources) else Mode.REPLACE
    if overwrite != "all":
        _check_strangers(target, mode, names)
    return Mode.HERE if mode is Mode.REPLACE and _is_entered(target) else mode


def _is_entered(target: Path) -> bool:
    """Return whether the current directory, most often that of a shell too, is the target.

    Or below it. A rename would leave both in a directory that is no longer there.
    """
    try:
        return is_inside(Path.cwd(), target)
    except FileNotFoundError:  # it is gone already
        return False


def is_inside(path: Path, directory: Path) -> bool:
    """Return whether a path is an existing directory, or inside it, however the two are written."""
    path = path.resolve()
    return any(_are_same(one, directory) for one in (path, *path.parents))


def _are_same(one: Path, other: Path) -> bool:
    """Return whether two paths lead to one directory.

    It has several where the case of names is ignored, and where it is mounted twice.
    """
    if type(one) is not type(other):  # on a disk and in a bucket
        return False
    try:
        return one.samefile(other)
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return False
        raise OutputError(f"{error.filename}: cannot be looked at: {error.strerror}") from error


def _check_strangers(target: Path, mode: Mode, names: Collection[str]) -> None:
    """Refuse, before an output is made, what its commit would refuse.

    In place, weights that may be equal to those of the output can only be compared in the end.
    """
    with closing(os.open(target, os.O_RDONLY | os.O_DIRECTORY)) as fd:
        paths = {*find_in_the_way(fd), RECORD_NAME}
        if mode is Mode.IN_PLACE:
            paths -= {ADAPTER_CONFIG_NAME} & set(names)
            paths |= set(filter(is_state_file, names))
        else:
            paths |= set(names)
        found = find_strangers(fd, paths)
        if mode is not Mode.IN_PLACE or not _may_have_tensors(fd, found):
            refuse_strangers(target, found)


def refuse_sources(target: Path, files: Iterable[Path]) -> None:
    """Raise OutputError if weight files of the output would replace those that are merged."""
    weights = [path for path in (file.resolve() for file in files) if is_weight_file(path.name)]
    lost = sorted(path.name for path in weights if _are_same(path.parent, target))
    if lost:
        raise OutputError(
            f"{target}: contains the weights that are merged ({lost[0]}); they would be lost",
            hint="give another output",
        )


def refuse_inside(target: Path, places: Iterable[Path]) -> None:
    """Raise OutputError if an output is, or would be in, a directory that is read."""
    for place in places:
        if is_inside(target, place):
            raise OutputError(f"{target}: is in {place}, which is read", hint="give another output")


def allocated(directory: Path) -> int:
    """Return the bytes of disk that the files in a directory take; what is gone takes none."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(folder, name).lstat().st_blocks * 512
    return total


def check_space(directory: Path, needed_bytes: int) -> None:
    """Raise OutputError if the file system does not have enough free space."""
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


def find_in_the_way(target: int) -> list[str]:
    """Return the files in a directory that would be loaded, as `is_loaded` says."""
    return sorted(filter(is_loaded, os.listdir(target)))


def find_strangers(target: int, paths: Iterable[str]) -> list[str]:
    """Return those paths in a directory at which there is something that unshard did not write."""
    record = read_record(target)
    found = []
    for path in sorted(set(paths)):
        status = status_of(path, within=target)
        if status is None:
            continue
        is_file = stat.S_ISREG(status.st_mode)
        if not (is_file and record is not None and record.lists(path, status.st_size)):
            found.append(path)
    return found


def refuse_strangers(target: Path, found: Sequence[str]) -> None:
    """Raise OutputError if there are files that unshard did not write, and that would be lost."""
    if not found:
        return
    raise OutputError(
        f"{target}: has files that unshard did not write, or that were changed since: "
        f"{listed(found, _SHOWN)}",
        expected="nothing that would be lost, or loaded instead of the output or together with it",
        hint="move them away, or give another output; to have them removed: ⟦--overwrite=all⟧",
    )


def have_same_tensors(target: Path, fd: int, output: Path, paths: Sequence[str]) -> bool:
    """Return whether files of an open target have the tensors of an output, byte for byte."""
    if not _may_have_tensors(fd, paths):
        return False
    try:
        old, new = _tensors(target, paths), _tensors(output, [one.name for one in output.iterdir()])
    except (CheckpointError, OSError):
        return False
    forms = [
        {name: (entry.dtype.name, entry.shape) for name, (_, _, entry) in tensors.items()}
        for tensors in (old, new)
    ]
    return forms[0] == forms[1] and all(_same_bytes(old[name], new[name]) for name in new)


def _may_have_tensors(fd: int, paths: Iterable[str]) -> bool:
    """Return whether files may have an output's tensors: by their names, and if not links."""
    return all(
        (path in INDEX_NAMES or _is_safetensors(path))
        and (status := status_of(path, within=fd)) is not None
        and stat.S_ISREG(status.st_mode)
        for path in paths
    )


def _is_safetensors(path: str) -> bool:
    return is_weight_file(path) and not path.startswith("adapter") and path.endswith(".safetensors")


def _tensors(directory: Path, names: Iterable[str]) -> dict[str, _Tensor]:
    files = [read_safetensors(directory / name) for name in names if _is_safetensors(name)]
    return {one.name: (file.path, file.data_start, one) for file in files for one in file.entries}


def _same_bytes(one: _Tensor, other: _Tensor) -> bool:
    (path, start, entry), (other_path, other_start, other_entry) = one, other
    left = entry.end - entry.begin
    with path.open("rb") as file, other_path.open("rb") as other_file:
        file.seek(start + entry.begin)
        other_file.seek(other_start + other_entry.begin)
        while left:
            block = file.read(min(left, _BLOCK))
            if not block or block != other_file.read(len(block)):
                return False
            left -= len(block)
    return True
