"""Drafts of tensors: what a reader builds, whatever the format.

A reader makes a `TensorDraft` for every tensor that its files name, adds each stored chunk to it,
and ends with `entry`. That the chunks cover the tensor is checked later, in `open`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from unshard.tensors.boxes import row_major_strides
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.chunk_rows import ChunkRows
from unshard.tensors.dtypes import DType
from unshard.tensors.placements import Sharding

__all__ = ["TensorDraft"]


@dataclass(slots=True)
class TensorDraft:
    """A tensor whose chunks are being gathered.

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
        self.rows.extend((*row, *offsets, *sizes), {})

    def entry(self, paths: tuple[Path, ...]) -> TensorEntry:
        """Return the tensor; `paths` are the files that its chunks refer to by number."""
        table = self.rows.table(paths)
        if self.compressed:
            flags = np.isin(np.arange(len(table)), self.compressed)
            table = replace(table, compressed=flags)
        return TensorEntry(self.fqn, self.dtype, self.shape, table, self.sharding)
