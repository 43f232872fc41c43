"""Do one unit of a plan's work: move bytes from source files to output files.

Same-dtype runs are copied by the kernel where it can (`copy_file_range`); everything else goes
through one tile of memory. Knows byte ranges and boxes, not names, recipes or formats.
"""

import errno
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from unshard.containers.open_files import OpenFiles
from unshard.containers.strided import Elements, raw_dtype, read_exactly, read_strided
from unshard.plan.operations import Cast, Gather
from unshard.plan.work import Tile, Unit
from unshard.tensors.boxes import Box, is_row_major, row_major_strides
from unshard.tensors.catalog import ChunkTable
from unshard.tensors.dtypes import numpy_dtype

__all__ = ["Executor"]

_BLOCK = 1024 * 1024
_NO_KERNEL_COPY = frozenset(
    {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
)


class Executor:
    """Does units of work, one at a time; one executor per thread.

    Args:
        outputs: the output files, by their index in the layout; they exist, at full size.
        open_files: how many descriptors it may hold, at least 2.
        buffer_bytes: how much memory it may use to copy where the kernel cannot.
    """

    def __init__(self, outputs: tuple[Path, ...], *, open_files: int, buffer_bytes: int) -> None:
        targets = max(1, min(len(outputs), open_files // 4))
        self._outputs = outputs
        self._sources = OpenFiles(os.O_RDONLY, limit=max(1, open_files - targets))
        self._targets = OpenFiles(os.O_WRONLY, limit=targets)
        self._block = min(buffer_bytes, _BLOCK)
        self._kernel_copies = hasattr(os, "copy_file_range")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._sources.close()
        self._targets.close()

    def do(self, unit: Unit) -> int:
        """Do a unit; return the bytes written.

        Raises:
            CorruptError: a source file ends early or is gone.
            OSError: the output cannot be written.
        """
        if isinstance(unit, Tile):
            return self._make_tile(unit)
        source, target = self._sources.fd(unit.source), self._targets.fd(self._outputs[unit.file])
        for run in range(unit.count):
            start = unit.start + run * unit.length
            self._copy(source, start, target, unit.target + run * unit.target_stride, unit.length)
        return unit.size

    def _copy(self, source: int, start: int, target: int, at: int, length: int) -> None:
        while length and self._kernel_copies:
            try:
                count = os.copy_file_range(source, target, length, start, at)
            except OSError as error:
                if error.errno not in _NO_KERNEL_COPY:
                    raise
                self._kernel_copies = False
                break
            if (
                count == 0
            ):  # the end of the file, or a file system that copies nothing: read_exactly tells
                break
            start, at, length = start + count, at + count, length - count
        while length:
            block = bytearray(min(length, self._block))
            read_exactly(source, start, memoryview(block))
            _write_all(target, memoryview(block), at)
            start, at, length = start + len(block), at + len(block), length - len(block)

    def _make_tile(self, tile: Tile) -> int:
        if isinstance(tile.operation, Cast):
            gather, target = tile.operation.gather, numpy_dtype(tile.operation.to)
            source = numpy_dtype(gather.dtype)
        else:
            gather = tile.operation
            source = target = raw_dtype(gather.dtype)
        out = np.empty(tile.box.sizes, dtype=target)
        for row in _meeting(gather.chunks, tile.box).tolist():
            self._fill(out, tile.box, gather.chunks, row, source)
        self._write_tile(out, tile.box, gather)
        return out.nbytes

    def _fill(
        self, out: Elements, tile: Box, chunks: ChunkTable, row: int, source: np.dtype[np.generic]
    ) -> None:
        """Read the part of a chunk that meets the tile into its place, casting if dtypes differ."""
        lo = np.maximum(chunks.offsets[row], tile.offsets)
        hi = np.minimum(chunks.offsets[row] + chunks.sizes[row], tile.ends)
        if chunks.strides is None:
            steps = row_major_strides(chunks.sizes[row].tolist())
        else:
            steps = tuple(chunks.strides[row].tolist())
        strides = tuple(step * source.itemsize for step in steps)
        skip = sum((lo - chunks.offsets[row]).tolist()[d] * s for d, s in enumerate(strides))
        fd = self._sources.fd(chunks.paths[chunks.file[row]])
        start = int(chunks.start[row]) + skip
        part = read_strided(fd, start, strides, tuple((hi - lo).tolist()), source)
        place = out
        for dim, start in enumerate((lo - tile.offsets).tolist()):
            place = place[(slice(None),) * dim + (slice(start, start + part.shape[dim]),)]
        with np.errstate(over="ignore"):
            np.copyto(place, part, casting="unsafe")

    def _write_tile(self, out: Elements, tile: Box, gather: Gather) -> None:
        """Write a tile: one run where it is contiguous in the tensor, else as few as there are."""
        fd = self._targets.fd(self._outputs[gather.file])
        steps = row_major_strides(gather.shape)
        first = gather.target + out.itemsize * sum(
            at * step for at, step in zip(tile.offsets, steps, strict=True)
        )
        inner = next(
            dim for dim in range(out.ndim + 1) if is_row_major(out.shape[dim:], steps[dim:])
        )
        raw = out.reshape(-1).view(np.uint8).data
        size = int(np.prod(out.shape[inner:], dtype=np.int64)) * out.itemsize
        for number, index in enumerate(np.ndindex(out.shape[:inner])):
            skip = sum(at * step for at, step in zip(index, steps[:inner], strict=True))
            _write_all(fd, raw[number * size : (number + 1) * size], first + skip * out.itemsize)


def _meeting(chunks: ChunkTable, tile: Box) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Return the rows of the chunks that meet a tile."""
    starts = chunks.offsets < np.asarray(tile.ends, dtype=np.int64)
    ends = chunks.offsets + chunks.sizes > np.asarray(tile.offsets, dtype=np.int64)
    return np.flatnonzero((starts & ends).all(axis=1))


def _write_all(fd: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], at + done)
