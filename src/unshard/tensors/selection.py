"""What basic indexing takes of a tensor: numpy's rules, as integers.

Every dimension gives a rising range of its indices, whatever the sign of the step; which of them
are then reversed, and which dimensions the result has, is stated separately. Elements; no bytes.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import SupportsIndex, TypeAlias

from unshard.tensors.boxes import Box

__all__ = ["Index", "Selection", "of_box", "select"]

_Item: TypeAlias = SupportsIndex | slice | EllipsisType | None
Index: TypeAlias = _Item | tuple[_Item, ...]

_KINDS = "integers, slices, ... and None"


@dataclass(frozen=True, slots=True)
class Selection:
    """A regular grid of a tensor's elements, and how it is returned.

    Attributes:
        starts: the lowest index taken, per dimension of the tensor.
        steps: from one to the next, at least 1.
        counts: how many are taken; of a dimension indexed by an integer, 1.
        turned: dimensions whose elements are returned from last to first.
        shape: the result's: dimensions of integers are gone, new ones of size 1 have come.
    """

    starts: tuple[int, ...]
    steps: tuple[int, ...]
    counts: tuple[int, ...]
    turned: tuple[int, ...]
    shape: tuple[int, ...]


def of_box(box: Box) -> Selection:
    """Return the selection that is a box of a tensor."""
    return Selection(box.offsets, (1,) * len(box.sizes), box.sizes, (), box.sizes)


def select(index: Index, shape: Sequence[int]) -> Selection:
    """Return what an index takes of a tensor of this shape.

    Raises:
        IndexError: there are more indices than dimensions, one is out of range, or it is of
            another kind than basic indexing knows.
        ValueError: a step is 0.
    """
    items = _filled_up(index if isinstance(index, tuple) else (index,), len(shape))
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
        starts=tuple(min(one[0], one[-1]) if one else 0 for one in ranges),
        steps=tuple(abs(one.step) if len(one) > 1 else 1 for one in ranges),
        counts=tuple(map(len, ranges)),
        turned=tuple(dim for dim, one in enumerate(ranges) if one.step < 0),
        shape=tuple(result),
    )


def _filled_up(items: tuple[_Item, ...], dimensions: int) -> list[SupportsIndex | slice | None]:
    """Return the items with one for every dimension; "..." stands for those that are not named."""
    named = sum(item is not None and item is not Ellipsis for item in items)
    if named > dimensions:
        raise IndexError(f"too many indices: {named} for a tensor of {dimensions} dimensions")
    gaps = [place for place, item in enumerate(items) if item is Ellipsis]
    if len(gaps) > 1:
        raise IndexError("an index can have only one ...")
    at = gaps[0] if gaps else len(items)
    rest = [slice(None)] * (dimensions - named)
    filled = [*items[:at], *rest, *items[at + 1 :]]
    return [item for item in filled if not isinstance(item, EllipsisType)]


def _position(item: SupportsIndex, dim: int, size: int) -> int:
    """Return the index that an integer means; negative ones count from the end."""
    if isinstance(item, bool):
        raise IndexError(f"{item} is not an index: only {_KINDS} are")
    try:
        at = operator.index(item)
    except TypeError as error:
        raise IndexError(f"a {type(item).__name__} is not an index: only {_KINDS} are") from error
    if not -size <= at < size:
        raise IndexError(f"index {at} is out of range for dimension {dim} of size {size}")
    return at % size
