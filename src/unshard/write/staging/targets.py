"""Permitted targets of an output, and the files there that it may replace.

These are files that unshard wrote: the target's `unshard.json` lists them by name and size. Weight
files with the same tensors as the output, byte for byte, may be replaced too, so that a checkpoint
that another tool merged in place can be merged again.
"""

import errno
import os
import stat
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from unshard.console import listed
from unshard.containers.safetensors_file import HeaderEntry, read_safetensors
from unshard.errors import CheckpointError, OutputError
from unshard.read.hub_files import INDEX_NAMES, RECORD_NAME
from unshard.write.companions import ADAPTER_CONFIG_NAME, is_state_file
from unshard.write.dirfd import closing, status_of
from unshard.write.record import is_loaded, is_weight_file, read_record
from unshard.write.staging.journal import Mode

_NOTHING_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
_SLACK = 1 << 20
_SHOWN = 10
_BLOCK = 1 << 20

_Tensor = tuple[Path, int, HeaderEntry]
"""The file of a tensor, the offset of that file's data, and the tensor's entry there."""


def choose_mode(
    target: Path,
    sources: Sequence[Path],
    *,
    overwrite: bool | str,
    names: Collection[str] = (),
) -> Mode:
    """Return the mode of an output's commit; for the arguments see `Staging`.

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
    is_in_place = any(is_inside(source, target) for source in sources)
    mode = Mode.IN_PLACE if is_in_place else Mode.REPLACE
    if overwrite != "all":
        _check_strangers(target, mode, names)
    return Mode.HERE if mode is Mode.REPLACE and _is_entered(target) else mode


def _is_entered(target: Path) -> bool:
    """Return whether the current directory is the target, or inside it.

    A rename would leave this process, and usually its shell, in a directory that no longer exists.
    """
    try:
        return is_inside(Path.cwd(), target)
    except FileNotFoundError:  # already removed
        return False


def is_inside(path: Path, directory: Path) -> bool:
    """Return whether a path is an existing directory or inside it, however they are written."""
    path = path.resolve()
    return any(_are_same(ancestor, directory) for ancestor in (path, *path.parents))


def _are_same(one: Path, other: Path) -> bool:
    """Return whether two paths lead to the same directory.

    They may differ if case is ignored, or the directory is mounted twice.
    """
    if type(one) is not type(other):  # a disk and a bucket
        return False
    try:
        return one.samefile(other)
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return False
        raise OutputError(f"{error.filename}: cannot be examined: {error.strerror}") from error


def _check_strangers(target: Path, mode: Mode, names: Collection[str]) -> None:
    """Refuse files that the commit would refuse, before the output is made.

    In place, weights that may equal the output's can only be compared at the end.
    """
    with closing(os.open(target, os.O_RDONLY | os.O_DIRECTORY)) as fd:
        paths = {*find_in_the_way(fd), RECORD_NAME}
        if mode is Mode.IN_PLACE:
            paths -= {ADAPTER_CONFIG_NAME} & set(names)
            paths |= set(filter(is_state_file, names))
        else:
            paths |= set(names)
        strangers = find_strangers(fd, paths)
        if mode is not Mode.IN_PLACE or not _may_have_tensors(fd, strangers):
            refuse_strangers(target, strangers)


def refuse_sources(target: Path, files: Iterable[Path]) -> None:
    """Raise OutputError if the output would replace the weight files that are merged."""
    weights = [path for path in (file.resolve() for file in files) if is_weight_file(path.name)]
    lost = sorted(path.name for path in weights if _are_same(path.parent, target))
    if lost:
        raise OutputError(
            f"{target}: contains the weights that are merged ({lost[0]}); they would be lost",
            hint="give another output",
        )


def refuse_inside(target: Path, places: Iterable[Path]) -> None:
    """Raise OutputError if the output is one of the source directories, or inside one."""
    for place in places:
        if is_inside(target, place):
            raise OutputError(f"{target}: is in {place}, which is read", hint="give another output")


def allocated(directory: Path) -> int:
    """Return the allocated bytes of the files in a directory; files that vanish count 0."""
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
            hint="free some space, or use another file system: another output, or TMPDIR for "
            "temporary files",
        )


def find_in_the_way(target: int) -> list[str]:
    """Return the files in a directory that transformers would load; see `is_loaded`."""
    return sorted(filter(is_loaded, os.listdir(target)))


def find_strangers(target: int, paths: Iterable[str]) -> list[str]:
    """Return the paths in a directory that exist and were not written by unshard."""
    record = read_record(target)
    strangers = []
    for path in sorted(set(paths)):
        status = status_of(path, within=target)
        if status is None:
            continue
        is_file = stat.S_ISREG(status.st_mode)
        if not (is_file and record is not None and record.lists(path, status.st_size)):
            strangers.append(path)
    return strangers


def refuse_strangers(target: Path, strangers: Sequence[str]) -> None:
    """Raise OutputError if files that unshard did not write would be lost."""
    if not strangers:
        return
    raise OutputError(
        f"{target}: has files that unshard did not write, or that were changed since: "
        f"{listed(strangers, _SHOWN)}",
        expected="no file that would be lost, or loaded instead of the output or together with it",
        hint="move them away, or give another output; to have them removed: ⟦--overwrite=all⟧",
    )


def have_same_tensors(target: Path, fd: int, output: Path, paths: Sequence[str]) -> bool:
    """Return whether files of an open target have the tensors of an output, byte for byte."""
    if not _may_have_tensors(fd, paths):
        return False
    try:
        old = _tensors(target, paths)
        new = _tensors(output, [path.name for path in output.iterdir()])
    except (CheckpointError, OSError):
        return False
    forms = [
        {name: (entry.dtype.name, entry.shape) for name, (_, _, entry) in tensors.items()}
        for tensors in (old, new)
    ]
    return forms[0] == forms[1] and all(_same_bytes(old[name], new[name]) for name in new)


def _may_have_tensors(fd: int, paths: Iterable[str]) -> bool:
    """Return whether files may have an output's tensors, by their names and types."""
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
    return {
        entry.name: (file.path, file.data_start, entry) for file in files for entry in file.entries
    }


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
