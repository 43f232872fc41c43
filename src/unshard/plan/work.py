"""Divide work into tiles that bound memory: of a plan, of two models to compare, of a selection.

Of two models, the tensors are paired by name. Where dtypes differ and a merge may cast between
them, theirs is cast to ours, once, from the values of its recipe, as a merge does it: a bfloat16
merge of a float32 checkpoint then equals it exactly.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, product
from math import isqrt
from typing import TYPE_CHECKING, NamedTuple

from unshard.containers.strided import SLACK
from unshard.convert.outputs import Converted
from unshard.convert.recipes import BLOCK, shape_of, take
from unshard.plan.operations import (
    Cast,
    CopyRange,
    Dequantize,
    FindScales,
    Fuse,
    Gather,
    Plan,
    Quantize,
    Reduce,
    Target,
    Tiled,
    stored_tensors,
)
from unshard.plan.planner import make_operation
from unshard.tensors.boxes import Box, row_tile, square_tile, tiles
from unshard.tensors.catalog import Catalog

if TYPE_CHECKING:
    from unshard.tensors.selection import Selection

PAIR_BYTES = 8 * 1024 * 1024
"""How much memory a pair of tiles takes at most. It is fixed: sums depend on how tiles are cut."""

_MAKING = 6 * 1024 * 1024  # of it; the rest is for arithmetic
_COPY_UNIT = 16 * 1024 * 1024
_MAX_TILE = 4 * 1024 * 1024
_FLOAT32 = 4
_FUSE_ROWS, _FUSE_COLUMNS = BLOCK, 4 * BLOCK  # of one product
_MAX_FUSE = 16 * 1024 * 1024  # a bucket reads the rows of a tile whole, so wide tiles read less


class Tile(NamedTuple):
    """A region of the tensor that an operation makes."""

    operation: Tiled
    box: Box


Unit = CopyRange | Tile


def split_into_units(plan: Plan, *, buffer_bytes: int) -> Iterator[Unit]:
    """Return the plan's work, each unit to be done by one worker with buffers of `buffer_bytes`."""
    for copies, made in units_by_file(plan, buffer_bytes=buffer_bytes):
        yield from copies
        yield from made


def units_by_file(
    plan: Plan, *, buffer_bytes: int
) -> Iterator[tuple[Iterator[CopyRange], Iterator[Tile]]]:
    """Yield the copies into each output file, in its order, and its tiles."""
    tiled: dict[int, list[Tiled]] = {}
    for operation in plan.tiled:
        tiled.setdefault(operation.target.file, []).append(operation)
    for file in sorted({*plan.copies["file"].tolist(), *tiled}):
        copies = chain.from_iterable(map(_split, plan.copies_into(file, file + 1)))
        yield copies, _tiles(tiled.get(file, ()), buffer_bytes)


