"""Drafts of tensors: their chunks are collected row by row into the columns of a `ChunkTable`.

A row is a run of 64-bit integers in one array, so that millions of chunks stay small while they
are gathered file by file. That the chunks cover the tensor is checked later, in `read.open`.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from unshard.tensors.boxes import is_row_major, row_major_strides
from unshard.tensors.catalog import ChunkTable, TensorEntry
from unshard.tensors.dtypes import DType
from unshard.tensors.placements import Sharding

_FIXED = 4  # rank, file, start, length


@dataclass(slots=True)
class ChunkRows:
    """The growing chunks of a tensor of `ndim` dimensions.

    Attributes:
        rows: rank, file, start and length (bytes), offsets, sizes (elements), chunk after chunk.
        odd_strides: strides, in elements, of the chunks that are not row-major, by row number.
    """

    ndim: int
    rows: "array[int]" = field(default_factory=lambda: array("q"))
    odd_strides: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Integers per chunk."""
        return _FIXED + 2 * self.ndim

    def __len__(self) -> int:
        return len(self.rows) // self.width

    def add(  # noqa: PLR0913 (one argument per column)
        self,
        *,
        rank: int,
        file: int,
        start: int,
        itemsize: int,
        offsets: Sequence[int],
        sizes: Sequence[int],
        strides: Sequence[int],
    ) -> None:
        """Add a chunk whose first element is at byte `start`; strides in elements."""
        if not is_row_major(sizes, strides):
            self.odd_strides[len(self)] = tuple(strides)
        last = sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
        length = 0 if 0 in sizes else (last + 1) * itemsize
        self.rows.extend((rank, file, start, length, *offsets, *sizes))

    def table(self, paths: tuple[Path, ...]) -> ChunkTable:
        """Return the finished columns."""
        grid = np.frombuffer(self.rows, dtype=np.int64).reshape(-1, self.width)
        sizes = grid[:, _FIXED + self.ndim :].copy()
        strides = None
        if self.odd_strides:
            each = (
                self.odd_strides.get(row) or row_major_strides(size)
                for row, size in enumerate(sizes.tolist())
            )
            strides = np.array(list(each), dtype=np.int64)
        return ChunkTable(
            paths,
            grid[:, _FIXED : _FIXED + self.ndim].copy(),
            sizes,
            strides,
            grid[:, 1].astype(np.int32),
            grid[:, 2].copy(),
            grid[:, 3].copy(),
            grid[:, 0].astype(np.int32),
            np.zeros(len(grid), dtype=np.bool_),
        )


@dataclass(slots=True)
class TensorDraft:
    """A tensor that a reader builds: it adds each stored chunk, and ends with `entry`.

    Attributes:
        fqn, dtype, sharding: see `TensorEntry`.
        shape: the global shape; where files state none, the reader sets it as chunks arrive.
        rows: the chunks.
        compressed: the rows whose bytes must be decompressed before use.
    """

    fqn: str
    dtype: DType
    shape: tuple[int, ...]
    sharding: Sharding | None = None
    rows: ChunkRows = field(init=False)
    compressed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = ChunkRows(len(self.shape))

    def add(  # noqa: PLR0913 (one argument per column)
        self,
        *,
        rank: int,
        file: int,
        start: int,
        offsets: Sequence[int] | None = None,
        sizes: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> None:
        """Add a chunk whose first element is at byte `start`: the whole tensor, row-major.

        Args:
            rank: the rank that stored it.
            file: number of its file among the `paths` of `entry`.
            start: byte of its first element in that file.
            offsets: where its box starts, in elements, if it is not the whole tensor.
            sizes: of its box, in elements.
            strides: in elements, if it is not row-major.
        """
        sizes = self.shape if sizes is None else sizes
        self.rows.add(
            rank=rank,
            file=file,
            start=start,
            itemsize=self.dtype.itemsize,
            offsets=(0,) * len(sizes) if offsets is None else offsets,
            sizes=sizes,
            strides=row_major_strides(sizes) if strides is None else strides,
        )

    def add_compressed(
        self, row: tuple[int, int, int, int], offsets: Sequence[int], sizes: Sequence[int]
    ) -> None:
        """Add a compressed chunk; `row` is rank, file, and start and length of its item, bytes."""
        self.compressed.append(len(self.rows))
        self.rows.rows.extend((*row, *offsets, *sizes))

    def entry(self, paths: tuple[Path, ...]) -> TensorEntry:
        """Return the tensor; `paths` are the files that its chunks refer to by number."""
        table = self.rows.table(paths)
        table.compressed[self.compressed] = True
        return TensorEntry(self.fqn, self.dtype, self.shape, table, self.sharding)
