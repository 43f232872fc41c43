"""The one writer of `torch.save` files: plain values and tensors in a zip, written without torch.

`torch.load` reads them with `weights_only=True`, also with `mmap=True`. Records are stored, not
compressed; their data start at multiples of 64 bytes, as torch's own do; times are fixed, so the
same value gives the same bytes.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from struct import pack
from typing import BinaryIO
from zipfile import ZipFile, ZipInfo

from unshard.containers.pickles.writer import Plain, SavedTensor, write_pickle
from unshard.containers.strided import read_exactly
from unshard.tensors.catalog import ByteRange

__all__ = ["write_torch_file"]

_ROOT = "archive"
_VERSION = b"3\n"
_ALIGNMENT = 64
_BLOCK = 1 << 20
_LOCAL_SIZE = 30
_ZIP64_FIELD = 20
_ZIP64_FROM = 1 << 30  # zipfile would decide by itself from about 2 GiB on
_UNIX = 3


def write_torch_file(path: Path, value: Plain) -> None:
    """Write a value as `torch.save` would; elements of tensors are copied block by block.

    Args:
        path: the file to make.
        value: see `Plain`; of a tensor that occurs twice, two copies are written.

    Raises:
        TypeError, ValueError: it cannot be written (see `write_pickle`).
        CorruptError: the file that holds a tensor's elements ends too early.
    """
    pickle, tensors = write_pickle(value)
    with path.open("wb") as raw, ZipFile(raw, "w") as archive:
        _add(archive, raw, "data.pkl", len(pickle), [pickle])
        _add(archive, raw, "byteorder", 6, [b"little"])
        for key, tensor in enumerate(tensors):
            _add(archive, raw, f"data/{key}", tensor.nbytes, _elements(tensor))
        _add(archive, raw, "version", len(_VERSION), [_VERSION])


def _add(
    archive: ZipFile, raw: BinaryIO, name: str, size: int, blocks: Iterable[bytes | bytearray]
) -> None:
    """Add a record of `size` bytes, stored, at the next multiple of 64 bytes."""
    record = ZipInfo(f"{_ROOT}/{name}")
    is_large = size > _ZIP64_FROM
    before = raw.tell() + _LOCAL_SIZE + len(record.filename) + _ZIP64_FIELD * is_large + 4
    padding = -before % _ALIGNMENT
    record.extra = pack("<2sH", b"FB", padding) + b"Z" * padding
    record.create_system = _UNIX
    record.file_size = size
    with archive.open(record, "w", force_zip64=is_large) as out:
        for block in blocks:
            out.write(block)


def _elements(tensor: SavedTensor) -> Iterator[bytes | bytearray]:
    """Yield a tensor's bytes, block by block."""
    source = tensor.source
    if isinstance(source, ByteRange):
        yield from _blocks(source)
    else:
        yield source


def _blocks(source: ByteRange) -> Iterator[bytearray]:
    fd = os.open(source.path, os.O_RDONLY)
    try:
        for start in range(0, source.length, _BLOCK):
            block = bytearray(min(_BLOCK, source.length - start))
            read_exactly(fd, source.offset + start, memoryview(block))
            yield block
    finally:
        os.close(fd)
