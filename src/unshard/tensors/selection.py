"""Basic indexing of a tensor by numpy's rules, and the parts of chunks that it selects.

Every dimension gives an ascending range of its indices, whatever the sign of the step; reversed
dimensions and the result's shape are recorded separately. A slice with a step selects from a stored
box another box, with larger strides, so its byte ranges follow without reading.
"""

import operator
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain
from types import EllipsisType
from typing import NamedTuple, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import NDArray

from unshard.tensors.boxes import Box, Ints
from unshard.tensors.catalog import ChunkTable

_Item: TypeAlias = SupportsIndex | slice | EllipsisType | None
Index: TypeAlias = _Item | tuple[_Item, ...]

Grid: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Elements of a tensor, per dimension: the lowest index, the step, the count."""

_MAX_PAIRS = 1 << 17  # of a grid and a chunk, looked at together
_KINDS = "integers, slices, ... and None"


class Selection(NamedTuple):
    """A regular grid of a tensor's elements, and the layout of the result.

    Attributes:
        starts: the lowest selected index, per dimension of the tensor.
        steps: the distance between selected indices, at least 1.
        counts: the number of selected indices; 1 for a dimension indexed by an integer.
        turned: dimensions whose elements are returned from last to first.
        shape: shape of the result: without dimensions indexed by integers, with new axes.
    """

    starts: tuple[int, ...]
    steps: tuple[int, ...]
    counts: tuple[int, ...]
    turned: tuple[int, ...]
    shape: tuple[int, ...]


def of_box(box: Box) -> Selection:
    """Return the selection of a box."""
    return Selection(box.offsets, (1,) * len(box.sizes), box.sizes, (), box.sizes)


def select(index: Index, shape: Sequence[int]) -> Selection:
    """Return the selection of an index into a tensor of this shape.

    Raises:
        IndexError: there are too many indices, one is out of range, or basic indexing does not
            allow its type.
        ValueError: a step is 0.
    """
    items = _expanded(index if isinstance(index, tuple) else (index,), len(shape))
    ranges: list[range] = []
    result: list[int] = []
    for item in items:
        if item is None:
            result.append(1)
            continue
        size = shape[len(ranges)]
        if isinstance(item, slice):
            ranges.append(range(*item.indices(size)))
            result.append(len(ranges[-1]))
        else:
            at = _position(item, len(ranges), size)
            ranges.append(range(at, at + 1))
    return Selection(
        starts=tuple(min(line[0], line[-1]) if line else 0 for line in ranges),
        steps=tuple(abs(line.step) if len(line) > 1 else 1 for line in ranges),
        counts=tuple(map(len, ranges)),
        turned=tuple(dim for dim, line in enumerate(ranges) if line.step < 0),
        shape=tuple(result),
    )


def _expanded(items: tuple[_Item, ...], dimensions: int) -> list[SupportsIndex | slice | None]:
    """Return the items with "..." expanded, so that every dimension has an item."""
    named = sum(item is not None and item is not Ellipsis for item in items)
    if named > dimensions:
        raise IndexError(f"too many indices: {named} for a tensor of {dimensions} dimensions")
    gaps = [position for position, item in enumerate(items) if item is Ellipsis]
    if len(gaps) > 1:
        raise IndexError("an index can have only one ...")
    at = gaps[0] if gaps else len(items)
    rest = [slice(None)] * (dimensions - named)
    expanded = [*items[:at], *rest, *items[at + 1 :]]
    return [item for item in expanded if not isinstance(item, EllipsisType)]


def _position(item: SupportsIndex, dim: int, size: int) -> int:
    """Return an integer index, checked; a negative one counts from the end."""
    if isinstance(item, bool):
        raise IndexError(f"{item} is not an index: only {_KINDS} are")
    try:
        at = operator.index(item)
    except TypeError as error:
        raise IndexError(f"a {type(item).__name__} is not an index: only {_KINDS} are") from error
    if not -size <= at < size:
        raise IndexError(f"index {at} is out of range for dimension {dim} of size {size}")
    return at % size


def sliced(table: ChunkTable, selection: Selection, itemsize: int) -> ChunkTable:
    """Return the selected parts of chunks as a table of the selected tensor, not turned."""
    grid = selection.starts, selection.steps, selection.counts
    return cut_out(table, [grid], itemsize, range(len(selection.counts)))[0]


def cut_out(
    table: ChunkTable, grids: Sequence[Grid], itemsize: int, order: Sequence[int]
) -> list[ChunkTable]:
    """Return the chunks of several grids of elements of one tensor, as `sliced` does for one.

    `order` permutes the tensor's dimensions; dimensions that it leaves out have one element.
    Grids that are cut in the same way share their arrays of boxes.
    """
    tables: list[ChunkTable] = []
    step = max(1, _MAX_PAIRS // max(len(table), 1))
    for at in range(0, len(grids), step):
        parts = zip(*grids[at : at + step], strict=True)
        columns = (np.array(part, np.int64) for part in parts)
        tables += _cut_out(table, itemsize, list(order), *columns)
    return tables


def _cut_out(  # noqa: PLR0913, PLR0917 (a grid has three columns)
    table: ChunkTable, itemsize: int, order: list[int], first: Ints, steps: Ints, counts: Ints
) -> list[ChunkTable]:
    count = len(first)
    first, steps, counts = first[:, None], steps[:, None], counts[:, None]
    lo = np.maximum(_up(table.offsets - first, steps), 0)
    hi = np.minimum(_up(table.offsets + table.sizes - first, steps), counts)
    number, row = np.nonzero((hi > lo).all(axis=2))
    lo, sizes = lo[number, row], (hi - lo)[number, row]
    cut = table.take(row)
    strides, steps = strides_of(cut), steps[number, 0]
    skip = ((first[number, 0] + lo * steps - cut.offsets) * strides).sum(axis=1) * itemsize
    strides = strides * steps
    length = (((sizes - 1) * strides).sum(axis=1) + 1) * itemsize
    lo, sizes, strides = lo[:, order], sizes[:, order], strides[:, order]
    odd = ((sizes > 1) & (strides != _row_major(sizes))).any(axis=1)
    whole = replace(
        cut,
        offsets=lo,
        sizes=sizes,
        strides=strides,
        # A compressed chunk has no byte offset for a part of it.
        start=np.where(cut.compressed, cut.start, cut.start + skip),
        length=np.where(cut.compressed, cut.length, length),
    )
    ends = np.searchsorted(number, np.arange(count), side="right").tolist()
    return _divided(whole, ends, np.bincount(number, odd, count) > 0)


def _divided(table: ChunkTable, ends: Sequence[int], is_odd: NDArray[np.bool_]) -> list[ChunkTable]:
    """Return the rows up to each end as a table; only an odd table gets strides."""
    shared: dict[tuple[bytes, bytes], tuple[Ints, Ints]] = {}
    tables = []
    for begin, end, odd in zip([0, *ends[:-1]], ends, is_odd.tolist(), strict=True):
        part = table.take(slice(begin, end))
        boxes = part.offsets, part.sizes
        offsets, sizes = shared.setdefault((boxes[0].tobytes(), boxes[1].tobytes()), boxes)
        strides = part.strides if odd else None
        tables.append(replace(part, offsets=offsets, sizes=sizes, strides=strides))
    return tables


def joined(tables: Sequence[ChunkTable]) -> ChunkTable:
    """Return all chunks as one table; tables of one checkpoint share their paths."""
    distinct = {id(table.paths): table.paths for table in tables}
    bases = dict(zip(distinct, accumulate(map(len, distinct.values()), initial=0), strict=False))
    paths = tables[0].paths if len(distinct) == 1 else tuple(chain(*distinct.values()))
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
    """Return the chunks of parts, each moved to its start in the tensor, in rank order."""
    moved = [replace(table, offsets=table.offsets + np.asarray(start)) for table, start in parts]
    whole = joined(moved)
    return whole.take(np.argsort(whole.rank, kind="stable"))


def strides_of(table: ChunkTable) -> Ints:
    """Return the strides of every chunk, elements; row-major if the table has none."""
    return _row_major(table.sizes) if table.strides is None else table.strides


def unless_row_major(sizes: Ints, strides: Ints) -> Ints | None:
    """Return the strides, or None if all chunks are row-major; any stride fits size 1."""
    return strides if ((sizes > 1) & (strides != _row_major(sizes))).any() else None


def _row_major(sizes: Ints) -> Ints:
    strides = np.ones_like(sizes)
    for dim in range(sizes.shape[1] - 2, -1, -1):
        strides[:, dim] = strides[:, dim + 1] * np.maximum(sizes[:, dim + 1], 1)
    return strides


def _up(distance: Ints, steps: Ints) -> Ints:
    """Return the least number of steps that covers the distance."""
    return -(-distance // steps)
