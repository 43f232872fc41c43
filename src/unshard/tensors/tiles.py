"""Cutting a tensor into tiles of bounded size: pure arithmetic on shapes, in elements."""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

from unshard.tensors.boxes import Box

__all__ = ["row_tile", "square_tile", "tiles"]


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

    For sources that are not row-major: reading and writing then both happen in runs of some length.
    """
    tile = [1] * len(shape)
    left = max_elements
    for done, dim in enumerate(sorted(range(len(shape)), key=lambda d: shape[d])):
        side = int(round(left ** (1 / (len(shape) - done)), 6))
        tile[dim] = max(1, min(shape[dim], side))
        left //= tile[dim]
    return tuple(tile)


def tiles(shape: Sequence[int], tile: Sequence[int]) -> Iterator[Box]:
    """Yield the boxes that cut a tensor into tiles, in row-major order; none if it is empty."""
    steps = [range(0, size, step) for size, step in zip(shape, tile, strict=True) if step]
    if 0 in shape:
        return
    for offsets in product(*steps):
        ends = (min(o + t, n) for o, t, n in zip(offsets, tile, shape, strict=True))
        yield Box(offsets, tuple(end - o for end, o in zip(ends, offsets, strict=True)))
