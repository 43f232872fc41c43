"""What whole and sharded Hugging Face files share: JSON next to weights, tensors in safetensors.

Everything here is checked before it is used, whatever wrote it: sizes fit 64-bit integers, an index
names files of its own directory.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from unshard.containers.json_file import JsonFields, json_object, parsed_object, shown
from unshard.containers.safetensors_file import HeaderEntry, SafetensorsFile, read_safetensors
from unshard.errors import CorruptError

INDEX_NAME = "model.safetensors.index.json"
INDEX_NAMES = (INDEX_NAME, "diffusion_pytorch_model.safetensors.index.json")
PIPELINE_INDEX = "model_index.json"
"""Names the components of a pipeline of diffusers."""
MODULES = "modules.json"
"""Lists the modules of a model of sentence-transformers."""
RECORD_NAME = "unshard.json"
"""What a merge records next to the weights that it made: see `write.record`."""

MAX_INTEGER = (1 << 63) - 1
"""The largest size or offset that a column of chunks can hold."""

_LONGEST_NAME = 255
"""In bytes: of a file, on every file system that Linux has."""
_MAX_DIMENSIONS = 32
_SHARDING_INFO = "DCP_SHARDING_INFO"
_DIGITS = re.compile(r"([0-9]+)")


def weight_map(path: Path, index: Mapping[str, object] | None = None) -> dict[str, str]:
    """Return what an index says: tensor name -> file name. A CorruptError if it is malformed.

    `index` is its JSON object, where that was read before.
    """
    whole = json_object(path) if index is None else index
    fields = JsonFields(path, whole).inside("weight_map").fields
    if not fields:
        raise CorruptError(f"{path}: has no weight_map, which maps tensors to files")
    return file_names(str(path), fields)


def file_names(index: str, fields: Mapping[str, object]) -> dict[str, str]:
    """Check that an index states file names: output files are named after them."""
    found: dict[str, str] = {}
    for name, file in fields.items():
        is_name = isinstance(file, str) and "\0" not in file and "/" not in file
        if not is_name or file in ("", ".", "..") or len(str(file).encode()) > _LONGEST_NAME:
            raise CorruptError(
                f"{index}: tensor {name!r}: its file is not a name in the same directory",
                found=shown(file),
            )
        found[name] = str(file)
    return found


def read_header(path: Path) -> SafetensorsFile:
    """Return what a safetensors file's header states; one that cannot be read is corrupt."""
    try:
        return read_safetensors(path)
    except OSError as error:
        raise CorruptError(f"{path}: cannot be read: {error.strerror}") from error


def saved_offsets(file: SafetensorsFile) -> Mapping[str, object] | None:
    """Return where the pieces in a file of torch's HuggingFaceStorageWriter start, by tensor name.

    Each is what the file states, not checked yet. None for a file that says nothing of pieces.
    """
    text = file.metadata.get(_SHARDING_INFO)
    if text is None:
        return None
    fields = parsed_object(text.encode("utf-8"), f"{file.path}: its {_SHARDING_INFO}")
    return {
        name: value.get("saved_offsets") if isinstance(value, dict) else None
        for name, value in fields.items()
    }


def size_problem(path: Path, entry: HeaderEntry) -> CorruptError | None:
    """Return what is wrong with a tensor's sizes, though they fit its bytes; None if nothing is."""
    if len(entry.shape) <= _MAX_DIMENSIONS and max(entry.shape, default=0) <= MAX_INTEGER:
        return None
    return CorruptError(
        f"{path}: tensor {entry.name}: has sizes that no tensor can have",
        expected=f"at most {_MAX_DIMENSIONS} dimensions of less than 2^63 elements",
        found=f"{len(entry.shape)} dimensions, the largest of {max(entry.shape)}",
    )


def natural_order(name: str) -> tuple[tuple[str | tuple[int, str], ...], str]:
    """Return a key that sorts names as people do: `layers.9` before `layers.10`.

    Text and numbers take turns, so like is compared with like; names that differ in leading zeros
    only are ordered by the name itself.
    """
    parts: list[str | tuple[int, str]] = []
    for place, part in enumerate(_DIGITS.split(name)):
        digits = part.lstrip("0")
        parts.append((len(digits), digits) if place % 2 else part)
    return tuple(parts), name
