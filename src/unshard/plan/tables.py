"""Where the values of a recipe are stored: chunk tables cut, turned and joined.

A recipe of boxes, permutations, stacks and concatenations is again a set of boxes with strides in
files, which is known without reading a byte. Integers only, one row per chunk, all rows at once.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from unshard.convert.recipes import Concat, Recipe, Stack, Take, shape_of
from unshard.tensors.boxes import Box, distinct
from unshard.tensors.catalog import ChunkTable
from unshard.tensors.selection import of_box
from unshard.tensors.steps import joined, sliced, strides_of, unless_row_major

__all__ = ["table_of"]


def table_of(recipe: Recipe) -> ChunkTable:
    """Return the distinct chunks that make a recipe's tensor; every region from its first replica.

    Raises:
        TypeError: the recipe computes values, which are not stored.
    """
    match recipe:
        case Take(entry, box, permutation):
            chunks = entry.chunks
            if box != Box.whole(entry.shape):  # first: an expert meets few of a layer's chunks
                chunks = sliced(chunks, of_box(box), entry.dtype.itemsize)
            rows = distinct(chunks.offsets, chunks.sizes)
            chunks = chunks if len(rows) == len(chunks) else chunks.take(rows)
            return chunks if permutation is None else _permuted(chunks, permutation)
        case Stack(dim, parts):
            return joined([_with_dimension(table_of(part), dim, n) for n, part in enumerate(parts)])
        case Concat(dim, parts):
            sizes = [shape_of(part)[dim] for part in parts]
            starts = np.cumsum([0, *sizes[:-1]]).tolist()
            moved = zip(parts, starts, strict=True)
            return joined([_moved(table_of(part), dim, start) for part, start in moved])
        case _:
            raise TypeError(f"the values of a {type(recipe).__name__} are computed")


def _permuted(table: ChunkTable, permutation: Sequence[int]) -> ChunkTable:
    order = list(permutation)
    sizes, strides = table.sizes[:, order], strides_of(table)[:, order]
    return replace(
        table,
        offsets=table.offsets[:, order],
        sizes=sizes,
        strides=unless_row_major(sizes, strides),
    )


def _with_dimension(table: ChunkTable, dim: int, index: int) -> ChunkTable:
    """Return the chunks as those at one index of a new dimension."""
    sizes = np.insert(table.sizes, dim, 1, axis=1)
    strides = np.insert(strides_of(table), dim, 0, axis=1)
    return replace(
        table,
        offsets=np.insert(table.offsets, dim, index, axis=1),
        sizes=sizes,
        strides=unless_row_major(sizes, strides),
    )


def _moved(table: ChunkTable, dim: int, start: int) -> ChunkTable:
    offsets = table.offsets.copy()
    offsets[:, dim] += start
    return replace(table, offsets=offsets)
