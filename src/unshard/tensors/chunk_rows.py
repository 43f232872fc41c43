"""Drafts of tensors, which collect chunks row by row for a `ChunkTable`.

A row is a run of 64-bit integers in one array, which keeps millions of chunks small. `read.open`
checks later that the chunks cover the tensor.
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
        rows: rank, file, start and length (bytes), offsets and sizes (elements) of each chunk.
        odd_strides: strides, in elements, of chunks that are not row-major, by row number.
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
            each = [
                self.odd_strides.get(row) or row_major_strides(size)
                for row, size in enumerate(sizes.tolist())
            ]
            strides = np.array(each, dtype=np.int64)
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
    """A tensor under construction: a reader adds each stored chunk, then calls `entry`.

    Attributes:
        fqn, dtype, sharding: see `TensorEntry`.
        shape: the global shape; if files record none, the reader sets it as chunks arrive.
        rows: the chunks.
    """

    fqn: str
    dtype: DType
    shape: tuple[int, ...]
    sharding: Sharding | None = None
    rows: ChunkRows = field(init=False)

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
        """Add a chunk: by default the whole tensor, row-major.

        `file` is an index into the `paths` of `entry`, `start` a byte offset in that file. The box
        and its strides are in elements.
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

    def entry(self, paths: tuple[Path, ...]) -> TensorEntry:
        """Return the tensor; `paths` are the files that its chunks refer to by index."""
        table = self.rows.table(paths)
        return TensorEntry(self.fqn, self.dtype, self.shape, table, self.sharding)
