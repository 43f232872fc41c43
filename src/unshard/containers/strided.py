"""Read elements with strides from a file, in few reads.

Strides are in bytes. Memory: at most `SLACK` times the requested elements, or `SMALL` bytes.
"""

import os
from math import prod
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from unshard.containers.open_files import Opened, name_of
from unshard.errors import CorruptError
from unshard.stores.remote_file import RemoteFile
from unshard.tensors.dtypes import DType

SLACK = 2
"""A span is read whole if it is at most this many times larger than its requested elements ..."""
SMALL = 16384
"""... or at most this many bytes."""
NEAR = 1024
"""Elements further apart than this many bytes are read one by one, without the bytes between."""

_SMALL_GET, _NEAR_GET = 1 << 20, 256 * 1024
"""The same for an object in a bucket, where a request takes as long as many bytes."""

Elements = NDArray[np.generic]


def raw_dtype(dtype: DType) -> np.dtype[np.generic]:
    """Return a numpy dtype of the same size that copies bits unchanged."""
    return np.dtype(f"u{dtype.itemsize}" if dtype.itemsize <= 8 else f"V{dtype.itemsize}")


def read_exactly(file: Opened, start: int, out: memoryview) -> None:
    """Fill `out` with the file's bytes from `start` on.

    Raises:
        CorruptError: the file cannot be read, or ends early, because it changed meanwhile.
    """
    filled = 0
    while filled < len(out):
        try:
            if isinstance(file, RemoteFile):
                count = file.read_into(start + filled, out[filled:])
            else:
                count = os.preadv(file, [out[filled:]], start + filled)
        except OSError as error:  # a plain OSError would look like a failure to write the output
            raise CorruptError(f"{name_of(file)}: cannot be read: {error.strerror}") from error
        if count == 0:
            raise CorruptError(
                f"{name_of(file)}: ends at byte {start + filled}, "
                f"{len(out) - filled} bytes too early",
                hint="was the checkpoint removed or rewritten while it was being read?",
            )
        filled += count


def crc_of(file: Opened, offset: int, size: int, *, block: int) -> int:
    """Return the CRC-32 of `size` bytes from an offset on, read in blocks of `block` bytes.

    Raises:
        CorruptError: the file ends too early.
    """
    crc, buffer = 0, bytearray(min(block, size))
    for done in range(0, size, block):
        part = memoryview(buffer)[: size - done]
        read_exactly(file, offset + done, part)
        crc = crc32(part, crc)
    return crc


def read_strided(
    file: Opened,
    start: int,
    strides: tuple[int, ...],
    sizes: tuple[int, ...],
    dtype: np.dtype[np.generic],
) -> Elements:
    """Return the elements at byte `start + index . strides`, as an array of shape `sizes`."""
    if 0 in sizes:
        return np.empty(sizes, dtype)
    steps = zip(sizes, strides, strict=True)
    span = dtype.itemsize + sum((size - 1) * step for size, step in steps)
    small, near = (_SMALL_GET, _NEAR_GET) if isinstance(file, RemoteFile) else (SMALL, NEAR)
    if span <= max(SLACK * prod(sizes) * dtype.itemsize, small):
        data = np.empty(span, dtype=np.uint8)
        read_exactly(file, start, data.data)
        return np.ndarray(sizes, dtype, data.data, 0, strides)
    # Recurse along the dimension with the largest stride, one index or several at a time.
    dim = max(range(len(sizes)), key=lambda d: strides[d] if sizes[d] > 1 else -1)
    at_once = 1
    if strides[dim] <= near:
        steps = zip(sizes, strides, strict=True)
        inner = sum((size - 1) * step for d, (size, step) in enumerate(steps) if d != dim)
        at_once = max(1, 1 + (small - dtype.itemsize - inner) // strides[dim])
    out = np.empty(sizes, dtype=dtype)
    for first in range(0, sizes[dim], at_once):
        end = min(first + at_once, sizes[dim])
        some = (*sizes[:dim], end - first, *sizes[dim + 1 :])
        part = read_strided(file, start + first * strides[dim], strides, some, dtype)
        out[(slice(None),) * dim + (slice(first, end),)] = part
    return out
