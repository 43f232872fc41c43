"""Divide a plan, a comparison of two models, or a selection into tiles, which bound memory.

Tensors of two models are paired by name. If their dtypes differ and a merge may cast between them,
theirs is cast to ours, once, from the values of its recipe, as in a merge. A bfloat16 merge of a
float32 checkpoint then equals it exactly.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, product
from math import isqrt
from typing import TYPE_CHECKING, NamedTuple

from unshard.containers.strided import SLACK
from unshard.convert.outputs import ConvertedTensor
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
"""Bound on the memory of a pair of tiles. It is fixed, because sums depend on how tiles are cut."""

_MAKING = 6 * 1024 * 1024  # of them, to make both tiles; the rest is for arithmetic
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
    """Yield the plan's work in units for one worker with buffers of `buffer_bytes`."""
    for copies, file_tiles in units_by_file(plan, buffer_bytes=buffer_bytes):
        yield from copies
        yield from file_tiles


def units_by_file(
    plan: Plan, *, buffer_bytes: int
) -> Iterator[tuple[Iterator[CopyRange], Iterator[Tile]]]:
    """Yield the copies into each output file, in order, and its tiles."""
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
    """Return a tile shape that takes at most `budget` bytes while the tile is made.

    The tiles of a LoRA fuse have whole products, and those of block FP8 have whole blocks.
    """
    per_element = operation.to.itemsize + max(
        source.dtype.itemsize * (SLACK if source.chunks.strides is not None else 1)
        for source in stored_tensors(operation)  # strided chunks need more bytes read
    )
    if isinstance(operation, Reduce):
        per_element += 2 * _FLOAT32  # the sum and a term
    elif isinstance(operation, Fuse):  # the sum, and the columns of `a`
        per_element += _FLOAT32 + -(-2 * _FLOAT32 * operation.rank // _FUSE_ROWS)
    elif isinstance(operation, Cast) and operation.source.dtype.itemsize > _FLOAT32:
        per_element += _FLOAT32  # a cast of float64 to 16 bits goes through float32
    elif isinstance(operation, Quantize | FindScales | Dequantize):
        per_element += _FLOAT32  # the values
    return _tile_of_elements([operation], max(1, budget // per_element))


def _tile_of_elements(operations: Sequence[Tiled], elements: int) -> tuple[int, ...]:
    """Return a tile of about that many elements for operations of the same shape."""
    for operation in operations:
        if isinstance(operation, Quantize):
            return _tile_of_blocks(operation.values, elements)
        if isinstance(operation, FindScales):
            rows, columns = _tile_of_blocks(operation.values, elements)
            return -(-rows // BLOCK), -(-columns // BLOCK)
    shape = operations[0].target.shape
    if any(isinstance(operation, Fuse) for operation in operations):
        # Whole products of a fixed size: sums must not depend on the resources.
        rows, columns = shape[-2:]
        wide = max(1, elements // (_FUSE_ROWS * _FUSE_COLUMNS)) * _FUSE_COLUMNS
        return (*(1 for _ in shape[:-2]), min(rows, _FUSE_ROWS), min(columns, wide))
    sources = chain.from_iterable(map(stored_tensors, operations))
    # Neither rows nor columns of turned boxes are long runs in both files; squares are a balance.
    odd = any(source.chunks.strides is not None for source in sources)
    return (square_tile if odd else row_tile)(shape, elements)


def _tile_of_blocks(values: Tiled, elements: int) -> tuple[int, ...]:
    """Return a tile of whole blocks: rows of blocks if a row fits, else a part of a row."""
    if isinstance(values, Fuse):
        return _tile_of_elements([values], elements)  # it has whole blocks
    rows, columns = values.target.shape
    turned = any(source.chunks.strides is not None for source in stored_tensors(values))
    wide = isqrt(elements) if turned else elements // BLOCK
    width = min(columns, max(1, wide // BLOCK) * BLOCK)
    return min(rows, max(1, elements // (width * BLOCK)) * BLOCK), width


def unit_bytes(unit: Unit) -> int:
    """Return the number of bytes that a unit writes."""
    if isinstance(unit, Tile):
        return unit.box.volume * unit.operation.to.itemsize
    return unit.size


def file_of(unit: Unit) -> int:
    """Return the index of the output file that a unit writes into."""
    return unit.operation.target.file if isinstance(unit, Tile) else unit.file


class Pair(NamedTuple):
    """The operations that make two tensors of equal shape, to be compared."""

    ours: Tiled
    theirs: Tiled


def as_stored(catalog: Catalog) -> list[ConvertedTensor]:
    """Return a model's tensors with their own names and dtypes."""
    tensors = catalog.tensors.items()
    return [ConvertedTensor(name, entry.dtype, take(entry)) for name, entry in tensors]


def make_pair(ours: ConvertedTensor, theirs: ConvertedTensor) -> Pair:
    """Return the operations that make two tensors of equal shape, so that they can be compared."""
    cast = ours.dtype.castable and theirs.dtype.castable
    nowhere = Target(0, 0, shape_of(ours.recipe))  # in memory, not in a file
    return Pair(
        make_operation(nowhere, ours.recipe, ours.dtype),
        make_operation(nowhere, theirs.recipe, ours.dtype if cast else theirs.dtype),
    )


def pair_tiles(pair: Pair) -> Iterator[tuple[Tile, Tile]]:
    """Yield tiles of the same boxes of both tensors; they depend on the pair alone."""
    per_element = 0
    for operation in pair:  # reading, arithmetic in float32, the result
        sources = stored_tensors(operation)
        slack = SLACK if any(source.chunks.strides is not None for source in sources) else 1
        per_element += slack * max(source.dtype.itemsize for source in sources)
        per_element += operation.to.itemsize
        per_element += 0 if isinstance(operation, Gather) else 2 * _FLOAT32
    tile = _tile_of_elements(pair, _MAKING // per_element)
    for box in tiles(pair.ours.target.shape, tile):
        yield Tile(pair.ours, box), Tile(pair.theirs, box)


class TilePart(NamedTuple):
    """The intersection of a selection and a tile.

    Attributes:
        tile: the whole tile, in the tensor.
        taken: the selected elements of the tile, per dimension.
        place: their positions in the result, per dimension.
    """

    tile: Box
    taken: tuple[slice, ...]
    place: tuple[slice, ...]


def tile_parts(
    shape: Sequence[int], tile: Sequence[int], selection: "Selection"
) -> Iterator[TilePart]:
    """Yield the selected part of every tile that a selection overlaps, in row-major order."""
    lines = zip(shape, tile, selection.starts, selection.steps, selection.counts, strict=True)
    for parts in product(*(_line_parts(*line) for line in lines)):
        offsets, sizes, taken, place = zip(*parts, strict=True) if parts else ((), (), (), ())
        yield TilePart(Box(offsets, sizes), taken, place)


_LinePart = tuple[int, int, slice, slice]


def _line_parts(size: int, tile: int, start: int, step: int, count: int) -> list[_LinePart]:
    """Return offset and size of the tiles along a dimension, and `taken` and `place` of each."""
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
