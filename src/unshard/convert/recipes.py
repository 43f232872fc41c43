"""Recipes: how to make an output tensor from checkpoint tensors. A closed union, run elsewhere.

Shapes are in elements. A recipe's dtype is the dtype of its values before the output's cast.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, assert_never

from unshard.errors import ConversionError
from unshard.tensors.boxes import Box
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.dtypes import BY_NAME, DType

BLOCK = 128
"""Rows and columns of a block FP8 block; each block has a scale."""


class Take(NamedTuple):
    """Elements of a tensor, with its dimensions permuted afterwards.

    Attributes:
        entry: the tensor.
        box: first element and number of elements in each dimension.
        permutation: the dimensions in their new order; None to keep the order. Dimensions that it
            leaves out have size 1 and are dropped.
        steps: distance between elements in each dimension; None for 1.
    """

    entry: TensorEntry
    box: Box
    permutation: tuple[int, ...] | None = None
    steps: tuple[int, ...] | None = None


class Stack(NamedTuple):
    """Parts of equal shape along a new dimension `dim`."""

    dim: int
    parts: tuple["Recipe", ...]


class Concat(NamedTuple):
    """Parts along the dimension `dim`, equal in all other dimensions."""

    dim: int
    parts: tuple["Recipe", ...]


class WeightedSum(NamedTuple):
    """(sum of weight * part) / (sum of weights), in float32, over parts of equal shape."""

    terms: tuple[tuple[float, "Recipe"], ...]


class LowRank(NamedTuple):
    """base + scale * (b @ a), in float32: a LoRA adapter fused into its weight."""

    base: "Recipe"
    a: "Recipe"
    b: "Recipe"
    scale: float


class Quantized(NamedTuple):
    """The float8_e4m3fn elements of a matrix in block FP8; errors show the matrix's `name`."""

    values: "Recipe"
    name: str


class BlockScales(NamedTuple):
    """The float32 scales of a matrix in block FP8, one per block; errors show its `name`."""

    values: "Recipe"
    name: str


class Dequantized(NamedTuple):
    """weight * the scale of its block, in float32: a matrix that is stored in block FP8.

    Blocks have `block` rows and columns; the last blocks may have fewer.
    """

    weight: Take
    scales: Take
    block: tuple[int, int]


Recipe = Take | Stack | Concat | WeightedSum | LowRank | Quantized | BlockScales | Dequantized


def take(entry: TensorEntry) -> Take:
    """Return the recipe for all of a tensor, as it is."""
    return Take(entry, Box.whole(entry.shape))


