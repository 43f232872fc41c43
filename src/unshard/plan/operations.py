"""Operations on byte ranges, which an executor carries out.

There are two ways to make an output tensor:

* *copy*: the kernel, where it can, copies long runs of bytes unchanged. The runs are rows of one
  table (`CopyRange` is a view of a row), because there may be a million;
* *tiles*: each tile of the tensor is made in memory and written at once: from all chunks that
  overlap it (`Gather`), with a cast (`Cast`), from several tensors (`Reduce`, `Fuse`), or to and
  from block FP8 (`Quantize`, `FindScales`, `Dequantize`).
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

    The runs are adjacent in the source and `target_stride` bytes apart in the target.

    Attributes:
        file: index of the output file.
        target: byte offset of the first run in the output file.
        source: the file to read.
        start: byte offset of the first run in the source.
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
    """A tensor to read: distinct chunks that cover it, and their stored dtype."""

    dtype: DType
    chunks: ChunkTable


class Target(NamedTuple):
    """The destination of a tensor: index of the output file, byte offset there, shape."""

    file: int
    start: int
    shape: tuple[int, ...]


class Gather(NamedTuple):
    """Make a tensor from its chunks, bits unchanged."""

    target: Target
    source: StoredTensor

    @property
    def to(self) -> DType:
        """The dtype of the output."""
        return self.source.dtype


class Cast(NamedTuple):
    """Like `Gather`, then convert to `to`, rounding to nearest even."""

    target: Target
    source: StoredTensor
    to: DType


class Reduce(NamedTuple):
    """(sum of weight * term) / (sum of weights) in float32, in order; then convert to `to`."""

    target: Target
    terms: tuple[tuple[float, StoredTensor], ...]
    to: DType


class Fuse(NamedTuple):
    """base + scale * (b @ a) in float32; then convert to `to`.

    Attributes:
        target: shape (..., out, in); dimensions before the last two are a batch.
        base: shape of the target.
        a: shape (..., rank, in).
        b: shape (..., out, rank).
        rank: the inner dimension.
        scale: a factor.
        to: the dtype of the output.
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
        target: a matrix.
        values: makes the matrix in float32.
        least: lower bound on the largest absolute value of a block.
        name: the matrix, for errors.
    """

    target: Target
    values: "Tiled"
    least: float
    name: str

    @property
    def to(self) -> DType:
        """The dtype of the output."""
        return BY_NAME["float8_e4m3fn"]


class FindScales(NamedTuple):
    """Make the scales of a matrix in block FP8; `target` has one element per block."""

    target: Target
    values: "Tiled"
    least: float
    name: str

    @property
    def to(self) -> DType:
        """The dtype of the output."""
        return BY_NAME["float32"]


class Dequantize(NamedTuple):
    """weight * the scale of its block in float32; then convert to `to`.

    Attributes:
        target: a matrix.
        weight: 8-bit floats, shape of the target.
        scales: one per block.
        block: rows and columns of a block.
        to: the dtype of the output.
    """

    target: Target
    weight: StoredTensor
    scales: StoredTensor
    block: tuple[int, int]
    to: DType


Tiled = Gather | Cast | Reduce | Fuse | Quantize | FindScales | Dequantize
Operation = CopyRange | Tiled


def stored_tensors(operation: Tiled) -> tuple[StoredTensor, ...]:
    """Return the inputs of an operation."""
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
    """All work of an executor.

    Attributes:
        layout: the files to make.
        paths: the source files of `copies`.
        copies: the copy operations, as rows of `COPY_ROW`.
        tiled: the operations that go through memory.
        bytes_read: bytes of tensor data to read, for all output files even if `part` is set.
        bytes_written: bytes of the output files to make, headers included.
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
        """Return the plan of these output files alone; each keeps its number in the layout."""
        rows = np.isin(self.copies["file"], sorted(files))
        return replace(
            self,
            copies=self.copies[rows],
            tiled=tuple(made for made in self.tiled if made.target.file in files),
            bytes_written=sum(self.layout.files[number].size for number in files),
            part=frozenset(files),
        )

    @property
    def numbers(self) -> list[int]:
        """The numbers of the output files to make."""
        return sorted(range(len(self.layout.files)) if self.part is None else self.part)

    def copies_into(self, first: int, end: int) -> Iterator[CopyRange]:
        """Yield the copies into the output files with numbers from `first` up to `end`."""
        rows = slice(*np.searchsorted(self.copies["file"], [first, end]).tolist())
        for row in self.copies[rows]:
            file, target, source, *rest = row.item()
            yield CopyRange(file, target, self.paths[source], *rest)
