"""Execute a unit of a plan: move bytes from source files to output files.

The kernel copies runs whose dtype does not change, where it can (`copy_file_range`); everything
else goes through a tile of memory. Byte ranges and boxes only: no names, recipes or formats.
"""

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unshard.containers.chunks import box_blocks, fill_box
from unshard.containers.open_files import OpenFiles
from unshard.containers.strided import Elements, raw_dtype, read_exactly
from unshard.errors import ConversionError
from unshard.plan.operations import (
    Cast,
    CopyRange,
    Dequantize,
    FindScales,
    Fuse,
    Gather,
    Quantize,
    Reduce,
    StoredTensor,
    Target,
)
from unshard.plan.work import Pair, Tile, Unit, pair_tiles
from unshard.stores.remote_file import RemoteFile
from unshard.tensors.boxes import Box, is_row_major, row_major_strides
from unshard.tensors.dtypes import BY_NAME, DType, numpy_dtype
from unshard.write.writeback import Writeback

if TYPE_CHECKING:
    from unshard.stores.pool import Ongoing

_BLOCK = 1024 * 1024
_DOWNLOAD = 16 * 1024 * 1024
_FUSE_COLUMNS = 512  # columns per product; fixed, because the last bit of a sum depends on it
_NO_KERNEL_COPY = frozenset(
    # EIO: reading and writing separately shows whether the source or the target failed
    {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EIO}
)


