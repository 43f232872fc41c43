"""Divide a plan into units of work, small enough to spread over workers and to bound memory."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from unshard.containers.strided import SLACK
from unshard.plan.operations import Cast, CopyRange, Gather, Plan
from unshard.tensors.boxes import Box
from unshard.tensors.tiles import row_tile, square_tile, tiles

__all__ = ["Tile", "Unit", "units"]

_COPY_UNIT = 64 * 1024 * 1024
_MAX_TILE = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """A region of the tensor that an operation makes."""

    operation: Gather | Cast
    box: Box


Unit = CopyRange | Tile


def units(plan: Plan, *, buffer_bytes: int) -> Iterator[Unit]:
    """Yield the plan's work, each unit to be done by one worker with buffers of `buffer_bytes`."""
    for operation in plan.operations():
        if isinstance(operation, CopyRange):
            yield from _split(operation)
        else:
            yield from _tiles(operation, buffer_bytes)


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


def _tiles(operation: Gather | Cast, buffer_bytes: int) -> Iterator[Tile]:
    gather = operation.gather if isinstance(operation, Cast) else operation
    written = operation.to.itemsize if isinstance(operation, Cast) else gather.dtype.itemsize
    budget = min(buffer_bytes, _MAX_TILE)
    odd = gather.chunks.strides is not None
    per_element = gather.dtype.itemsize * (SLACK if odd else 1) + written
    if isinstance(operation, Cast) and gather.dtype.itemsize > 4:
        per_element += 4  # float64 becomes 16 bits by way of float32
    make = square_tile if odd else row_tile
    for box in tiles(gather.shape, make(gather.shape, max(1, budget // per_element))):
        yield Tile(operation, box)
