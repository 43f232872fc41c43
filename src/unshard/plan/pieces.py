"""The source of every byte of an output file, found by offset, and its parts for an upload. Pure.

A file consists of its header, runs of stored bytes, and slabs of tensors that are made in memory.
A slab has whole rows, so its bytes are contiguous in the file.

A store copies a byte range of one object into a part of another. All parts but the last have a
minimum size. So a long run is a part of its own, and the bytes between two long runs are made on
this machine, together with the beginning of the second run if they are too few.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unshard.convert.outputs import ConvertedTensor
from unshard.convert.recipes import shape_of
from unshard.plan.layout import Layout, OutputFile, OutputTensor
from unshard.plan.operations import (
    COPY_ROW,
    FindScales,
    Fuse,
    Plan,
    Quantize,
    Tiled,
    stored_tensors,
)
from unshard.plan.planner import make_plan
from unshard.plan.work import Tile, tile_shape
from unshard.tensors.boxes import Box, Ints, row_major_strides, row_tile, tiles

_SLAB_BYTES = 1024 * 1024
_IN_TILES = Fuse | Quantize | FindScales
_TURNED_BYTES = 4 * 1024 * 1024  # the source's columns become rows: larger slabs read longer runs


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Bytes of an output file that are stored: `length` bytes of `source` from `start`."""

    source: Path
    start: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class Slab:
    """A box of an operation's tensor: `length` contiguous bytes of the output file."""

    operation: Tiled
    box: Box
    length: int


Piece = memoryview | StoredRun | Slab


