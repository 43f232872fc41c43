"""What an executor does, as data: operations on byte ranges.

Two ways to make an output tensor:

* *copy*: long runs of bytes go from source to target as they are, by the kernel where it can. They
  are kept as rows of one table (`CopyRange` is a view of a row), because there may be a million;
* *tiles*: the tensor is made tile by tile in memory, from all chunks that meet the tile (`Gather`),
  with a cast on the way (`Cast`), from several tensors (`Reduce`, `Fuse`), or to and from block FP8
  (`Quantize`, `FindScales`, `Dequantize`), and each tile is written at once.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unshard.plan.layout import Layout
from unshard.tensors.catalog import ChunkTable
from unshard.tensors.dtypes import BY_NAME, DType

COPY_ROW = np.dtype(
    [
        ("file", np.int32),
        ("target", np.int64),
        ("source", np.int32),
        ("start", np.int64),
        ("length", np.int64),
        ("count", np.int64),
        ("target_stride", np.int64),
    ]
)


@dataclass(frozen=True, slots=True)
class CopyRange:
    """Copy `count` runs of `length` bytes.

    The runs follow one another in the source and are `target_stride` bytes apart in the target.

    Attributes:
        file: index of the output file.
        target: byte in the output file where the first run goes.
        source: the file to read.
        start: byte in the source where the first run begins.
    """

    file: int
    target: int
    source: Path
    start: int
    length: int
    count: int
    target_stride: int

    @property
    def size(self) -> int:
        """Bytes copied in all."""
        return self.length * self.count


class StoredTensor(NamedTuple):
    """A tensor to read: distinct chunks that cover it, and the dtype they are stored as."""

    dtype: DType
    chunks: ChunkTable


class Target(NamedTuple):
    """Where a tensor goes: output file (its index), the byte where it begins there, its shape."""

    file: int
    start: int
    shape: tuple[int, ...]


class Gather(NamedTuple):
    """Make a whole tensor of its chunks, tile by tile, bits unchanged."""

    target: Target
    source: StoredTensor

    @property
    def to(self) -> DType:
        """What is written."""
        return self.source.dtype


class Cast(NamedTuple):
    """As `Gather`, then convert from the chunks' dtype to `to`, rounding to nearest even."""

    target: Target
    source: StoredTensor
    to: DType


class Reduce(NamedTuple):
    """(sum of weight * term) / (sum of weights), in float32 and in order; then convert to `to`."""

    target: Target
    terms: tuple[tuple[float, StoredTensor], ...]
    to: DType


class Fuse(NamedTuple):
    """base + scale * (b @ a), in float32; then convert to `to`.

    Attributes:
        target: of the shape (..., out, in); dimensions before the last two are a batch.
        base: of the target's shape.
        a: of shape (..., rank, in).
        b: of shape (..., out, rank).
        rank: the inner dimension.
        scale: a factor.
        to: what is written.
    """

    target: Target
    base: StoredTensor
    a: StoredTensor
    b: StoredTensor
    rank: int
    scale: float
    to: DType


class Quantize(NamedTuple):
    """Make the float8_e4m3fn elements of a matrix in block FP8; see `unshard.write.blocks`.

    Attributes:
        target: of two dimensions.
        values: makes the matrix, in float32.
        least: what the largest size in a block counts for at least.
        name: of the matrix, for errors.
    """

    target: Target
    values: "Tiled"
    least: float
    name: str

    @property
    def to(self) -> DType:
        """What is written."""
        return BY_NAME["float8_e4m3fn"]


class FindScales(NamedTuple):
    """Make the scales of a matrix in block FP8; `target` has one element for each block."""

    target: Target
    values: "Tiled"
    least: float
    name: str

    @property
    def to(self) -> DType:
        """What is written."""
        return BY_NAME["float32"]


class Dequantize(NamedTuple):
    """weight * the scale of its block, in float32; then convert to `to`.

    Attributes:
        target: of two dimensions.
        weight: of the target's shape, 8-bit floats.
        scales: one for each block.
        block: rows and columns of a block.
        to: what is written.
    """

    target: Target
    weight: StoredTensor
    scales: StoredTensor
    block: tuple[int, int]
    to: DType


Tiled = Gather | Cast | Reduce | Fuse | Quantize | FindScales | Dequantize
Operation = CopyRange | Tiled


def stored_tensors(operation: Tiled) -> tuple[StoredTensor, ...]:
    """Return everything that an operation reads."""
    match operation:
        case Gather(_, source) | Cast(_, source):
            return (source,)
        case Reduce(_, terms):
            return tuple(source for _, source in terms)
        case Fuse(_, base, a, b):
            return base, a, b
        case Quantize(_, values) | FindScales(_, values):
            return stored_tensors(values)
        case Dequantize(_, weight, scales):
            return weight, scales


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Everything an executor will do.

    Attributes:
        layout: the files to make.
        paths: the source files that `copies` refers to.
        copies: the copy operations, as rows of `COPY_ROW`.
        tiled: the operations that go through memory.
        bytes_read: bytes of tensor data that will be read; of `only` a part, still of the whole.
        bytes_written: bytes of all output files, headers included.
        part: the numbers of the output files to make; None for all.
    """

    layout: Layout
    paths: tuple[Path, ...]
    copies: NDArray[np.void]
    tiled: tuple[Tiled, ...]
    bytes_read: int
    bytes_written: int
    part: frozenset[int] | None = None

    def __len__(self) -> int:
        return len(self.copies) + len(self.tiled)

    def operations(self) -> Iterator[Operation]:
        """Yield all operations: copies first, then tiled ones, each in the order of the files."""
        yield from self.copies_into(0, len(self.layout.files))
        yield from self.tiled

    def only(self, files: Collection[int]) -> "Plan":
        """Return what makes only these output files; each keeps its number in the layout."""
        rows = np.isin(self.copies["file"], sorted(files))
        tiled = tuple(one for one in self.tiled if one.target.file in files)
        written = sum(self.layout.files[number].size for number in files)
        part = frozenset(files)
        return replace(
            self, copies=self.copies[rows], tiled=tiled, bytes_written=written, part=part
        )

    @property
    def numbers(self) -> list[int]:
        """The numbers of the output files to make."""
        return sorted(range(len(self.layout.files)) if self.part is None else self.part)

    def copies_into(self, first: int, end: int) -> Iterator[CopyRange]:
        """Yield the copies into the output files from number `first` to before `end`."""
        rows = slice(*np.searchsorted(self.copies["file"], [first, end]).tolist())
        for row in self.copies[rows]:
            file, target, source, *rest = row.item()
            yield CopyRange(file, target, self.paths[source], *rest)
