"""Pair the tensors of two models by name, to be compared tile by tile. Pure.

Where dtypes differ and a merge may cast between them, theirs is cast to ours, once, from the values
of its recipe, as a merge does it: a bfloat16 merge of a float32 checkpoint then equals it exactly.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from unshard.containers.strided import SLACK
from unshard.convert.outputs import Converted
from unshard.convert.recipes import shape_of, take
from unshard.plan.operations import Target, Tiled, stored_tensors
from unshard.plan.planner import make_operation
from unshard.plan.work import Tile, tile_of_elements
from unshard.tensors.catalog import Catalog
from unshard.tensors.dtypes import DType
from unshard.tensors.tiles import tiles

__all__ = ["TILE_BYTES", "Pair", "as_stored", "make_pair", "pair_tiles"]

TILE_BYTES = 4 * 1024 * 1024
"""How much memory one tile takes at most. It is fixed: sums depend on how tiles are cut."""

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
    """Yield tiles of the same boxes of both tensors; they depend on nothing but the pair."""
    operations = (pair.ours, pair.theirs)
    tile = tile_of_elements(operations, _MAKING // sum(map(_bytes_per_element, operations)))
    for box in tiles(pair.ours.target.shape, tile):
        yield Tile(pair.ours, box), Tile(pair.theirs, box)


def _operation(tensor: Converted, to: DType) -> Tiled:
    """Return how a tensor is made in memory; its target is never used as a place in a file."""
    return make_operation(Target(0, 0, shape_of(tensor.recipe)), tensor.recipe, to)


def _bytes_per_element(operation: Tiled) -> int:
    """Return how many bytes an element takes: reading it, arithmetic in float32, the result."""
    read = max(source.dtype.itemsize for source in stored_tensors(operation))
    return SLACK * read + 2 * _FLOAT32 + operation.to.itemsize