def _tiles(operations: Iterable[Tiled], buffer_bytes: int) -> Iterator[Tile]:
    for operation in operations:
        most = _MAX_FUSE if isinstance(operation, Fuse) else _MAX_TILE
        tile = tile_shape(operation, min(buffer_bytes, most))
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
    """Return how large tiles may be, so that one takes at most `budget` bytes while it is made.

    The tiles of a LoRA fuse have whole products, and those of block FP8 have whole blocks.
    """
    per_element = operation.to.itemsize + max(
        source.dtype.itemsize * (SLACK if source.chunks.strides is not None else 1)
        for source in stored_tensors(operation)  # more is read if neighbours are stored apart
    )
    if isinstance(operation, Reduce):
        per_element += 2 * _FLOAT32  # the sum and a term
    elif isinstance(operation, Fuse):  # the sum, and the columns of `a`
        per_element += _FLOAT32 + -(-2 * _FLOAT32 * operation.rank // _FUSE_ROWS)
    elif isinstance(operation, Cast) and operation.source.dtype.itemsize > _FLOAT32:
        per_element += _FLOAT32  # float64 becomes 16 bits by way of float32
    elif isinstance(operation, Quantize | FindScales | Dequantize):
        per_element += _FLOAT32  # the values
    return _tile_of_elements([operation], max(1, budget // per_element))


def _tile_of_elements(operations: Sequence[Tiled], elements: int) -> tuple[int, ...]:
    """Return a tile of about that many elements that suits operations of the same shape."""
    for one in operations:
        if isinstance(one, Quantize):
            return _tile_of_blocks(one.values, elements)
        if isinstance(one, FindScales):
            rows, columns = _tile_of_blocks(one.values, elements)
            return -(-rows // BLOCK), -(-columns // BLOCK)
    shape = operations[0].target.shape
    if any(isinstance(operation, Fuse) for operation in operations):
        # Whole products, which have one size: sums must not depend on the resources.
        rows, columns = shape[-2:]
        wide = max(1, elements // (_FUSE_ROWS * _FUSE_COLUMNS)) * _FUSE_COLUMNS
        return (*(1 for _ in shape[:-2]), min(rows, _FUSE_ROWS), min(columns, wide))
    sources = chain.from_iterable(map(stored_tensors, operations))
    # Turned boxes are read well neither along rows nor along columns, but in squares.
    odd = any(source.chunks.strides is not None for source in sources)
    return (square_tile if odd else row_tile)(shape, elements)


def _tile_of_blocks(values: Tiled, elements: int) -> tuple[int, ...]:
    """Return a tile of whole blocks: of rows of them if one fits, else of a part of one row."""
    if isinstance(values, Fuse):
        return _tile_of_elements([values], elements)  # it has whole blocks
    rows, columns = values.target.shape
    turned = any(source.chunks.strides is not None for source in stored_tensors(values))
    wide = isqrt(elements) if turned else elements // BLOCK
    width = min(columns, max(1, wide // BLOCK) * BLOCK)
    return min(rows, max(1, elements // (width * BLOCK)) * BLOCK), width


def unit_bytes(unit: Unit) -> int:
    """Return how many bytes a unit writes."""
    if isinstance(unit, Tile):
        return unit.box.volume * unit.operation.to.itemsize
    return unit.size


def file_of(unit: Unit) -> int:
    """Return the number of the output file that a unit writes into."""
    return unit.operation.target.file if isinstance(unit, Tile) else unit.file


class Pair(NamedTuple):
    """Two tensors of equal shape, and how each is made; the dtypes are those of `Tiled.to`."""

    ours: Tiled
    theirs: Tiled


def as_stored(catalog: Catalog) -> list[Converted]:
    """Return a model's tensors as they are, each under its own name and dtype."""
    tensors = catalog.tensors.items()
    return [Converted(name, entry.dtype, take(entry)) for name, entry in tensors]


def make_pair(ours: Converted, theirs: Converted) -> Pair:
    """Return how two tensors of equal shape are made so that they can be compared."""
    cast = ours.dtype.castable and theirs.dtype.castable
    nowhere = Target(0, 0, shape_of(ours.recipe))  # they are made in memory
    return Pair(
        make_operation(nowhere, ours.recipe, ours.dtype),
        make_operation(nowhere, theirs.recipe, ours.dtype if cast else theirs.dtype),
    )


def pair_tiles(pair: Pair) -> Iterator[tuple[Tile, Tile]]:
    """Yield tiles of the same boxes of both tensors; they depend on nothing but the pair."""
    per_element = 0
    for one in (pair.ours, pair.theirs):  # reading it, arithmetic in float32, the result
        sources = stored_tensors(one)
        slack = SLACK if any(source.chunks.strides is not None for source in sources) else 1
        per_element += slack * max(source.dtype.itemsize for source in sources) + one.to.itemsize
        per_element += 0 if isinstance(one, Gather) else 2 * _FLOAT32
    tile = _tile_of_elements([pair.ours, pair.theirs], _MAKING // per_element)
    for box in tiles(pair.ours.target.shape, tile):
        yield Tile(pair.ours, box), Tile(pair.theirs, box)


class TilePart(NamedTuple):
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
    shape: Sequence[int], tile: Sequence[int], selection: "Selection"
) -> Iterator[TilePart]:
    """Yield what a selection takes of every tile that it meets, in row-major order."""
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
