"""The safetensors container: its header written and read by the format's own rules.

A file is a 64-bit little-endian header length N, N bytes of JSON (padded with spaces so that data
starts at a multiple of 8), then the tensors' bytes without holes or overlap. Knows names, dtypes,
shapes and offsets; the bytes themselves are moved by others.

Source: the format section of safetensors' README and its Rust validator.
"""

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from struct import pack, unpack
from typing import NamedTuple, TypeGuard

from unshard.containers.json_file import is_too_dense
from unshard.containers.open_files import opened, pread, size_of
from unshard.errors import CorruptError, IncompleteError
from unshard.tensors.dtypes import BY_CODE, DType

MAX_HEADER = 100_000_000
"""Longest header, bytes, that safetensors' own reader accepts."""

_METADATA = "__metadata__"
_MAX_SIZE = 1 << 64


class HeaderEntry(NamedTuple):
    """A tensor as its header states it; `begin` and `end` are bytes from the start of the data."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile(NamedTuple):
    """What a safetensors file's header states; `data_start` is the byte where tensors begin."""

    path: Path
    data_start: int
    entries: tuple[HeaderEntry, ...]
    metadata: Mapping[str, str]


def encode_header(entries: Sequence[HeaderEntry], metadata: Mapping[str, str]) -> bytes:
    """Return the first bytes of a file: length and header, padded to a multiple of 8.

    The entries must follow one another without holes, as `layout` lays them out.
    """
    fields: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    for entry in entries:
        fields[entry.name] = {
            "dtype": entry.dtype.code,
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    padded = text + b" " * (-len(text) % 8)
    return pack("<Q", len(padded)) + padded


def read_safetensors(path: Path) -> SafetensorsFile:
    """Read and check a file's header.

    Raises:
        IncompleteError: the file is empty or shorter than its header says.
        CorruptError: the header breaks a rule of the format; the message says which.
    """
    with opened(path) as file:
        size = size_of(file)
        if size < 8:
            raise IncompleteError(f"{path}: {size} bytes; a safetensors file has at least 8")
        (length,) = unpack("<Q", pread(file, 8, 0))
        if length > MAX_HEADER:
            raise CorruptError(
                f"{path}: its header claims {length} bytes", expected=f"at most {MAX_HEADER}"
            )
        text = pread(file, length, 8)
    if len(text) != length:
        raise IncompleteError(f"{path}: truncated in its header", found=f"{size} bytes in all")
    entries, metadata = _parse(path, text)
    _check_tiling(path, entries, size - 8 - length)
    return SafetensorsFile(path, 8 + length, entries, metadata)


def _parse(path: Path, text: bytes) -> tuple[tuple[HeaderEntry, ...], dict[str, str]]:
    if is_too_dense(text):
        raise CorruptError(f"{path}: its header has too many values for its {len(text)} bytes")
    try:
        fields = json.loads(
            text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path}: its header is not valid JSON: {error}") from error
    if not text.startswith(b"{") or not isinstance(fields, dict):
        raise CorruptError(f"{path}: its header is not a JSON object")
    metadata = fields.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CorruptError(f"{path}: its {_METADATA} is not a map from text to text")
    entries = [_entry(path, name, value) for name, value in fields.items()]
    return tuple(sorted(entries, key=lambda entry: (entry.begin, entry.end))), metadata


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice")
    for text in (*fields, *(value for value in fields.values() if isinstance(value, str))):
        text.encode("utf-8")  # half a surrogate pair is not text: a ValueError
    return fields


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _entry(path: Path, name: str, value: object) -> HeaderEntry:
    match value:
        case {"dtype": str(code), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if (
            _is_shape(shape) and _is_size(begin) and _is_size(end)
        ):
            pass
        case _:
            raise CorruptError(
                f"{path}: tensor {name}: its header entry is malformed: {str(value)[:200]}"
            )
    dtype = BY_CODE.get(code)
    if dtype is None:
        raise CorruptError(f"{path}: tensor {name}: unknown dtype {code}")
    if end - begin != prod(shape) * dtype.itemsize:
        raise CorruptError(
            f"{path}: tensor {name}: its bytes do not fit its shape",
            expected=f"{prod(shape) * dtype.itemsize} bytes for {code} {shape}",
            found=f"{end - begin}",
        )
    return HeaderEntry(name, dtype, tuple(shape), begin, end)


def _is_shape(sizes: list[object]) -> bool:
    """Return whether these are sizes, and their product is one, whichever of them are 0."""
    elements = 1
    for size in sizes:
        if not _is_size(size):
            return False
        elements *= max(size, 1)
        if elements >= _MAX_SIZE:
            return False
    return True


def _is_size(value: object) -> TypeGuard[int]:
    """Return whether this is a size as the format has them: not negative, below 2^64."""
    return type(value) is int and 0 <= value < _MAX_SIZE


def _check_tiling(path: Path, entries: Sequence[HeaderEntry], data_size: int) -> None:
    at = 0
    for entry in entries:
        if entry.begin != at:
            kind = "a hole" if entry.begin > at else "an overlap"
            raise CorruptError(f"{path}: {kind} before tensor {entry.name}, at data byte {at}")
        at = entry.end
    if at > data_size:
        raise IncompleteError(
            f"{path}: truncated", expected=f"{at} bytes of data", found=f"{data_size}"
        )
    if at < data_size:
        raise CorruptError(f"{path}: {data_size - at} bytes follow the last tensor")
