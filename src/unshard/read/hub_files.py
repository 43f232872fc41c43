"""Shared parts of whole and sharded Hugging Face files: JSON next to weights, safetensors headers.

Everything is checked before it is used: sizes fit 64-bit integers, and an index contains names of
files in its own directory.
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
"""The list of components of a diffusers pipeline."""
MODULES = "modules.json"
"""The list of modules of a sentence-transformers model."""
RECORD_NAME = "unshard.json"
"""The record of a merge next to its weights: see `write.record`."""

MAX_INTEGER = (1 << 63) - 1
"""The largest size or offset that a column of chunks can hold."""

_LONGEST_NAME = 255
"""In bytes: the limit of file names on Linux file systems."""
_MAX_DIMENSIONS = 32
_SHARDING_INFO = "DCP_SHARDING_INFO"
_DIGITS = re.compile(r"([0-9]+)")


def weight_map(path: Path, index: Mapping[str, object] | None = None) -> dict[str, str]:
    """Return an index: tensor name -> file name. A CorruptError if it is malformed.

    `index` is its JSON object, if that was read before.
    """
    whole = json_object(path) if index is None else index
    fields = JsonFields(path, whole).inside("weight_map").fields
    if not fields:
        raise CorruptError(f"{path}: has no weight_map, which maps tensors to files")
    return file_names(str(path), fields)


def file_names(index: str, fields: Mapping[str, object]) -> dict[str, str]:
    """Return the file names of an index, checked: output files are named after them."""
    files: dict[str, str] = {}
    for name, file in fields.items():
        is_name = isinstance(file, str) and "\0" not in file and "/" not in file
        if not is_name or file in ("", ".", "..") or len(str(file).encode()) > _LONGEST_NAME:
            raise CorruptError(
                f"{index}: tensor {name!r}: its file is not a name in the same directory",
                found=shown(file),
            )
        files[name] = str(file)
    return files


def read_header(path: Path) -> SafetensorsFile:
    """Read a safetensors file's header; a file that cannot be read is corrupt."""
    try:
        return read_safetensors(path)
    except OSError as error:
        raise CorruptError(f"{path}: cannot be read: {error.strerror}") from error


def saved_offsets(file: SafetensorsFile) -> Mapping[str, object] | None:
    """Return the offsets of the pieces in a file of torch's HuggingFaceStorageWriter, by tensor.

    They are not checked. None for a file without pieces.
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
    """Return the error of a tensor with impossible sizes, even if they fit its bytes; or None."""
    if len(entry.shape) <= _MAX_DIMENSIONS and max(entry.shape, default=0) <= MAX_INTEGER:
        return None
    return CorruptError(
        f"{path}: tensor {entry.name}: has sizes that no tensor can have",
        expected=f"at most {_MAX_DIMENSIONS} dimensions of less than 2^63 elements",
        found=f"{len(entry.shape)} dimensions, the largest of {max(entry.shape)}",
    )


def natural_order(name: str) -> tuple[tuple[str | tuple[int, str], ...], str]:
    """Return a key that sorts names as people do: `layers.9` before `layers.10`.

    Text and numbers alternate, so equal types are compared; names that differ only in leading zeros
    are ordered by the name itself.
    """
    parts: list[str | tuple[int, str]] = []
    for place, part in enumerate(_DIGITS.split(name)):
        digits = part.lstrip("0")
        parts.append((len(digits), digits) if place % 2 else part)
    return tuple(parts), name
