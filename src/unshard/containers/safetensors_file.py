"""Write and read the headers of safetensors files by the format's own rules.

A file is a 64-bit little-endian header length N, N bytes of JSON (padded with spaces so that data
starts at a multiple of 8), then the tensors' bytes without holes or overlap.

Source: the format section of safetensors' README and its Rust validator.
"""

import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from struct import pack, unpack
from typing import NamedTuple, TypeGuard

from unshard.containers.json_file import parsed_object
from unshard.containers.open_files import opened, pread, size_of
from unshard.errors import CorruptError, IncompleteError
from unshard.tensors.dtypes import BY_CODE, DType

MAX_HEADER = 100_000_000
"""Longest header, bytes, that safetensors' own reader accepts."""

_METADATA = "__metadata__"
_MAX_SIZE = 1 << 64


class HeaderEntry(NamedTuple):
    """A tensor in a header; `begin` and `end` are bytes from the start of the data."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile(NamedTuple):
    """The header of a safetensors file; `data_start` is the byte at which tensors begin."""

    path: Path
    data_start: int
    entries: tuple[HeaderEntry, ...]
    metadata: Mapping[str, str]


def encode_header(entries: Sequence[HeaderEntry], metadata: Mapping[str, str]) -> bytes:
    """Return the first bytes of a file: length and header, padded to a multiple of 8.

    The entries must be contiguous, as in `plan.layout`.
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
        IncompleteError: the file is empty or truncated.
        CorruptError: the header breaks a rule of the format.
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
    header = f"{path}: its header"

    def refuse(constant: str) -> object:
        raise CorruptError(f"{header} is not valid JSON: {constant}")

    if not text.startswith(b"{"):
        raise CorruptError(f"{header} is not a JSON object")
    fields = parsed_object(text, header, parse_constant=refuse)
    metadata = fields.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CorruptError(f"{path}: its {_METADATA} does not map strings to strings")
    entries = [_entry(path, name, value) for name, value in fields.items()]
    return tuple(sorted(entries, key=lambda entry: (entry.begin, entry.end))), metadata


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
    """Return whether these are sizes whose product is a size, even if zeros are replaced by 1."""
    elements = 1
    for size in sizes:
        if not _is_size(size):
            return False
        elements *= max(size, 1)
        if elements >= _MAX_SIZE:
            return False
    return True


def _is_size(value: object) -> TypeGuard[int]:
    """Return whether this is a valid size in the format: not negative, below 2^64."""
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