def shape_of(recipe: Recipe) -> tuple[int, ...]:  # noqa: PLR0911 (a case each)
    """Return the shape that a recipe makes."""
    match recipe:
        case Take(_, box, None):
            return box.sizes
        case Take(_, box, permutation):
            return tuple(map(box.sizes.__getitem__, permutation or ()))
        case Stack(dim, parts):
            inner = shape_of(parts[0])
            return (*inner[:dim], len(parts), *inner[dim:])
        case Concat(dim, parts):
            inner = shape_of(parts[0])
            total = sum(shape_of(part)[dim] for part in parts)
            return (*inner[:dim], total, *inner[dim + 1 :])
        case WeightedSum(terms):
            return shape_of(terms[0][1])
        case LowRank(values) | Quantized(values) | Dequantized(values):
            return shape_of(values)
        case BlockScales(values):
            return tuple(-(-size // BLOCK) for size in shape_of(values))
        case _:
            assert_never(recipe)


def dtype_of(recipe: Recipe) -> DType:
    """Return the dtype of a recipe's values: float32 for arithmetic, else the stored dtype."""
    match recipe:
        case Take(entry):
            return entry.dtype
        case Stack(_, parts) | Concat(_, parts):
            return dtype_of(parts[0])
        case WeightedSum() | LowRank() | BlockScales() | Dequantized():
            return BY_NAME["float32"]
        case Quantized():
            return BY_NAME["float8_e4m3fn"]
        case _:
            assert_never(recipe)


def check_alike(subject: str, recipes: Iterable[Recipe]) -> None:
    """Check that recipes have one shape and dtype.

    Raises:
        ConversionError: they do not; the message begins with `subject`.
    """
    kinds = {(shape_of(recipe), dtype_of(recipe).name) for recipe in recipes}
    if len(kinds) > 1:
        found = " and ".join(f"{dtype} {list(shape)}" for shape, dtype in sorted(kinds))
        raise ConversionError(f"{subject} differ in shape or dtype", found=found)


def takes(recipe: Recipe) -> Iterator[Take]:
    """Yield all `Take`s in a recipe, in order; the base of arithmetic comes first."""
    match recipe:
        case Take():
            yield recipe
            parts: tuple[Recipe, ...] = ()
        case Stack(_, parts) | Concat(_, parts):
            pass
        case WeightedSum(terms):
            parts = tuple(part for _, part in terms)
        case LowRank(base, a, b):
            parts = (base, a, b)
        case Quantized(values) | BlockScales(values):
            parts = (values,)
        case Dequantized(weight, scales):
            parts = (weight, scales)
        case _:
            assert_never(recipe)
    for part in parts:
        yield from takes(part)


def stored_dtype(recipe: Recipe) -> DType:
    """Return the output's dtype without a cast: that of the first tensor, float32 for block FP8."""
    if isinstance(recipe, Dequantized):
        return dtype_of(recipe)
    return next(takes(recipe)).entry.dtype


def cut(recipe: Recipe, box: Box) -> Recipe:
    """Return the part of a recipe's tensor inside a box, which must not be empty."""
    match recipe:
        case Take(entry, inner, permutation, steps):
            order = range(len(inner.sizes)) if permutation is None else permutation
            offsets, sizes = list(inner.offsets), list(inner.sizes)
            for dim, start, size in zip(order, box.offsets, box.sizes, strict=True):
                offsets[dim] += start if steps is None else start * steps[dim]
                sizes[dim] = size
            return Take(entry, Box(tuple(offsets), tuple(sizes)), permutation, steps)
        case Stack(dim, parts):
            others = [at for at in range(len(box.sizes)) if at != dim]
            rest = Box(*(tuple(axis[at] for at in others) for axis in (box.offsets, box.sizes)))
            chosen = parts[box.offsets[dim] : box.ends[dim]]
            return Stack(dim, tuple(cut(part, rest) for part in chosen))
        case Concat(dim, parts):
            return _cut_concat(dim, parts, box)
        case WeightedSum(terms):
            return WeightedSum(tuple((weight, cut(part, box)) for weight, part in terms))
        case LowRank(base, a, b, scale):
            inner_size = shape_of(a)[-2]
            rows = _narrowed(box, -1, 0, inner_size)
            columns = _narrowed(box, -2, 0, inner_size)
            return LowRank(cut(base, box), cut(a, columns), cut(b, rows), scale)
        case Quantized() | BlockScales() | Dequantized():
            raise _in_blocks(recipe)
        case _:
            assert_never(recipe)


def pick(recipe: Recipe, index: int) -> Recipe:  # noqa: PLR0911 (a case each)
    """Return the part at one index of the first dimension, without that dimension.

    A `LowRank` must have at least three dimensions, so that the first is a batch.
    """
    match recipe:
        case Take(entry, inner, permutation, steps):
            first, *rest = range(len(inner.sizes)) if permutation is None else permutation
            skip = index if steps is None else index * steps[first]
            at = _narrowed(inner, first, inner.offsets[first] + skip, 1)
            return Take(entry, at, tuple(rest), steps)
        case Stack(dim, parts):
            if dim == 0:
                return parts[index]
            return Stack(dim - 1, tuple(pick(part, index) for part in parts))
        case Concat(dim, parts):
            if dim == 0:  # a single row is inside one part
                row = _narrowed(Box.whole(shape_of(recipe)), 0, index, 1)
                return pick(cut(recipe, row), 0)
            return Concat(dim - 1, tuple(pick(part, index) for part in parts))
        case WeightedSum(terms):
            return WeightedSum(tuple((weight, pick(part, index)) for weight, part in terms))
        case LowRank(base, a, b, scale):
            return LowRank(pick(base, index), pick(a, index), pick(b, index), scale)
        case Quantized() | BlockScales() | Dequantized():
            raise _in_blocks(recipe)
        case _:
            assert_never(recipe)


def transpose(recipe: Recipe) -> Recipe:
    """Return a recipe's tensor with its last two dimensions swapped."""
    last = len(shape_of(recipe)) - 1
    exchanged = {last: last - 1, last - 1: last}
    match recipe:
        case Take(entry, box, permutation, steps):
            *rest, before, after = range(len(box.sizes)) if permutation is None else permutation
            return Take(entry, box, (*rest, after, before), steps)
        case Stack(dim, parts) if dim < last - 1:
            return Stack(dim, tuple(transpose(part) for part in parts))
        case Stack(dim, parts):
            return Stack(exchanged[dim], parts)
        case Concat(dim, parts):
            return Concat(exchanged.get(dim, dim), tuple(transpose(part) for part in parts))
        case WeightedSum(terms):
            return WeightedSum(tuple((weight, transpose(part)) for weight, part in terms))
        case LowRank(base, a, b, scale):
            return LowRank(transpose(base), transpose(b), transpose(a), scale)
        case Quantized() | BlockScales() | Dequantized():
            raise _in_blocks(recipe)
        case _:
            assert_never(recipe)


def _in_blocks(recipe: Quantized | BlockScales | Dequantized) -> ConversionError:
    name = recipe.weight.entry.fqn if isinstance(recipe, Dequantized) else recipe.name
    return ConversionError(
        f"tensor {name}: block FP8 cannot be cut or transposed",
        hint="write it in another dtype first: ⟦+--dtype bfloat16⟧ ⟦+--names training⟧",
    )


def _cut_concat(dim: int, parts: tuple[Recipe, ...], box: Box) -> Recipe:
    """Return the parts inside a box, concatenated if there are several."""
    cuts, start = [], 0
    for part in parts:
        end = start + shape_of(part)[dim]
        low, high = max(start, box.offsets[dim]), min(end, box.ends[dim])
        if low < high:
            cuts.append(cut(part, _narrowed(box, dim, low - start, high - low)))
        start = end
    return cuts[0] if len(cuts) == 1 else Concat(dim, tuple(cuts))


def _narrowed(box: Box, dim: int, offset: int, size: int) -> Box:
    """Return a box with another range in one dimension."""
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim], sizes[dim] = offset, size
    return Box(tuple(offsets), tuple(sizes))
