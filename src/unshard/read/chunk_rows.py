"""Collecting the chunks of one tensor, row by row, into the columns of a `ChunkTable`.

A row is a run of 64-bit integers in one array, so that millions of chunks stay small while they
are gathered file by file.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from unshard.tensors.boxes import is_row_major, row_major_strides
from unshard.tensors.catalog import ChunkTable

__all__ = ["ChunkRows"]

_FIXED = 4  # rank, file, start, length


@dataclass(slots=True)
class ChunkRows:
    """The growing chunks of a tensor of `ndim` dimensions."""

    ndim: int
    rows: "array[int]" = field(default_factory=lambda: array("q"))
    odd_strides: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows) // (_FIXED + 2 * self.ndim)

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
        """Add a chunk whose first element lies at byte `start`; strides in elements."""
        if not is_row_major(sizes, strides):
            self.odd_strides[len(self)] = tuple(strides)
        last = sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
        length = 0 if 0 in sizes else (last + 1) * itemsize
        self.rows.extend((rank, file, start, length, *offsets, *sizes))

    def table(self, paths: tuple[Path, ...]) -> ChunkTable:
        """Return the finished columns."""
        width = _FIXED + 2 * self.ndim
        grid = np.frombuffer(self.rows, dtype=np.int64).reshape(-1, width)
        offsets = grid[:, _FIXED : _FIXED + self.ndim].copy()
        sizes = grid[:, _FIXED + self.ndim :].copy()
        strides = None
        if self.odd_strides:
            rows = (
                self.odd_strides.get(row) or row_major_strides(size)
                for row, size in enumerate(sizes.tolist())
            )
            strides = np.array(list(rows), dtype=np.int64)
        return ChunkTable(
            paths,
            offsets,
            sizes,
            strides,
            grid[:, 1].astype(np.int32),
            grid[:, 2].copy(),
            grid[:, 3].copy(),
            grid[:, 0].astype(np.int32),
            np.zeros(len(grid), dtype=np.bool_),
        )
