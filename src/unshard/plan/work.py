"""Divide a plan into units of work, small enough to spread over workers and to bound memory."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from unshard.containers.strided import SLACK
from unshard.plan.operations import Cast, CopyRange, Fuse, Gather, Plan, Reduce, Source, Tiled
from unshard.tensors.boxes import Box
from unshard.tensors.tiles import row_tile, square_tile, tiles

__all__ = ["Tile", "Unit", "fuse_tile", "tile_shape", "unit_bytes", "units"]

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


def _tiles(operation: Tiled, buffer_bytes: int) -> Iterator[Tile]:
    shape = operation.target.shape
    for box in tiles(shape, tile_shape(operation, min(buffer_bytes, _MAX_TILE))):
        yield Tile(operation, box)


def tile_shape(operation: Tiled, budget: int) -> tuple[int, ...]:
    """Return how large tiles may be, so that one takes at most `budget` bytes while it is made."""
    shape, written = operation.target.shape, operation.to.itemsize
    match operation:
        case Fuse():
            return fuse_tile(shape)
        case Reduce(_, terms):
            read = max(map(_read_bytes, (source for _, source in terms)))
            per_element = read + 2 * _FLOAT32 + written  # sum and term
            odd = any(source.chunks.strides is not None for _, source in terms)
        case Gather(_, source) | Cast(_, source):
            per_element = _read_bytes(source) + written
            if isinstance(operation, Cast) and source.dtype.itemsize > _FLOAT32:
                per_element += _FLOAT32  # float64 becomes 16 bits by way of float32
            odd = source.chunks.strides is not None
    elements = max(1, budget // per_element)
    return square_tile(shape, elements) if odd else row_tile(shape, elements)


def _read_bytes(source: Source) -> int:
    """Return what reading an element takes: more, where its neighbours lie elsewhere."""
    return source.dtype.itemsize * (SLACK if source.chunks.strides is not None else 1)


def fuse_tile(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a tile that depends on the shape only: sums must not depend on the settings."""
    rows, columns = shape[-2:]
    return (*(1 for _ in shape[:-2]), min(rows, _FUSE_ROWS), min(columns, _FUSE_COLUMNS))


def unit_bytes(unit: Unit) -> int:
    """Return how many bytes a unit writes."""
    if isinstance(unit, Tile):
        return unit.box.volume * unit.operation.to.itemsize
    return unit.size
