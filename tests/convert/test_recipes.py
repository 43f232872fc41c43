"""What shape and dtype follow from a recipe, against numpy doing the same."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unshard.convert.recipes import LowRank, Stack, Take, WeightedSum, dtype_of, shape_of, take
from unshard.tensors.boxes import Box
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.chunk_rows import ChunkRows
from unshard.tensors.dtypes import BY_NAME


def entry(*shape: int, dtype: str = "bfloat16") -> TensorEntry:
    return TensorEntry("w", BY_NAME[dtype], shape, ChunkRows(len(shape)).table((Path("f"),)))


@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (4, 0, 2)])
def test_taking_a_tensor_takes_all_of_it(shape: tuple[int, ...]) -> None:
    recipe = take(entry(*shape))
    assert recipe.box == Box.whole(shape)
    assert recipe.permutation is None
    assert shape_of(recipe) == shape


def test_a_part_has_the_shape_of_its_box() -> None:
    assert shape_of(Take(entry(8, 6), Box((2, 0), (3, 6)))) == (3, 6)


@given(st.permutations(range(4)))
def test_a_permuted_part_has_numpys_transposed_shape(order: list[int]) -> None:
    recipe = Take(entry(9, 9, 9, 9), Box((0, 0, 0, 0), (2, 3, 4, 5)), tuple(order))
    assert shape_of(recipe) == np.empty((2, 3, 4, 5)).transpose(order).shape


def test_a_permutation_of_no_dimensions_leaves_a_0d_tensor() -> None:
    assert shape_of(Take(entry(), Box((), ()), ())) == ()


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_stack_has_numpys_stacked_shape(dim: int) -> None:
    recipe = Stack(dim, (take(entry(4, 5)),) * 3)
    assert shape_of(recipe) == np.stack([np.empty((4, 5))] * 3, axis=dim).shape


def test_a_stack_of_stacks_has_both_new_dimensions() -> None:
    inner = Stack(0, (take(entry(4, 5)),) * 3)
    assert shape_of(Stack(1, (inner, inner))) == (3, 2, 4, 5)


def test_a_weighted_sum_has_the_shape_of_its_parts() -> None:
    assert shape_of(WeightedSum(((1.0, take(entry(4, 5))), (2.0, take(entry(4, 5)))))) == (4, 5)


def test_one_part_is_enough() -> None:
    part = take(entry(4, 5))
    assert shape_of(Stack(0, (part,))) == (1, 4, 5)
    assert shape_of(WeightedSum(((1.0, part),))) == (4, 5)


def test_a_fused_adapter_has_the_shape_of_its_base() -> None:
    base, a, b = take(entry(6, 5)), take(entry(2, 5)), take(entry(6, 2))
    assert shape_of(LowRank(base, a, b, 0.5)) == (6, 5)


def test_what_is_taken_or_stacked_keeps_its_dtype() -> None:
    part = take(entry(4, dtype="int8"))
    assert dtype_of(part) is BY_NAME["int8"]
    assert dtype_of(Stack(0, (part, part))) is BY_NAME["int8"]


def test_what_is_computed_is_float32() -> None:
    part = take(entry(4, 4, dtype="bfloat16"))
    assert dtype_of(WeightedSum(((1.0, part),))) is BY_NAME["float32"]
    assert dtype_of(LowRank(part, part, part, 1.0)) is BY_NAME["float32"]
    assert dtype_of(Stack(0, (WeightedSum(((1.0, part),)),))) is BY_NAME["float32"]
