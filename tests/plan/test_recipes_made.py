"""Recipes of every kind, planned and executed, against the same computation in numpy."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from recipe_values import Array, evaluate, filled, moves, whole
from sources import Knobs, Sources, Tensor, merged, tensors, tensors_in
from unshard.convert.outputs import ConvertedTensor
from unshard.convert.recipes import (
    LowRank,
    Recipe,
    WeightedSum,
    cut,
    dtype_of,
    pick,
    shape_of,
    take,
    transpose,
)
from unshard.engines.threads import MIN_BUFFER, Resources, run_plan
from unshard.plan.layout import lay_out
from unshard.plan.planner import make_plan
from unshard.progress import ignore
from unshard.tensors.boxes import Box
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.chunk_rows import ChunkRows
from unshard.tensors.dtypes import BY_NAME, numpy_dtype


def run(recipes: dict[str, Recipe], sources: Sources, to: str | None = None) -> dict[str, bytes]:
    sources.plan()  # writes the files
    outputs = [
        ConvertedTensor(name, BY_NAME[to] if to else dtype_of(recipe), recipe)
        for name, recipe in recipes.items()
    ]
    return tensors_in(merged(make_plan(lay_out(outputs, 10**9)), Resources(2, MIN_BUFFER)))


MOVED = [BY_NAME[name] for name in ("uint8", "float16", "float32", "complex64")]


@given(tensors(MOVED), st.data(), st.sampled_from([1, 64 * 1024]))
def test_a_recipe_that_moves_values_moves_those_of_numpy(
    tensor: Tensor, data: DataObject, long_run: int
) -> None:
    if 0 in tensor.shape:
        return
    with tempfile.TemporaryDirectory() as directory, Knobs(long_run=long_run).turned():
        sources = Sources(Path(directory))
        sources.add("w", tensor)
        recipe = data.draw(moves(sources.entries["w"]))
        expected = evaluate(recipe, sources.values)
        found = run({"out": recipe}, sources)
        assert shape_of(recipe) == expected.shape
        assert found["out"] == np.ascontiguousarray(expected).tobytes()


@st.composite
def parts(draw: st.DrawFn, recipe: Recipe) -> tuple[Recipe, Callable[[Array], Array]]:
    """A part of a recipe's tensor, and how numpy takes it."""
    shape = shape_of(recipe)
    kind = draw(st.sampled_from(["cut", "pick", "transpose"]))
    if kind == "transpose" and len(shape) > 1:
        return transpose(recipe), lambda whole: whole.swapaxes(-1, -2)
    if kind == "pick" and shape:
        index = draw(st.integers(0, shape[0] - 1))
        return pick(recipe, index), lambda whole: whole[index]
    starts = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(
        draw(st.integers(1, size - start)) for start, size in zip(starts, shape, strict=True)
    )
    box = Box(starts, sizes)
    where = tuple(slice(lo, hi) for lo, hi in zip(box.offsets, box.ends, strict=True))
    return cut(recipe, box), lambda whole: np.asarray(whole[where])


@given(tensors(MOVED), st.data(), st.integers(1, 3), st.sampled_from([1, 64 * 1024]))
def test_parts_of_recipes_are_those_of_numpy(
    tensor: Tensor, data: DataObject, depth: int, long_run: int
) -> None:
    if 0 in tensor.shape:
        return
    with tempfile.TemporaryDirectory() as directory, Knobs(long_run=long_run).turned():
        sources = Sources(Path(directory))
        sources.add("w", tensor)
        recipe = data.draw(moves(sources.entries["w"]))
        expected = evaluate(recipe, sources.values)
        for _ in range(depth):
            recipe, taken = data.draw(parts(recipe))
            expected = taken(expected)
        assert shape_of(recipe) == expected.shape
        assert evaluate(recipe, sources.values).tobytes() == expected.tobytes()
        found = run({"out": recipe}, sources)
        assert found["out"] == np.ascontiguousarray(expected).tobytes()


@given(st.data(), st.sampled_from(["mean", "low rank"]))
def test_parts_of_arithmetic_are_those_of_numpy(data: DataObject, kind: str) -> None:
    shapes = {"w": (3, 5, 4), "a": (3, 2, 4), "b": (3, 5, 2)}
    random = np.random.default_rng(0)
    values: dict[str, Array] = {
        name: random.integers(-9, 9, shape).astype(np.float32) for name, shape in shapes.items()
    }
    no_rows = ChunkRows(3).table((Path("f"),))
    w, a, b = (
        take(TensorEntry(name, BY_NAME["float32"], shape, no_rows))
        for name, shape in shapes.items()
    )
    recipe: Recipe = LowRank(w, a, b, 0.5) if kind == "low rank" else WeightedSum(((1, w), (3, w)))
    part, taken = data.draw(parts(recipe))
    expected = taken(evaluate(recipe, values))
    assert shape_of(part) == expected.shape
    assert evaluate(part, values).tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_weighted_sum_is_the_mean_of_numpy(tmp_path: Path, dtype: str, count: int) -> None:
    sources = Sources(tmp_path)
    parts = [filled(sources, f"w{n}", dtype, (37, 11), n) for n in range(count)]
    terms = tuple((1.0, whole(sources, f"w{n}")) for n in range(count))
    found = run({"out": WeightedSum(terms)}, sources, "float32")
    mean = np.stack([part.astype(np.float32) for part in parts]).mean(axis=0)
    assert found["out"] == mean.tobytes()


