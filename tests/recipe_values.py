"""What recipes mean, in numpy, and random ones of tensors in files."""

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from sources import Chunk, Sources, Tensor, row_major
from unshard.convert.recipes import (
    Concat,
    LowRank,
    Recipe,
    Stack,
    Take,
    WeightedSum,
    shape_of,
)
from unshard.tensors.boxes import Box
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.dtypes import BY_NAME, numpy_dtype

Array = NDArray[np.generic]


def evaluate(recipe: Recipe, values: dict[str, Array]) -> Array:
    """Return what a recipe means: the definition, in numpy."""
    match recipe:
        case Take(entry, box, permutation, steps):
            grid = zip(box.offsets, box.sizes, steps or (1,) * len(box.sizes), strict=True)
            where = tuple(slice(lo, lo + (count - 1) * by + 1, by) for lo, count, by in grid)
            part = values[entry.fqn][where]
            if permutation is None:
                return part
            dropped = [dim for dim in range(part.ndim) if dim not in permutation]
            turned: Array = part.transpose(*dropped, *permutation)[(0,) * len(dropped)]
            return turned
        case Stack(dim, parts):
            return np.stack([evaluate(part, values) for part in parts], axis=dim)
        case Concat(dim, parts):
            return np.concatenate([evaluate(part, values) for part in parts], axis=dim)
        case WeightedSum(terms):
            total = np.zeros(shape_of(recipe), np.float32)
            for weight, term in terms:
                total = total + np.float32(weight) * evaluate(term, values).astype(np.float32)
            summed: Array = total / np.float32(sum(weight for weight, _ in terms))
            return summed
        case LowRank(base, a, b, scale):
            left, right = (evaluate(part, values).astype(np.float32) for part in (b, a))
            fused: Array = evaluate(base, values).astype(np.float32) + np.float32(scale) * (
                left @ right
            )
            return fused
        case _:
            raise TypeError("block FP8 has its own tests")


@st.composite
def takes(draw: st.DrawFn, entry: TensorEntry, sizes: tuple[int, ...] | None = None) -> Take:
    """Random elements of a tensor, evenly spaced and permuted."""
    wanted = sizes or tuple(draw(st.integers(1, size)) for size in entry.shape)
    most = [(n - 1) // max(want - 1, 1) for n, want in zip(entry.shape, wanted, strict=True)]
    steps = tuple(draw(st.integers(1, max(by, 1))) for by in most)
    spans = [(want - 1) * by + 1 for want, by in zip(wanted, steps, strict=True)]
    offsets = tuple(
        draw(st.integers(0, size - span)) for size, span in zip(entry.shape, spans, strict=True)
    )
    permutation = draw(st.none() | st.permutations(range(len(wanted))).map(tuple))
    is_box = steps == (1,) * len(steps) and draw(st.booleans())
    turned = permutation if sizes is None else None
    return Take(entry, Box(offsets, wanted), turned, None if is_box else steps)


@st.composite
def moves(draw: st.DrawFn, entry: TensorEntry) -> Recipe:
    """A recipe that moves parts of a tensor."""
    first = draw(takes(entry))
    kind = draw(st.sampled_from(["take", "stack", "concat"]))
    if kind == "take" or not entry.shape:
        return first
    parts = tuple(draw(takes(entry, first.box.sizes)) for _ in range(draw(st.integers(1, 3))))
    if kind == "stack":
        return Stack(draw(st.integers(0, len(entry.shape))), parts)
    inner = Concat(draw(st.integers(0, len(entry.shape) - 1)), parts)
    return Stack(0, (inner, inner)) if draw(st.booleans()) else inner


def filled(
    sources: Sources, name: str, dtype: str, shape: tuple[int, ...], seed: int
) -> NDArray[np.generic]:
    """Add a tensor of normal random values, cut in two along its first dimension."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(numpy_dtype(BY_NAME[dtype]))
    half = shape[0] // 2
    rest = shape[1:]
    boxes = [
        Box((0, *(0 for _ in rest)), (half, *rest)),
        Box((half, *(0 for _ in rest)), (shape[0] - half, *rest)),
    ]
    chunks = tuple(Chunk(box, row_major(box.sizes), n) for n, box in enumerate(boxes) if box.volume)
    bits = values.view(f"u{values.itemsize}")
    sources.add(name, Tensor(BY_NAME[dtype], shape, chunks), bits)
    return values


def whole(sources: Sources, name: str) -> Take:
    entry = sources.entries[name]
    return Take(entry, Box.whole(entry.shape))
