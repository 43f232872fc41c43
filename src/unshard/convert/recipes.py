"""Recipes: how an output tensor is made of checkpoint tensors. A closed union, evaluated elsewhere.

Shapes are in elements. A recipe's dtype is the one its values have before the output's cast.
"""

from dataclasses import dataclass
from typing import assert_never

from unshard.tensors.boxes import Box
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.dtypes import BY_NAME, DType

__all__ = [
    "Concat",
    "LowRank",
    "Recipe",
    "Stack",
    "Take",
    "WeightedSum",
    "dtype_of",
    "shape_of",
    "take",
]


@dataclass(frozen=True, slots=True)
class Take:
    """A box of a tensor, its dimensions then permuted (None: left in order)."""

    entry: TensorEntry
    box: Box
    permutation: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Stack:
    """Parts of equal shape along a new dimension `dim`."""

    dim: int
    parts: tuple["Recipe", ...]


@dataclass(frozen=True, slots=True)
class Concat:
    """Parts one after another along dimension `dim`, equal in all others."""

    dim: int
    parts: tuple["Recipe", ...]


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """(sum of weight * part) / (sum of weights), in float32, over parts of equal shape."""

    terms: tuple[tuple[float, "Recipe"], ...]


@dataclass(frozen=True, slots=True)
class LowRank:
    """base + scale * (b @ a), in float32: a LoRA adapter fused into its weight."""

    base: "Recipe"
    a: "Recipe"
    b: "Recipe"
    scale: float


Recipe = Take | Stack | Concat | WeightedSum | LowRank


def take(entry: TensorEntry) -> Take:
    """Return the recipe that is all of a tensor, as it is."""
    return Take(entry, Box.whole(entry.shape))


def shape_of(recipe: Recipe) -> tuple[int, ...]:
    """Return the shape that a recipe makes."""
    match recipe:
        case Take(_, box, None):
            return box.sizes
        case Take(_, box, permutation):
            return tuple(box.sizes[dim] for dim in permutation or ())
        case Stack(dim, parts):
            inner = shape_of(parts[0])
            return (*inner[:dim], len(parts), *inner[dim:])
        case Concat(dim, parts):
            inner = shape_of(parts[0])
            total = sum(shape_of(part)[dim] for part in parts)
            return (*inner[:dim], total, *inner[dim + 1 :])
        case WeightedSum(terms):
            return shape_of(terms[0][1])
        case LowRank(base):
            return shape_of(base)
        case _:
            assert_never(recipe)


def dtype_of(recipe: Recipe) -> DType:
    """Return the dtype of a recipe's values: of arithmetic float32, else what the tensors have."""
    match recipe:
        case Take(entry):
            return entry.dtype
        case Stack(_, parts) | Concat(_, parts):
            return dtype_of(parts[0])
        case WeightedSum() | LowRank():
            return BY_NAME["float32"]
        case _:
            assert_never(recipe)