@given(st.lists(st.floats(0.0078125, 8, width=32), min_size=1, max_size=4), st.integers(0, 99))
def test_weights_count_as_stated(weights: list[float], seed: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        sources = Sources(Path(directory))
        values = {}
        for n in range(len(weights)):
            values[f"w{n}"] = filled(sources, f"w{n}", "float32", (5, 3), seed + n)
        terms = tuple((weight, whole(sources, f"w{n}")) for n, weight in enumerate(weights))
        recipe = WeightedSum(terms)
        found = run({"out": recipe}, sources, "bfloat16")
        expected = evaluate(recipe, values).astype(ml_dtypes.bfloat16)
        assert found["out"] == expected.tobytes()


FLOATS = [BY_NAME[name] for name in ("float64", "float32", "float16", "bfloat16")]


def stated_mean(terms: list[tuple[float, Array]], to: str) -> tuple[bytes, int]:
    """Return a weighted mean, its NaNs those of numpy, and how many finite values it loses."""
    total = np.zeros(terms[0][1].shape, np.float32)
    with np.errstate(all="ignore"):
        for weight, values in terms:
            total += np.float32(weight) * values.astype(np.float32)
        total = np.asarray(total / np.float32(sum(weight for weight, _ in terms)))
        total[np.isnan(total)] = np.nan
        rounded = total.astype(numpy_dtype(BY_NAME[to]))
        finite = [np.isfinite(values.astype(np.float32)) for _, values in terms]
    return rounded.tobytes(), int((~np.isfinite(rounded) & np.logical_and.reduce(finite)).sum())


@given(
    st.lists(st.tuples(st.sampled_from([1.0, 0.1, -2.5]), tensors(FLOATS)), min_size=1, max_size=3),
    st.sampled_from([dtype.name for dtype in FLOATS]),
    st.integers(1, 200),
    st.sampled_from([1, 24, 256 * 1024]),
    st.integers(0, 9),
)
def test_sums_of_any_bits_in_any_chunks_are_as_stated(
    drawn: list[tuple[float, Tensor]], to: str, tile_bytes: int, block: int, seed: int
) -> None:
    """The bits are random: NaNs, infinities and denormals among them."""
    shape = drawn[0][1].shape
    assume(0 not in shape and abs(sum(weight for weight, _ in drawn)) > 0)
    knobs = Knobs(tile_bytes=tile_bytes, block=block)
    with tempfile.TemporaryDirectory() as directory, knobs.turned():
        sources = Sources(Path(directory), seed=seed)
        terms: list[tuple[float, Array]] = []
        for weight, tensor in drawn:
            again = tensor if tensor.shape == shape else replace(drawn[0][1], dtype=tensor.dtype)
            name = f"w{len(terms)}"
            sources.add(name, again)
            terms.append((weight, sources.values[name].view(numpy_dtype(again.dtype))))
        sources.plan()  # writes the files
        parts = [(weight, whole(sources, f"w{n}")) for n, (weight, _) in enumerate(terms)]
        outputs = [ConvertedTensor("out", BY_NAME[to], WeightedSum(tuple(parts)))]
        plan = make_plan(lay_out(outputs, 10**9))
        lost = run_plan(plan, Path(directory, "out"), Resources(2, MIN_BUFFER), ignore)
        made = {"out": Path(directory, "out", "model.safetensors").read_bytes()}
        assert (tensors_in(made)["out"], lost.total()) == stated_mean(terms, to)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_sum_of_many_blocks_is_the_mean_of_numpy(tmp_path: Path, dtype: str) -> None:
    sources = Sources(tmp_path)
    parts = [filled(sources, f"w{n}", dtype, (701, 999), n) for n in range(3)]
    terms = tuple((1.0, whole(sources, f"w{n}")) for n in range(3))
    found = run({"out": WeightedSum(terms)}, sources, "bfloat16")
    mean = np.stack([part.astype(np.float32) for part in parts]).mean(axis=0)
    assert found["out"] == mean.astype(ml_dtypes.bfloat16).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(300, 700), (1, 5), (129, 513), (3, 20, 30)])
def test_a_low_rank_update_is_that_of_numpy(
    tmp_path: Path, dtype: str, shape: tuple[int, ...]
) -> None:
    sources, rank = Sources(tmp_path), 8
    base = filled(sources, "w", dtype, shape, 0)
    a = filled(sources, "a", dtype, (*shape[:-2], rank, shape[-1]), 1)
    b = filled(sources, "b", dtype, (*shape[:-1], rank), 2)
    recipe = LowRank(whole(sources, "w"), whole(sources, "a"), whole(sources, "b"), 0.5)
    found = np.frombuffer(run({"out": recipe}, sources, "float32")["out"], np.float32)
    expected = evaluate(recipe, {"w": base, "a": a, "b": b}).astype(np.float32)
    assert prod(shape) == found.size
    assert np.abs(found.reshape(shape) - expected).max() < 4e-6


def test_a_low_rank_update_does_not_depend_on_the_settings(tmp_path: Path) -> None:
    sources = Sources(tmp_path)
    for name, shape in {"w": (400, 900), "a": (16, 900), "b": (400, 16)}.items():
        filled(sources, name, "float32", shape, len(name))
    sources.plan()
    recipe = LowRank(whole(sources, "w"), whole(sources, "a"), whole(sources, "b"), 2.0)
    plan = make_plan(lay_out([ConvertedTensor("out", BY_NAME["bfloat16"], recipe)], 10**9))
    assert merged(plan, Resources(1, MIN_BUFFER)) == merged(plan, Resources(3, 64_000_000))
