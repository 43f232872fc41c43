"""Reading parts of stored chunks: what comparing replicas, and making tiles, both need."""

import numpy as np

from unshard.containers.open_files import OpenFiles
from unshard.containers.strided import Elements, read_strided
from unshard.tensors.boxes import Box, row_major_strides
from unshard.tensors.catalog import ChunkTable

__all__ = ["chunk_bytes", "chunk_part"]


def chunk_part(
    table: ChunkTable, row: int, box: Box, dtype: np.dtype[np.generic], files: OpenFiles
) -> Elements:
    """Read a box of a chunk.

    Args:
        table: the chunks of a tensor.
        row: which of them.
        box: what to read; offsets in elements from the start of the chunk.
        dtype: what to read the elements as; it must have the size of the stored ones.
        files: where descriptors come from.

    Raises:
        CorruptError: the file is gone or ends early.
    """
    if table.strides is None:
        steps = row_major_strides(table.sizes[row].tolist())
    else:
        steps = tuple(table.strides[row].tolist())
    strides = tuple(step * dtype.itemsize for step in steps)
    skip = sum(at * step for at, step in zip(box.offsets, strides, strict=True))
    fd = files.fd(table.paths[table.file[row]])
    return read_strided(fd, int(table.start[row]) + skip, strides, box.sizes, dtype)


def chunk_bytes(
    table: ChunkTable, row: int, box: Box, dtype: np.dtype[np.generic], files: OpenFiles
) -> bytes:
    """Read a box of a chunk as row-major bytes; arguments as for `chunk_part`."""
    return chunk_part(table, row, box, dtype, files).tobytes()
