"""Parts of tensors that are taken with steps, as parts of tiles. Integers only."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from unshard.tensors.boxes import Box
from unshard.tensors.selection import Selection

__all__ = ["TilePart", "tile_parts"]


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
