"""Parts of tensors that are taken with steps, as chunk tables and as parts of tiles.

What a slice with a step takes of a stored box is again a box with strides, larger ones; no byte
needs to be read to know it. Integers only, one row per chunk, all rows at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from unshard.tensors.boxes import Box, Ints
from unshard.tensors.catalog import ChunkTable
from unshard.tensors.selection import Selection

__all__ = ["TilePart", "sliced", "strides_of", "tile_parts", "unless_row_major"]


@dataclass(frozen=True, slots=True)
class TilePart:
    """What a selection takes of one tile.

    Attributes:
        tile: the whole tile, in the tensor.
        taken: which of the tile's elements, per dimension.
        place: where they go among the selected ones.
    """

    tile: Box
    taken: tuple[slice, ...]
    place: tuple[slice, ...]


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


def tile_parts(
    shape: Sequence[int], tile: Sequence[int], selection: Selection
) -> Iterator[TilePart]:
    """Yield what a selection takes of every tile that it meets, in row-major order.

    Args:
        shape: of the tensor, elements.
        tile: how large its tiles are; the last ones are smaller.
        selection: what is taken.
    """
    ranges = zip(shape, tile, selection.starts, selection.steps, selection.counts, strict=True)
    for parts in product(*(_line_parts(*one) for one in ranges)):
        offsets, sizes, taken, place = zip(*parts, strict=True) if parts else ((), (), (), ())
        yield TilePart(Box(offsets, sizes), taken, place)


_LinePart = tuple[int, int, slice, slice]


def _line_parts(size: int, tile: int, start: int, step: int, count: int) -> list[_LinePart]:
    """Return, along one dimension, offset and size of the tiles that are met, and what is taken."""
    parts: list[_LinePart] = []
    done = 0
    while done < count:
        at = start + done * step
        offset = at - at % tile
        end = min(offset + tile, size)
        more = min(count - done, -(-(end - at) // step))
        taken = slice(at - offset, at - offset + (more - 1) * step + 1, step)
        parts.append((offset, end - offset, taken, slice(done, done + more)))
        done += more
    return parts


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
