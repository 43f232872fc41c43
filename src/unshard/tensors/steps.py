"""Parts of tensors that are taken with steps, as chunk tables.

What a slice with a step takes of a stored box is again a box with strides, larger ones; no byte
needs to be read to know it. Integers only, one row per chunk, all rows at once.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from unshard.tensors.boxes import Ints
from unshard.tensors.catalog import ChunkTable
from unshard.tensors.selection import Selection

__all__ = ["joined", "joined_parts", "sliced", "strides_of", "unless_row_major"]


def sliced(table: ChunkTable, selection: Selection, itemsize: int) -> ChunkTable:
    """Return the parts of chunks that a selection takes, as chunks of what is selected.

    Args:
        table: the chunks of a tensor.
        selection: what is taken of it; every range rising, one not yet turned.
        itemsize: bytes of an element.
    """
    first = np.asarray(selection.starts, dtype=np.int64)
    steps = np.asarray(selection.steps, dtype=np.int64)
    counts = np.asarray(selection.counts, dtype=np.int64)
    lo = np.maximum(_up(table.offsets - first, steps), 0)
    hi = np.minimum(_up(table.offsets + table.sizes - first, steps), counts)
    rows = np.flatnonzero((hi > lo).all(axis=1))
    strides = strides_of(table)[rows]
    lo, sizes = lo[rows], (hi - lo)[rows]
    cut = table.take(rows)
    skip = ((first + lo * steps - cut.offsets) * strides).sum(axis=1) * itemsize
    strides *= steps
    length = (((sizes - 1) * strides).sum(axis=1) + 1) * itemsize
    plain = ~cut.compressed  # of a compressed chunk only the whole has a place
    return replace(
        cut,
        offsets=lo,
        sizes=sizes,
        strides=unless_row_major(sizes, strides),
        start=np.where(plain, cut.start + skip, cut.start),
        length=np.where(plain, length, cut.length),
    )


def joined(tables: Sequence[ChunkTable]) -> ChunkTable:
    """Return all chunks as one table; tables of one checkpoint share their paths."""
    bases: dict[int, int] = {}
    paths = tables[0].paths[:0]
    for table in tables:
        if id(table.paths) not in bases:
            bases[id(table.paths)] = len(paths)
            paths += table.paths
    if len(bases) == 1:
        paths = tables[0].paths
    sizes = np.concatenate([table.sizes for table in tables])
    strides = np.concatenate([strides_of(table) for table in tables])
    return ChunkTable(
        paths,
        np.concatenate([table.offsets for table in tables]),
        sizes,
        unless_row_major(sizes, strides),
        np.concatenate([table.file + bases[id(table.paths)] for table in tables]).astype(np.int32),
        np.concatenate([table.start for table in tables]),
        np.concatenate([table.length for table in tables]),
        np.concatenate([table.rank for table in tables]),
        np.concatenate([table.compressed for table in tables]),
    )


def joined_parts(parts: Sequence[tuple[ChunkTable, Sequence[int]]]) -> ChunkTable:
    """Return the chunks of several parts of one tensor as one table, in rank order.

    Args:
        parts: the chunks of each part, and where it starts in the whole, elements.
    """
    whole = joined(
        [replace(table, offsets=table.offsets + np.asarray(start)) for table, start in parts]
    )
    return whole.take(np.argsort(whole.rank, kind="stable"))


def strides_of(table: ChunkTable) -> Ints:
    """Return the strides of every chunk, elements; row-major where the table states none."""
    return _row_major(table.sizes) if table.strides is None else table.strides


def unless_row_major(sizes: Ints, strides: Ints) -> Ints | None:
    """Return the strides, or None if all chunks are row-major; size 1 has any stride."""
    matters = sizes > 1
    return strides if (matters & (strides != _row_major(sizes))).any() else None


def _row_major(sizes: Ints) -> Ints:
    strides = np.ones_like(sizes)
    for dim in range(sizes.shape[1] - 2, -1, -1):
        strides[:, dim] = strides[:, dim + 1] * np.maximum(sizes[:, dim + 1], 1)
    return strides


def _up(distance: Ints, steps: Ints) -> Ints:
    """Return how many steps reach at least that far."""
    return -(-distance // steps)
