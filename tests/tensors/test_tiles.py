"""Tiles: every element once, none larger than asked for, and contiguous where promised."""

from math import prod

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from unshard.tensors.boxes import Box, is_row_major, row_major_strides, row_tile, square_tile, tiles

Shape = tuple[int, ...]

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
filled = st.lists(st.integers(1, 7), max_size=4).map(tuple)
large = st.lists(st.integers(1, 10**6), max_size=4).map(tuple)
budgets = st.one_of(st.integers(1, 60), st.integers(1, 10**8))


@st.composite
def tiled(draw: st.DrawFn) -> tuple[Shape, Shape]:
    shape = draw(shapes)
    return shape, tuple(draw(st.integers(1, 8)) for _ in shape)


# tiles


@given(tiled())
def test_tiles_hold_every_element_once(case: tuple[Shape, Shape]) -> None:
    shape, tile = case
    count = np.zeros(shape, dtype=np.int64)
    for box in tiles(shape, tile):
        count[tuple(slice(lo, hi) for lo, hi in zip(box.offsets, box.ends, strict=True))] += 1
        assert all(size <= most for size, most in zip(box.sizes, tile, strict=True))
        assert all(end <= size for end, size in zip(box.ends, shape, strict=True))
    assert (count == 1).all()


@given(tiled())
def test_tiles_come_in_row_major_order(case: tuple[Shape, Shape]) -> None:
    offsets = [box.offsets for box in tiles(*case)]
    assert offsets == sorted(offsets)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 2)])
def test_an_empty_tensor_has_no_tiles(shape: Shape) -> None:
    assert list(tiles(shape, row_tile(shape, 10))) == []
    assert list(tiles(shape, square_tile(shape, 10))) == []


def test_a_0d_tensor_is_one_tile() -> None:
    assert row_tile((), 5) == square_tile((), 5) == ()
    assert list(tiles((), ())) == [Box((), ())]


# row_tile


@given(filled, budgets)
def test_row_tiles_are_contiguous_in_the_tensor(shape: Shape, budget: int) -> None:
    tile = row_tile(shape, budget)
    for box in tiles(shape, tile):
        assert is_row_major(box.sizes, row_major_strides(shape))


@given(st.one_of(filled, large), budgets)
def test_row_tiles_are_bounded(shape: Shape, budget: int) -> None:
    assert prod(row_tile(shape, budget)) <= budget


@given(st.one_of(filled, large), budgets)
def test_row_tiles_are_as_large_as_the_budget_allows(shape: Shape, budget: int) -> None:
    """The next larger contiguous tile, one more of the dimension that is cut, is too large."""
    tile = row_tile(shape, budget)
    cut = [dim for dim, size in enumerate(shape) if tile[dim] != size]
    assume(cut)
    grown = list(tile)
    grown[cut[-1]] += 1
    assert prod(grown) > budget


def test_a_row_tile_is_whole_rows_where_they_fit() -> None:
    assert row_tile((100, 8, 4), 70) == (2, 8, 4)


def test_a_row_tile_is_part_of_a_row_where_none_fits() -> None:
    assert row_tile((100, 8, 4), 9) == (1, 2, 4)
    assert row_tile((100, 8, 4), 3) == (1, 1, 3)


# square_tile


@given(st.one_of(filled, large), budgets)
def test_square_tiles_are_bounded_and_fit_the_tensor(shape: Shape, budget: int) -> None:
    tile = square_tile(shape, budget)
    assert prod(tile) <= budget
    assert all(1 <= side <= size for side, size in zip(tile, shape, strict=True))


def test_a_square_tile_is_square() -> None:
    assert square_tile((1000, 1000), 10_000) == (100, 100)


def test_a_square_tile_gives_to_wide_dimensions_what_narrow_ones_leave() -> None:
    assert square_tile((1000, 4), 10_000) == (1000, 4)
    assert square_tile((4, 9000, 9000), 40_000) == (4, 100, 100)


@pytest.mark.parametrize("side", [3, 10, 99, 1000])
def test_a_cube_uses_its_whole_budget(side: int) -> None:
    """The root of a power must not fall short by a rounding error."""
    assert square_tile((5000, 5000, 5000), side**3) == (side, side, side)
