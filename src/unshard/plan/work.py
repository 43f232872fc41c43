"""Divide a plan into units of work, small enough to spread over workers and to bound memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from unshard.containers.strided import SLACK
from unshard.plan.operations import (
    Cast,
    CopyRange,
    Fuse,
    Plan,
    Reduce,
    StoredTensor,
    Tiled,
    stored_tensors,
)
from unshard.tensors.boxes import Box
from unshard.tensors.tiles import row_tile, square_tile, tiles

__all__ = ["Tile", "Unit", "split_into_units", "tile_of_elements", "tile_shape", "unit_bytes"]

_COPY_UNIT = 64 * 1024 * 1024
_MAX_TILE = 8 * 1024 * 1024
_FLOAT32 = 4
_FUSE_ROWS, _FUSE_COLUMNS = 128, 512


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """A region of the tensor that an operation makes."""

    operation: Tiled
    box: Box


Unit = CopyRange | Tile


def split_into_units(plan: Plan, *, buffer_bytes: int) -> Iterator[Unit]:
    """Yield the plan's work, each unit to be done by one worker with buffers of `buffer_bytes`."""
    for operation in plan.operations():
        if isinstance(operation, CopyRange):
            yield from _split(operation)
        else:
            tile = tile_shape(operation, min(buffer_bytes, _MAX_TILE))
            yield from (Tile(operation, box) for box in tiles(operation.target.shape, tile))


def _split(copy: CopyRange) -> Iterator[CopyRange]:
    if copy.size <= _COPY_UNIT:
        yield copy
    elif copy.count == 1:
        for done in range(0, copy.length, _COPY_UNIT):
            length = min(_COPY_UNIT, copy.length - done)
            yield replace(copy, target=copy.target + done, start=copy.start + done, length=length)
    else:
        step = max(1, _COPY_UNIT // copy.length)
        for done in range(0, copy.count, step):
            yield replace(
                copy,
                target=copy.target + done * copy.target_stride,
                start=copy.start + done * copy.length,
                count=min(step, copy.count - done),
            )


def tile_shape(operation: Tiled, budget: int) -> tuple[int, ...]:
    """Return how large tiles may be, so that one takes at most `budget` bytes while it is made."""
    per_element = max(map(_read_bytes, stored_tensors(operation))) + operation.to.itemsize
    if isinstance(operation, Reduce):
        per_element += 2 * _FLOAT32  # the sum and a term
    elif isinstance(operation, Cast) and operation.source.dtype.itemsize > _FLOAT32:
        per_element += _FLOAT32  # float64 becomes 16 bits by way of float32
    return tile_of_elements([operation], max(1, budget // per_element))


def _read_bytes(source: StoredTensor) -> int:
    """Return how many bytes reading an element takes: more if its neighbours are elsewhere."""
    return source.dtype.itemsize * (SLACK if source.chunks.strides is not None else 1)


def tile_of_elements(operations: Sequence[Tiled], elements: int) -> tuple[int, ...]:
    """Return a tile of about so many elements that suits operations of the same shape."""
    shape = operations[0].target.shape
    if any(isinstance(operation, Fuse) for operation in operations):
        return _fuse_tile(shape)
    sources = chain.from_iterable(map(stored_tensors, operations))
    # Turned boxes are read well neither along rows nor along columns, but in squares.
    odd = any(source.chunks.strides is not None for source in sources)
    return (square_tile if odd else row_tile)(shape, elements)


def _fuse_tile(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a tile that depends on the shape only: sums must not depend on the resources."""
    rows, columns = shape[-2:]
    return (*(1 for _ in shape[:-2]), min(rows, _FUSE_ROWS), min(columns, _FUSE_COLUMNS))


def unit_bytes(unit: Unit) -> int:
    """Return how many bytes a unit writes."""
    if isinstance(unit, Tile):
        return unit.box.volume * unit.operation.to.itemsize
    return unit.size