class Contents:
    """The contents of an output file.

    Args:
        size: bytes of the whole file.
        header: its first bytes.
        copies: rows of `COPY_ROW`, in the order of their targets.
        paths: the source files that `copies` refers to.
        tiled: the operations that go through memory.
    """

    def __init__(
        self,
        size: int,
        header: bytes,
        copies: NDArray[np.void],
        paths: Sequence[Path],
        tiled: Sequence[Tiled],
    ) -> None:
        self.size = size
        self._header = memoryview(header)
        self._rows = copies[(copies["length"] > 0) & (copies["count"] > 0)]
        self._paths = paths
        self._tiled = tiled
        # The runs of a tensor that is cut along a later dimension are interleaved: rows whose spans
        # overlap form one group, and groups and tensors follow one another.
        ends = self._rows["target"] + self._rows["length"]
        ends += (self._rows["count"] - 1) * self._rows["target_stride"]
        is_first = np.ones(len(self._rows), bool)
        is_first[1:] = self._rows["target"][1:] >= np.maximum.accumulate(ends)[:-1]
        first = np.flatnonzero(is_first)
        starts = [*self._rows["target"][first].tolist(), *(made.target.start for made in tiled)]
        order = np.argsort(np.asarray(starts, np.int64))
        self._starts: Ints = np.asarray(starts, np.int64)[order]
        self._numbers = np.concatenate([np.arange(len(first)), ~np.arange(len(tiled))])[order]
        self._bounds = np.append(first, len(self._rows))

    @classmethod
    def of_bytes(cls, data: bytes) -> "Contents":
        """Return the contents of a file with these bytes."""
        return cls(len(data), data, np.empty(0, COPY_ROW), (), ())

    @classmethod
    def of_file(cls, path: Path, size: int, start: int = 0) -> "Contents":
        """Return the contents of a copy of `size` bytes of a file, from `start`."""
        return cls(size, b"", np.array([(0, 0, 0, start, size, 1, size)], COPY_ROW), (path,), ())

    def find(self, at: int) -> tuple[Piece, int]:
        """Return the piece with byte `at` of the file, and the offset of that byte in the piece.

        Bisection keeps this fast for a model of a million pieces.
        """
        if at < len(self._header):
            return self._header, at
        number = int(self._numbers[np.searchsorted(self._starts, at, side="right") - 1])
        return self._find_run(number, at) if number >= 0 else _find_slab(self._tiled[~number], at)

    def _find_run(self, group: int, at: int) -> tuple[StoredRun, int]:
        rows = self._rows[self._bounds[group] : self._bounds[group + 1]]
        past = at - rows["target"]
        # The stride of a row with a single run is meaningless, and may be smaller than the run.
        runs = np.minimum(past // rows["target_stride"], rows["count"] - 1)
        skips = past - runs * rows["target_stride"]
        which = int(np.argmax((past >= 0) & (skips < rows["length"])))
        row, length = rows[which], int(rows["length"][which])
        start = int(row["start"]) + int(runs[which]) * length
        return StoredRun(self._paths[row["source"]], start, length), int(skips[which])


def contents_of(plan: Plan) -> Iterator[tuple[str, Contents]]:
    """Yield the name and contents of each file that a plan makes."""
    for number in plan.numbers:
        file = plan.layout.files[number]
        copies = plan.copies[plan.copies["file"] == number]
        tiled = [made for made in plan.tiled if made.target.file == number]
        yield file.filename, Contents(file.size, file.header, copies, plan.paths, tiled)


def contents_of_tensor(tensor: ConvertedTensor) -> Contents:
    """Return the contents of a tensor's bytes, row-major, as in an output file."""
    shape = shape_of(tensor.recipe)
    size = prod(shape) * tensor.dtype.itemsize
    alone = OutputTensor(tensor.name, tensor.dtype, shape, tensor.recipe, (0, size))
    plan = make_plan(Layout((OutputFile(tensor.name, b"", (alone,)),), {}, size))
    ((_, contents),) = contents_of(plan)
    return contents


def blocks_of(contents: Contents, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each block of a file.

    A block has `block_bytes`, plus the rest of the slab at its end: slabs are not divided.
    """
    start = 0
    while start < contents.size:
        end = min(start + block_bytes, contents.size)
        if end < contents.size:
            piece, skip = contents.find(end)
            if skip and isinstance(piece, Slab):
                end += piece.length - skip
        yield start, end
        start = end


def _find_slab(operation: Tiled, at: int) -> tuple[Slab, int]:
    target, itemsize = operation.target, operation.to.itemsize
    index = np.unravel_index((at - target.start) // itemsize, target.shape)
    shape = _slab_shape(operation)
    offsets = tuple(int(i) - int(i) % size for i, size in zip(index, shape, strict=True))
    ends = zip(offsets, shape, target.shape, strict=True)
    box = Box(offsets, tuple(min(size, whole - offset) for offset, size, whole in ends))
    steps = zip(offsets, row_major_strides(target.shape), strict=True)
    start = target.start + sum(offset * step for offset, step in steps) * itemsize
    return Slab(operation, box, box.volume * itemsize), at - start


def _slab_shape(operation: Tiled) -> tuple[int, ...]:
    """Return the shape of slabs: leading dimensions 1, then a range, then whole dimensions."""
    shape, sources = operation.target.shape, stored_tensors(operation)
    if isinstance(operation, _IN_TILES):
        return (*tile_shape(operation, _SLAB_BYTES)[:-1], shape[-1])
    turned = any(source.chunks.strides is not None for source in sources)
    widest = max(operation.to.itemsize, *(source.dtype.itemsize for source in sources))
    return row_tile(shape, (_TURNED_BYTES if turned else _SLAB_BYTES) // widest)


def slab_tiles(slab: Slab) -> Iterator[tuple[Box, Tile]]:
    """Yield the tiles that make a slab, each with its box in the slab.

    Some operations need the tiles of a merge to give the same bits: the sums of a LoRA fuse depend
    on how tiles are cut, and blocks are quantised whole.
    """
    sizes, tile = slab.box.sizes, slab.box.sizes
    if isinstance(slab.operation, _IN_TILES):
        tile = tile_shape(slab.operation, _SLAB_BYTES)
    for box in tiles(sizes, tile):
        offsets = tuple(map(sum, zip(box.offsets, slab.box.offsets, strict=True)))
        yield box, Tile(slab.operation, Box(offsets, box.sizes))


_LONGEST = 256 << 20
"""Longer runs are copied as several concurrent parts, if the minimum size allows it."""


@dataclass(frozen=True, slots=True)
class UploadPart:
    """The bytes of an output file from `start` up to `end`.

    `copied` is the run that the store copies; None if the bytes are made on this machine.
    """

    start: int
    end: int
    copied: StoredRun | None = None

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.end - self.start


def parts_of(
    contents: Contents, *, least: int, made_bytes: int, can_copy: Callable[[Path], bool]
) -> Iterator[UploadPart]:
    """Yield the parts of a file in order; no slab is divided between parts.

    Args:
        contents: the contents of the file.
        least: the minimum size of all parts but the last, bytes.
        made_bytes: the size of parts that are made here, at least twice `least`: a run that is too
            short to copy once it has filled up a part is then added whole, and the next one is
            copied. A slab, which is not cut, makes a part longer.
        can_copy: returns whether the store can copy from a source file.
    """
    start = at = 0  # the bytes between them are made here
    while at < contents.size:
        piece, skip = contents.find(at)
        rest = (len(piece) if isinstance(piece, memoryview) else piece.length) - skip
        pending = at - start
        padding = max(0, least - pending) if pending else 0
        if isinstance(piece, StoredRun) and rest - padding >= least and can_copy(piece.source):
            if pending:
                yield UploadPart(start, at + padding)
            first, end = at + padding, at + rest
            yield from _copies(piece, first, end, piece.start + skip + padding - first, least)
            start = at = end
            continue
        at += rest if not isinstance(piece, StoredRun) else min(rest, made_bytes - pending)
        if at - start >= made_bytes:
            yield UploadPart(start, at)
            start = at
    if start < at:
        yield UploadPart(start, at)


def _copies(run: StoredRun, start: int, end: int, offset: int, least: int) -> Iterator[UploadPart]:
    """Yield the copies of a run to `start`; source positions are `offset` bytes further on."""
    size = end - start
    count = -(-size // max(_LONGEST, 2 * least))  # each has at least half of that
    ends = [start + size * number // count for number in range(count + 1)]
    for first, last in itertools.pairwise(ends):
        yield UploadPart(first, last, StoredRun(run.source, first + offset, last - first))
