"""Basic indexing as integers: numpy's own indexing is the oracle."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, basic_indices
from numpy.typing import NDArray

from unshard.tensors.boxes import Box
from unshard.tensors.selection import Selection, of_box, select

Shape = tuple[int, ...]
shapes = array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=7)


@st.composite
def indexed(draw: st.DrawFn) -> tuple[Shape, Any]:
    shape = draw(shapes)
    return shape, draw(basic_indices(shape, allow_newaxis=True, max_dims=7))


def taken(array: NDArray[np.int64], selection: Selection) -> NDArray[np.int64]:
    """Return what a selection means: the definition, in numpy."""
    grid = np.ix_(
        *(
            [start + step * n for n in range(count)]
            for start, step, count in zip(
                selection.starts, selection.steps, selection.counts, strict=True
            )
        )
    )
    part = np.asarray(array[grid] if array.ndim else array)
    return np.flip(part, selection.turned).reshape(selection.shape)


def counting(shape: Sequence[int]) -> NDArray[np.int64]:
    return np.arange(int(np.prod(shape, dtype=np.int64)), dtype=np.int64).reshape(shape)


@given(indexed())
def test_every_basic_index_takes_what_numpy_takes(case: tuple[Shape, Any]) -> None:
    shape, index = case
    array = counting(shape)
    expected = np.asarray(array[index])
    selection = select(index, shape)
    found = taken(array, selection)
    assert found.shape == selection.shape == expected.shape
    assert (found == expected).all()


@given(indexed())
def test_ranges_rise_and_are_inside(case: tuple[Shape, Any]) -> None:
    shape, index = case
    one = select(index, shape)
    for size, start, step, count in zip(shape, one.starts, one.steps, one.counts, strict=True):
        assert step >= 1
        assert start >= 0
        assert count == 0 or start + (count - 1) * step < size


@pytest.mark.parametrize(
    "index",
    [
        np.int64(2),
        np.array(-1),
        slice(None, None, -3),
        slice(10**30),
        slice(5, 2),
        slice(np.int64(1), None),
        (slice(None), -1),
        (None, ..., None),
        (1, None, 2),
        (),
        ...,
        None,
    ],
)
def test_odd_forms_of_an_index_mean_what_they_mean_to_numpy(index: Any) -> None:
    array = counting((4, 5))
    assert (taken(array, select(index, (4, 5))) == array[index]).all()


def shown(index: object) -> str:
    return str(index).replace("/", "")


@pytest.mark.parametrize(
    "index", [4, -5, (0, 5), (0, -6), (0, 0, 0), (..., ...), (..., 1, 2, 3), 1.0, "a"], ids=shown
)
def test_what_numpy_refuses_is_refused_with_its_error(index: Any) -> None:
    with pytest.raises(IndexError):
        _ = counting((4, 5))[index]
    with pytest.raises(IndexError):
        select(index, (4, 5))


@pytest.mark.parametrize("index", [True, False, [0, 1], np.array([1]), np.bool_(1), (0, [1])])
def test_what_is_not_a_basic_index_is_refused(index: Any) -> None:
    with pytest.raises(IndexError, match=r"only integers, slices, \.\.\. and None"):
        select(index, (4, 5))


def test_a_step_of_zero_is_the_error_of_python() -> None:
    with pytest.raises(ValueError, match="step cannot be zero"):
        select(slice(None, None, 0), (4,))


def test_errors_say_what_was_expected() -> None:
    with pytest.raises(IndexError, match="index 7 is out of range for dimension 1 of size 5"):
        select((0, 7), (4, 5))
    with pytest.raises(IndexError, match="too many indices: 3 for a tensor of 2 dimensions"):
        select((0, 0, 0), (4, 5))


def test_a_box_is_a_selection_of_its_own_shape() -> None:
    box = Box((1, 2), (2, 3))
    assert of_box(box) == select((slice(1, 3), slice(2, 5)), (4, 5))
