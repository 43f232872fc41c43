"""Where the values of a recipe lie, if they are only moved: chunk tables cut, turned and joined.

A recipe of boxes, permutations, stacks and concatenations is again a set of boxes with strides in
files; no byte needs to be read to know it. Integers only, one row per chunk, all rows at once.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from unshard.convert.recipes import Concat, Recipe, Stack, Take, shape_of
from unshard.tensors.boxes import Box, Ints, distinct
from unshard.tensors.catalog import ChunkTable

__all__ = ["table_of"]


def table_of(recipe: Recipe) -> ChunkTable:
    """Return the distinct chunks that make a recipe's tensor; every region from its first replica.

    Raises:
        TypeError: the recipe computes values; they lie nowhere.
    """
    match recipe:
        case Take(entry, box, permutation):
            chunks = entry.chunks
            if box != Box.whole(entry.shape):  # first: an expert meets few of a layer's chunks
                chunks = _cut(chunks, box, entry.dtype.itemsize)
            rows = distinct(chunks.offsets, chunks.sizes)
            chunks = chunks if len(rows) == len(chunks) else chunks.take(rows)
            return chunks if permutation is None else _permuted(chunks, permutation)
        case Stack(dim, parts):
            return _joined(
                [_with_dimension(table_of(part), dim, n) for n, part in enumerate(parts)]
            )
        case Concat(dim, parts):
            sizes = [shape_of(part)[dim] for part in parts]
            starts = np.cumsum([0, *sizes[:-1]]).tolist()
            moved = zip(parts, starts, strict=True)
            return _joined([_moved(table_of(part), dim, start) for part, start in moved])
        case _:
            raise TypeError(f"the values of a {type(recipe).__name__} are computed")


def _cut(table: ChunkTable, box: Box, itemsize: int) -> ChunkTable:
    """Return the parts of the chunks that lie inside a box, with offsets relative to it."""
    first = np.asarray(box.offsets, dtype=np.int64)
    lo = np.maximum(table.offsets, first)
    hi = np.minimum(table.offsets + table.sizes, np.asarray(box.ends, dtype=np.int64))
    rows = np.flatnonzero((hi > lo).all(axis=1))
    strides = _strides(table)[rows]
    lo, sizes = lo[rows], (hi - lo)[rows]
    cut = table.take(rows)
    skip = ((lo - cut.offsets) * strides).sum(axis=1) * itemsize
    length = (((sizes - 1) * strides).sum(axis=1) + 1) * itemsize
    plain = ~cut.compressed  # of a compressed chunk only the whole has a place
    return replace(
        cut,
        offsets=lo - first,
        sizes=sizes,
        strides=_odd(sizes, strides),
        start=np.where(plain, cut.start + skip, cut.start),
        length=np.where(plain, length, cut.length),
    )


def _permuted(table: ChunkTable, permutation: Sequence[int]) -> ChunkTable:
    order = list(permutation)
    sizes, strides = table.sizes[:, order], _strides(table)[:, order]
    return replace(
        table, offsets=table.offsets[:, order], sizes=sizes, strides=_odd(sizes, strides)
    )


def _with_dimension(table: ChunkTable, dim: int, index: int) -> ChunkTable:
    """Return the chunks as those at one index of a new dimension."""
    sizes = np.insert(table.sizes, dim, 1, axis=1)
    strides = np.insert(_strides(table), dim, 0, axis=1)
    return replace(
        table,
        offsets=np.insert(table.offsets, dim, index, axis=1),
        sizes=sizes,
        strides=_odd(sizes, strides),
    )


def _moved(table: ChunkTable, dim: int, start: int) -> ChunkTable:
    offsets = table.offsets.copy()
    offsets[:, dim] += start
    return replace(table, offsets=offsets)


def _joined(tables: Sequence[ChunkTable]) -> ChunkTable:
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
    strides = np.concatenate([_strides(table) for table in tables])
    return ChunkTable(
        paths,
        np.concatenate([table.offsets for table in tables]),
        sizes,
        _odd(sizes, strides),
        np.concatenate([table.file + bases[id(table.paths)] for table in tables]).astype(np.int32),
        np.concatenate([table.start for table in tables]),
        np.concatenate([table.length for table in tables]),
        np.concatenate([table.rank for table in tables]),
        np.concatenate([table.compressed for table in tables]),
    )


def _strides(table: ChunkTable) -> Ints:
    """Return the strides of every chunk, row-major where the table states none."""
    return _row_major(table.sizes) if table.strides is None else table.strides


def _row_major(sizes: Ints) -> Ints:
    strides = np.ones_like(sizes)
    for dim in range(sizes.shape[1] - 2, -1, -1):
        strides[:, dim] = strides[:, dim + 1] * np.maximum(sizes[:, dim + 1], 1)
    return strides


def _odd(sizes: Ints, strides: Ints) -> Ints | None:
    """Return the strides, or None if all chunks are row-major; size 1 has any stride."""
    matters = sizes > 1
    return strides if (matters & (strides != _row_major(sizes))).any() else None
