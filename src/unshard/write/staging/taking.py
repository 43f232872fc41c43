"""What of a target an output takes the place of, and whether that may be lost.

Only what unshard wrote there may: files that the target's `unshard.json` lists, by name and size.
Also files of the same tensors, byte for byte, as those of the output, because nothing is lost with
them: so a checkpoint that another tool merged in place can be merged again.
"""

import os
import stat
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from unshard.containers.safetensors_file import HeaderEntry, read_safetensors
from unshard.errors import CheckpointError, OutputError
from unshard.plan.layout import INDEX_NAME
from unshard.write.adapter import ADAPTER_CONFIG_NAME
from unshard.write.files import is_weight_file
from unshard.write.record import read_record
from unshard.write.staging.beneath import status_of

__all__ = [
    "find_in_the_way",
    "find_strangers",
    "have_same_tensors",
    "may_be_same",
    "refuse_strangers",
]

_SHOWN = 10
_BLOCK = 1 << 20


def find_in_the_way(target: int) -> list[str]:
    """Return the files that transformers would load instead of an output, or together with it.

    transformers takes `model.safetensors` before an index and before `pytorch_model.bin`; with an
    `adapter_config.json` it loads the adapter, on the base model named there. Source:
    `_get_resolved_checkpoint_files` and `AutoModel.from_pretrained` of transformers 5.23.
    """
    names = os.listdir(target)
    return sorted(name for name in names if is_weight_file(name) or name == ADAPTER_CONFIG_NAME)


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
    """Refuse to replace or remove files that unshard did not write.

    Raises:
        OutputError: there are some.
    """
    if not found:
        return
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    raise OutputError(
        f"{target}: has files that unshard did not write, or that were changed since: "
        f"{', '.join(found[:_SHOWN])}{more}",
        expected="nothing that would be lost, or loaded instead of the output or together with it",
        hint="move them away, or give another output; to have them removed: --overwrite=all",
    )


def may_be_same(target: int, paths: Collection[str]) -> bool:
    """Return whether files may have the tensors of an output: by their names, and if not links."""
    return all(
        (path == INDEX_NAME or _is_safetensors(path))
        and (status := status_of(path, within=target)) is not None
        and stat.S_ISREG(status.st_mode)
        for path in paths
    )


def have_same_tensors(target: Path, output: Path, paths: Sequence[str]) -> bool:
    """Return whether files have exactly the tensors of an output, byte for byte.

    Args:
        target: the directory of the files.
        output: the directory of the output.
        paths: the names of the files, with their index, of which `may_be_same` is true.
    """
    names = [path for path in paths if path != INDEX_NAME]
    written = [path.name for path in output.iterdir() if _is_safetensors(path.name)]
    try:
        old, new = _tensors(target, names), _tensors(output, written)
    except (CheckpointError, OSError):
        return False
    if {name: _form(*one) for name, one in old.items()} != {
        name: _form(*one) for name, one in new.items()
    }:
        return False
    return all(_same_bytes(old[name], new[name]) for name in new)


_Tensor = tuple[Path, int, HeaderEntry]


def _is_safetensors(path: str) -> bool:
    return is_weight_file(path) and path.startswith("model") and path.endswith(".safetensors")


def _tensors(directory: Path, names: Sequence[str]) -> dict[str, _Tensor]:
    files = [read_safetensors(directory / name) for name in names]
    return {one.name: (file.path, file.data_start, one) for file in files for one in file.entries}


def _form(_path: Path, _start: int, entry: HeaderEntry) -> tuple[str, tuple[int, ...]]:
    return entry.dtype.name, entry.shape


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