class Executor:
    """Executes units, one at a time; one executor per thread.

    The output files exist, at full size. At most `open_files` (at least 2) descriptors stay open;
    `buffer_bytes` bounds the buffer of copies that the kernel cannot make.
    """

    def __init__(self, outputs: tuple[Path, ...], *, open_files: int, buffer_bytes: int) -> None:
        self._overflows: Counter[tuple[int, int]] = Counter()
        targets = max(1, min(len(outputs), open_files // 4))
        self._outputs = outputs
        self._sources = OpenFiles(os.O_RDONLY, limit=max(1, open_files - targets))
        self._targets = OpenFiles(os.O_WRONLY, limit=targets)
        self._block = min(buffer_bytes, _BLOCK)
        self._kernel_copies = hasattr(os, "copy_file_range")
        self._writeback = Writeback()
        self._ongoing: Ongoing | None = None  # downloads from a bucket
        self._written = -1

    def close(self) -> None:
        """Wait until all bytes are written, and close all files; raise as `do`."""
        try:
            self.finish()
        finally:
            self._sources.close()
            self._targets.close()

    def take_overflows(self) -> Counter[tuple[int, int]]:
        """Return how many finite values became infinite since the last call, in float16 or a sum.

        The keys are the output file and the byte where the tensor begins there.
        """
        overflows, self._overflows = self._overflows, Counter()
        return overflows

    def do(self, unit: Unit) -> int:
        """Execute a unit; return its bytes. `finish` waits for bytes from a bucket.

        Raises:
            CorruptError: a source file ends early or is gone.
            StoreError: a bucket cannot be reached.
            OSError: the output cannot be written.
        """
        if isinstance(unit, Tile):
            return self._make_tile(unit)
        source, target = self._sources.source(unit.source), self._target(unit.file)
        if isinstance(source, RemoteFile):
            from unshard.stores.pool import AT_ONCE, Ongoing

            self._ongoing = self._ongoing or Ongoing(AT_ONCE // 2)
            for task in _downloads(source, unit, target):
                self._ongoing.add(task)
            return unit.size
        for run in range(unit.count):
            start, at = unit.start + run * unit.length, unit.target + run * unit.target_stride
            self._copy(source, start, target, at, unit.length)
            self._writeback.wrote(unit.file, target, at, unit.length)
        return unit.size

    @property
    def is_waiting(self) -> bool:
        """Whether bytes from a bucket may not be written yet."""
        return self._ongoing is not None and self._ongoing.is_busy

    def finish(self) -> None:
        """Wait until all bytes are written, also those from a bucket; raise as `do`."""
        if self._ongoing is not None:
            self._ongoing.finish()

    def _target(self, file: int) -> int:
        """Return the descriptor of an output file, after all others are written."""
        if file != self._written:
            self.finish()
            self._written = file
        return self._targets.fd(self._outputs[file])

    def _copy(self, source: int, start: int, target: int, at: int, length: int) -> None:
        while length and self._kernel_copies:
            try:
                count = os.copy_file_range(source, target, length, start, at)
            except OSError as error:
                if error.errno not in _NO_KERNEL_COPY:
                    raise
                self._kernel_copies = False
                break
            # End of file, or a file system that copies nothing; `read_exactly` distinguishes them.
            if count == 0:
                break
            start, at, length = start + count, at + count, length - count
        buffer = memoryview(bytearray(min(length, self._block)))
        while length:
            block = buffer[:length]
            read_exactly(source, start, block)
            _write_all(target, block, at)
            start, at, length = start + len(block), at + len(block), length - len(block)

    def _make_tile(self, tile: Tile) -> int:
        out = make_tile(tile, self._sources)
        target = tile.operation.target
        if count := count_overflows(tile, out, self._sources):
            self._overflows[target.file, target.start] += count
        fd = self._target(target.file)
        for offset, part in tile_runs(tile.box, target, out.reshape(-1).view(np.uint8).data):
            _write_all(fd, part, offset)
            self._writeback.wrote(target.file, fd, offset, len(part))
        return out.nbytes


def tile_runs(tile: Box, target: Target, data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the offsets in the output file of a tile's row-major bytes, in as few runs as possible.

    `tile` is a box of the tensor, `target` the tensor's location.
    """
    itemsize = len(data) // tile.volume
    steps = row_major_strides(target.shape)
    first = sum(at * step for at, step in zip(tile.offsets, steps, strict=True))
    dims = range(len(steps) + 1)
    inner = next(dim for dim in dims if is_row_major(tile.sizes[dim:], steps[dim:]))
    size = prod(tile.sizes[inner:]) * itemsize
    for number, index in enumerate(np.ndindex(tile.sizes[:inner])):
        skip = sum(at * step for at, step in zip(index, steps[:inner], strict=True))
        offset = target.start + (first + skip) * itemsize
        yield offset, data[number * size : (number + 1) * size]


def make_tile(tile: Tile, files: OpenFiles, memory: Elements | None = None) -> Elements:
    """Return the elements of a tile, as they will be written.

    Stored elements go into `memory` if they fit: touching new pages takes longer than reading.

    Raises:
        CorruptError: a source file ends early or is gone.
        ConversionError: a value to quantise is not finite.
    """
    match tile.operation:
        case Gather(_, source):
            raw = raw_dtype(source.dtype)
            size = tile.box.volume * raw.itemsize
            if memory is None or memory.nbytes < size:
                memory = np.empty(size, np.uint8)
            out = memory[:size].view(raw).reshape(tile.box.sizes)
            fill_box(out, tile.box, source.chunks, raw, files)
            return out
        case Cast(_, source, to):
            out = np.empty(tile.box.sizes, numpy_dtype(to))
            fill_box(out, tile.box, source.chunks, numpy_dtype(source.dtype), files)
            return out
        case Reduce(_, terms, to):
            return _rounded(_mean(terms, tile.box, files), to)
        case Fuse(_, base, a, b, rank, scale, to):  # base + scale * (b @ a)
            *batch, row, column = tile.box.offsets
            *batch_sizes, rows, columns = tile.box.sizes
            of_b = Box((*batch, row, 0), (*batch_sizes, rows, rank))
            of_a = Box((*batch, 0, column), (*batch_sizes, rank, columns))
            right, left = _float32(a, of_a, files), _float32(b, of_b, files)
            total = _float32(base, tile.box, files)
            for first in range(0, columns, _FUSE_COLUMNS):
                part = slice(first, first + _FUSE_COLUMNS)
                delta = left @ right[..., part]
                delta *= np.float32(scale)
                total[..., part] += delta
            return _rounded(total, to)
        case _:
            return _make_blocks(tile.operation, tile.box, files)


def _mean(
    terms: Sequence[tuple[float, StoredTensor]], box: Box, files: OpenFiles
) -> NDArray[np.float32]:
    """Return a box of (sum of weight * term) / (sum of weights)."""
    total = np.zeros(box.sizes, np.float32)  # like numpy's mean: -0.0 + -0.0 is 0.0
    as_float32: Any = {"dtype": np.float32, "casting": "unsafe"}
    with np.errstate(all="ignore"):
        for weight, source in terms:
            dtype = numpy_dtype(source.dtype)
            for part, values in box_blocks(total, box, source.chunks, dtype, files):
                term = values  # numpy converts them in small blocks, without a float32 copy
                if weight != 1:
                    term = np.multiply(values, np.float32(weight), **as_float32)
                np.add(part, term, out=part, **as_float32)
        total /= np.float32(sum(weight for weight, _ in terms))
    return total


def _make_blocks(
    operation: Quantize | FindScales | Dequantize, box: Box, files: OpenFiles
) -> Elements:
    """Return a box of a tensor that is converted to or from block FP8."""
    from unshard.write.blocks import dequantized, meeting, of_blocks, quantized

    match operation:
        case Quantize():
            return quantized(*_quantisable(operation, box, files))
        case FindScales():
            box = of_blocks(box, operation.values.target.shape)
            return _quantisable(operation, box, files)[1]
        case Dequantize(_, weight, scales, block, to):
            elements = np.empty(box.sizes, raw_dtype(weight.dtype))
            fill_box(elements, box, weight.chunks, elements.dtype, files)
            blocks = meeting(box, block)
            factors = _float32(scales, blocks, files)
            values = elements.view(numpy_dtype(weight.dtype))
            with np.errstate(all="ignore"):
                return _rounded(dequantized(values, factors, box, blocks, block), to)


def _quantisable(
    operation: Quantize | FindScales, box: Box, files: OpenFiles
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return whole blocks of a matrix to quantise, and the scale of each."""
    from unshard.write.blocks import block_scales, of_blocks

    values = make_tile(Tile(operation.values, box), files).view(np.float32)
    scales = block_scales(values, operation.least)
    if wrong := np.argwhere(~np.isfinite(scales)).tolist():
        first = of_blocks(Box(tuple(wrong[0]), (1, 1)), box.sizes)
        moved = Box(tuple(map(sum, zip(box.offsets, first.offsets, strict=True))), first.sizes)
        raise ConversionError(
            f"tensor {operation.name}: cannot be quantised: some values in {moved} are not finite",
            hint="write it without ⟦--quantize⟧; the training may have diverged",
        )
    return values, scales


def count_overflows(tile: Tile, out: Elements, files: OpenFiles) -> int:
    """Return how many values of a tile, `out`, became infinite when they were cast to float16.

    In an average, count the values that are not finite although all their terms are.
    """
    operation = tile.operation
    if isinstance(operation, Reduce):
        if _are_finite(out):
            return 0
        lost = ~np.isfinite(out)
        for _, source in operation.terms:
            lost &= np.isfinite(_float32(source, tile.box, files))
        return int(lost.sum())
    if out.dtype != np.float16 or isinstance(operation, Quantize | FindScales):
        return 0
    infinite = int(np.isinf(out).sum())
    if not infinite:
        return 0
    is_float64 = isinstance(operation, Cast) and operation.source.dtype.itemsize == 8
    wide = BY_NAME["float64" if is_float64 else "float32"]
    wider = (
        Cast(operation.target, operation.source, wide)
        if isinstance(operation, Gather)
        else operation._replace(to=wide)
    )
    before = make_tile(tile._replace(operation=wider), files)
    return infinite - int(np.isinf(before).sum())


def _are_finite(values: Elements) -> bool:
    """Return whether no value is infinite or NaN.

    These are the largest integers of each sign. Comparing integers takes a tenth of the time of
    `numpy.isfinite` for bfloat16.
    """
    signed, unsigned = f"i{values.itemsize}", f"u{values.itemsize}"
    least, negative = np.array([np.inf, -np.inf], values.dtype).view(unsigned).tolist()
    return bool(values.view(signed).max() < least and values.view(unsigned).max() < negative)


def are_equal(pair: Pair, files: OpenFiles) -> bool:
    """Return whether both tensors of a pair have the same bits; stop at the first difference."""
    return all(
        make_tile(ours, files).tobytes() == make_tile(theirs, files).tobytes()
        for ours, theirs in pair_tiles(pair)
    )


def _rounded(computed: NDArray[np.float32], to: DType) -> Elements:
    """Return computed values in their output dtype, with every NaN replaced by numpy's.

    The sum of two NaNs has the sign and payload of either, depending on how the loop was compiled
    for that position in the array, so the bytes would depend on the size of the tiles.
    """
    if np.isnan(computed.max(initial=-np.inf)):
        np.copyto(computed, np.nan, where=np.isnan(computed))
    with np.errstate(all="ignore"):
        return computed.astype(numpy_dtype(to), copy=False)


def _float32(source: StoredTensor, box: Box, files: OpenFiles) -> NDArray[np.float32]:
    out = np.empty(box.sizes, np.float32)
    fill_box(out, box, source.chunks, numpy_dtype(source.dtype), files)
    return out


def _downloads(source: RemoteFile, copy: CopyRange, target: int) -> Iterator[Callable[[], None]]:
    """Yield tasks that download and write a copy, whose runs are adjacent in the bucket's file."""

    def get(first: int) -> None:
        def write(at: int, block: memoryview) -> None:
            at += first
            while block:
                run, skip = divmod(at, copy.length)
                part = block[: copy.length - skip]
                _write_all(target, part, copy.target + run * copy.target_stride + skip)
                at, block = at + len(part), block[len(part) :]

        source.stream_to(copy.start + first, min(_DOWNLOAD, copy.size - first), write)

    for first in range(0, copy.size, _DOWNLOAD):
        yield partial(get, first)


def _write_all(fd: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], at + done)
