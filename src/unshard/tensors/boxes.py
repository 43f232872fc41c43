"""Boxes: rectangular regions of a tensor, checks that they cover it, and cuts into tiles.

Units are elements; a box is half-open in every dimension. A list of boxes is two integer arrays of
shape (count, dimensions): `offsets` and `sizes`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular region: `offsets` and `sizes` in elements per dimension. 0-d is one element."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """Return the box that covers a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last element of every dimension."""
        return tuple(lo + size for lo, size in zip(self.offsets, self.sizes, strict=True))

    def __str__(self) -> str:
        ranges = zip(self.offsets, self.ends, strict=True)
        return "[" + ", ".join(f"{lo}:{hi}" for lo, hi in ranges) + "]"


def row_major_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of these sizes."""
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(sizes[dim + 1], 1)
    return tuple(strides)


def is_row_major(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements with these strides are contiguous, in row-major order.

    Strides of dimensions of size 1 do not matter, and a tensor without elements has no order.
    """
    if 0 in sizes:
        return True
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def distinct(offsets: Ints, sizes: Ints) -> Ints:
    """Return the index of the first of each set of equal boxes (replicas), without empty boxes."""
    filled = np.flatnonzero((sizes > 0).all(axis=1))
    if len(filled) < 2:
        return filled
    rows = np.concatenate([offsets[filled], sizes[filled]], axis=1)
    if rows.shape[1] == 0:
        return filled[:1]
    order = np.lexsort(rows.T[::-1])
    ordered = rows[order]
    is_first = np.concatenate([[True], (ordered[1:] != ordered[:-1]).any(axis=1)])
    return np.sort(filled[order[is_first]])


Gap = tuple[str, Box]
"""A fault in a cover of a tensor: "hole" or "overlap", and its box."""


def find_gap(offsets: Ints, sizes: Ints, shape: Sequence[int]) -> Gap | None:
    """Return None if the boxes cover the shape exactly once, else ("hole" | "overlap", where).

    The boxes must be distinct and not empty (see `distinct`). Cost: n log n if one dimension is
    cut; if several are, a sweep over the cuts of the first.
    """
    if 0 in shape:
        return None
    if len(offsets) == 0:
        return "hole", Box.whole(shape)
    full = np.asarray(shape, dtype=np.int64)
    cut = np.flatnonzero(((offsets != 0) | (sizes != full)).any(axis=0))
    gap = _sweep(offsets[:, cut], (offsets + sizes)[:, cut], full[cut])
    if gap is None:
        return None
    kind, ranges = gap
    by_dim = dict(zip(cut.tolist(), ranges, strict=True))
    lo_hi = [by_dim.get(dim, (0, size)) for dim, size in enumerate(shape)]
    return kind, Box(tuple(lo for lo, _ in lo_hi), tuple(hi - lo for lo, hi in lo_hi))


_Ranges = tuple[str, list[tuple[int, int]]]


def _sweep(lo: Ints, hi: Ints, shape: Ints) -> _Ranges | None:
    """Find the first region not covered exactly once; `lo`, `hi` and `shape` have equal columns."""
    if len(shape) == 0:
        return None if len(lo) == 1 else ("overlap", [])
    if len(shape) == 1:
        return _sweep_line(lo[:, 0], hi[:, 0], int(shape[0]))
    cuts = sorted({0, int(shape[0]), *lo[:, 0].tolist(), *hi[:, 0].tolist()})
    whole = [(0, int(size)) for size in shape[1:]]
    for start, end in pairwise(cuts):
        if start >= shape[0]:
            return "overlap", [(start, end), *whole]
        active = (lo[:, 0] <= start) & (hi[:, 0] >= end)
        if not active.any():
            return "hole", [(start, end), *whole]
        gap = _sweep(lo[active, 1:], hi[active, 1:], shape[1:])
        if gap is not None:
            return gap[0], [(start, end), *gap[1]]
    return None


def _sweep_line(lo: Ints, hi: Ints, size: int) -> _Ranges | None:
    order = np.argsort(lo, kind="stable")
    starts = np.append(lo[order], size)
    ends = np.insert(hi[order], 0, 0)
    wrong = np.flatnonzero(starts != ends)
    if len(wrong) == 0:
        return None
    at = int(wrong[0])
    start, end = int(starts[at]), int(ends[at])
    if end < start:
        return "hole", [(end, start)]
    return "overlap", [(start, min(end, int(hi[order[at]])) if at < len(order) else end)]


def row_tile(shape: Sequence[int], max_elements: int) -> tuple[int, ...]:
    """Return the largest tile shape of at most `max_elements` that is contiguous, row-major.

    Leading dimensions are 1, one dimension is a range, trailing dimensions are whole.
    """
    tile = list(shape)
    for dim, size in enumerate(shape):
        rest = prod(shape[dim + 1 :])
        tile[dim] = max(1, min(size, max_elements // max(rest, 1)))
        if tile[dim] > 1 or rest <= max_elements:
            break
    return tuple(tile)


def square_tile(shape: Sequence[int], max_elements: int) -> tuple[int, ...]:
    """Return a tile shape of at most `max_elements` with sides as even as the shape allows.

    It suits sources that are not row-major: both reads and writes are then runs of some length.
    """
    tile = [1] * len(shape)
    budget = max_elements
    for done, dim in enumerate(sorted(range(len(shape)), key=lambda d: shape[d])):
        side = int(round(budget ** (1 / (len(shape) - done)), 6))
        tile[dim] = max(1, min(shape[dim], side))
        budget //= tile[dim]
    return tuple(tile)


def tiles(shape: Sequence[int], tile: Sequence[int]) -> Iterator[Box]:
    """Yield the boxes that cut a tensor into tiles, in row-major order; none if it is empty."""
    steps = [range(0, size, step) for size, step in zip(shape, tile, strict=True) if step]
    if 0 in shape:
        return
    for offsets in product(*steps):
        ends = (min(o + t, n) for o, t, n in zip(offsets, tile, shape, strict=True))
        yield Box(offsets, tuple(end - o for end, o in zip(ends, offsets, strict=True)))
