"""Pair the tensors of two models by name, to be compared tile by tile. Pure.

Where dtypes differ and a merge may cast between them, theirs is cast to ours, once, from the values
of its recipe, as a merge does it: a bfloat16 merge of a float32 checkpoint then equals it exactly.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from unshard.containers.strided import SLACK
from unshard.convert.outputs import Converted
from unshard.convert.recipes import shape_of, take
from unshard.plan.operations import Cast, Fuse, Gather, Reduce, Source, Target, Tiled
from unshard.plan.planner import tiled
from unshard.plan.work import Tile, fuse_tile
from unshard.tensors.catalog import Catalog
from unshard.tensors.dtypes import DType
from unshard.tensors.tiles import row_tile, square_tile, tiles

__all__ = ["TILE_BYTES", "Pair", "as_stored", "make_pair", "pair_tiles"]

TILE_BYTES = 4 * 1024 * 1024
"""What comparing one tile takes at most. It is fixed, because sums depend on how tiles are cut."""

_FLOAT32 = 4
_MAKING = 3 * 1024 * 1024  # of it; the rest is for arithmetic


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
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
    alike = ours.dtype if cast else theirs.dtype
    return Pair(_operation(ours, ours.dtype), _operation(theirs, alike))


def pair_tiles(pair: Pair) -> Iterator[tuple[Tile, Tile]]:
    """Yield tiles of both tensors, of the same boxes; they depend on nothing but the pair."""
    for box in tiles(pair.ours.target.shape, _tile_shape(pair)):
        yield Tile(pair.ours, box), Tile(pair.theirs, box)


def _operation(tensor: Converted, to: DType) -> Tiled:
    """Return how a tensor is made in memory; its target is a place in no file."""
    return tiled(Target(0, 0, shape_of(tensor.recipe)), tensor.recipe, to)


def _tile_shape(pair: Pair) -> tuple[int, ...]:
    operations, shape = (pair.ours, pair.theirs), pair.ours.target.shape
    if any(isinstance(operation, Fuse) for operation in operations):
        return fuse_tile(shape)
    sources = [source for operation in operations for source in _sources(operation)]
    each = sum(_bytes_per_element(operation) for operation in operations)
    odd = any(source.chunks.strides is not None for source in sources)
    return (square_tile if odd else row_tile)(shape, _MAKING // each)


def _bytes_per_element(operation: Tiled) -> int:
    """Return what making an element takes: reading it, arithmetic in float32, the result."""
    read = max(source.dtype.itemsize for source in _sources(operation))
    return SLACK * read + 2 * _FLOAT32 + operation.to.itemsize


def _sources(operation: Tiled) -> Iterable[Source]:
    match operation:
        case Gather(_, source) | Cast(_, source):
            return (source,)
        case Reduce(_, terms):
            return [source for _, source in terms]
        case Fuse():
            return operation.base, operation.a, operation.b
