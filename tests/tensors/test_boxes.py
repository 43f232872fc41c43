"""Boxes against the obvious: a count array that numpy paints, one element at a time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from numpy.typing import NDArray

from unshard.tensors.boxes import (
    Box,
    Ints,
    distinct,
    find_gap,
    is_row_major,
    row_major_strides,
)

Shape = tuple[int, ...]
Tiling = tuple[Shape, list[Box]]


def columns(boxes: list[Box], ndim: int) -> tuple[Ints, Ints]:
    offsets = np.array([box.offsets for box in boxes], dtype=np.int64).reshape(len(boxes), ndim)
    sizes = np.array([box.sizes for box in boxes], dtype=np.int64).reshape(len(boxes), ndim)
    return offsets, sizes


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in zip(box.offsets, box.ends, strict=True))


def paint(boxes: list[Box], shape: Shape) -> NDArray[np.int64]:
    """Count how many boxes hold every element."""
    count = np.zeros(shape, dtype=np.int64)
    for box in boxes:
        count[region(box)] += 1
    return count


def gap_of(boxes: list[Box], shape: Shape) -> tuple[str, Box] | None:
    return find_gap(*columns(boxes, len(shape)), shape)


def assert_gap_is_true(boxes: list[Box], shape: Shape) -> None:
    """Compare find_gap's answer with the painted counts; the boxes must be distinct."""
    count = paint(boxes, shape)
    gap = gap_of(boxes, shape)
    assert (gap is None) == bool((count == 1).all())
    if gap is None:
        return
    kind, where = gap
    assert where.volume > 0
    there = count[region(where)]
    assert there.size == where.volume
    assert (there == 0).all() if kind == "hole" else (there > 1).all()


shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)


def boxes_in(shape: Shape, *, min_size: int) -> SearchStrategy[Box]:
    def ranges(size: int) -> SearchStrategy[tuple[int, int]]:
        return st.integers(0, size - min_size).flatmap(
            lambda lo: st.tuples(st.just(lo), st.integers(min_size, size - lo))
        )

    return st.tuples(*map(ranges, shape)).map(
        lambda pairs: Box(tuple(lo for lo, _ in pairs), tuple(size for _, size in pairs))
    )


def cut_in_two(box: Box, dim: int, at: int) -> list[Box]:
    sizes, offsets = list(box.sizes), list(box.offsets)
    sizes[dim] = at
    first = Box(box.offsets, tuple(sizes))
    sizes[dim] = box.sizes[dim] - at
    offsets[dim] += at
    return [first, Box(tuple(offsets), tuple(sizes))]


@st.composite
def tilings(draw: DrawFn) -> Tiling:
    """A shape and boxes that cover it exactly: it is cut, and the parts are cut again."""
    shape = draw(shapes)
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 8))):
        which = draw(st.integers(0, len(boxes) - 1))
        wide = [dim for dim, size in enumerate(boxes[which].sizes) if size > 1]
        if wide:
            dim = draw(st.sampled_from(wide))
            at = draw(st.integers(1, boxes[which].sizes[dim] - 1))
            boxes[which : which + 1] = cut_in_two(boxes[which], dim, at)
    return shape, draw(st.permutations(boxes))


@st.composite
def some_boxes(draw: DrawFn, *, min_size: int) -> Tiling:
    """A shape and any boxes in it, which may meet, repeat and leave holes."""
    shape = draw(shapes)
    return shape, draw(st.lists(boxes_in(shape, min_size=min_size), max_size=6))


# Box


def test_a_box_knows_its_volume_and_its_ends() -> None:
    box = Box((1, 4), (2, 3))
    assert (box.volume, box.ends, str(box)) == (6, (3, 7), "[1:3, 4:7]")


def test_a_box_without_dimensions_is_one_element() -> None:
    box = Box.whole(())
    assert (box.volume, box.ends, str(box)) == (1, (), "[]")


def test_the_whole_of_a_shape_begins_at_its_origin() -> None:
    assert Box.whole([2, 0, 3]) == Box((0, 0, 0), (2, 0, 3))


# find_gap


@given(tilings())
def test_an_exact_tiling_has_no_gap(tiling: Tiling) -> None:
    shape, boxes = tiling
    assert gap_of(boxes, shape) is None


@given(tilings(), st.data())
def test_a_missing_box_is_a_hole_inside_it(tiling: Tiling, data: st.DataObject) -> None:
    shape, boxes = tiling
    missing = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
    gap = gap_of(boxes, shape)
    assert gap is not None
    kind, where = gap
    inside = np.zeros(shape, dtype=bool)
    inside[region(missing)] = True
    assert kind == "hole"
    assert where.volume > 0
    assert inside[region(where)].all()


@given(tilings(), st.data())
def test_a_box_laid_over_a_tiling_is_an_overlap(tiling: Tiling, data: st.DataObject) -> None:
    shape, boxes = tiling
    extra = data.draw(boxes_in(shape, min_size=1).filter(lambda box: box not in boxes))
    boxes.insert(data.draw(st.integers(0, len(boxes))), extra)
    gap = gap_of(boxes, shape)
    assert gap is not None
    assert gap[0] == "overlap"
    assert_gap_is_true(boxes, shape)


@given(tilings(), st.data())
def test_a_shifted_box_leaves_a_gap_that_is_real(tiling: Tiling, data: st.DataObject) -> None:
    shape, boxes = tiling
    which = data.draw(st.integers(0, len(boxes) - 1))
    sizes = boxes[which].sizes
    places = [st.integers(0, full - size) for full, size in zip(shape, sizes, strict=True)]
    boxes[which] = Box(data.draw(st.tuples(*places)), sizes)
    assert_gap_is_true(list(dict.fromkeys(boxes)), shape)


@given(some_boxes(min_size=1))
def test_the_gap_among_any_boxes_is_real(given_boxes: Tiling) -> None:
    shape, boxes = given_boxes
    assert_gap_is_true(list(dict.fromkeys(boxes)), shape)


def test_an_overlap_ends_where_the_inner_box_ends() -> None:
    boxes = [Box((0,), (10,)), Box((2,), (3,))]
    assert gap_of(boxes, (10,)) == ("overlap", Box((2,), (3,)))


def test_a_box_that_reaches_past_the_shape_is_found() -> None:
    assert gap_of([Box((0,), (4,))], (3,)) == ("overlap", Box((3,), (1,)))


def test_boxes_past_the_shape_are_found_where_several_dimensions_are_cut() -> None:
    boxes = [Box((row, col), (1, 2)) for row in range(3) for col in (0, 2)]
    assert gap_of(boxes, (3, 4)) is None
    assert gap_of(boxes, (2, 4)) == ("overlap", Box((2, 0), (1, 4)))


def test_a_box_of_full_size_that_does_not_begin_at_the_origin_is_found() -> None:
    assert gap_of([Box((1,), (3,))], (3,)) == ("hole", Box((0,), (1,)))


def test_a_hole_reaches_as_far_as_nothing_is() -> None:
    """Row 1 is missing whole, although rows 0 and 2 are cut in two."""
    boxes = [Box((row, col), (1, 2)) for row in (0, 2) for col in (0, 2)]
    assert gap_of(boxes, (3, 4)) == ("hole", Box((1, 0), (1, 4)))


def test_no_boxes_leave_everything_a_hole() -> None:
    assert gap_of([], (2, 3)) == ("hole", Box((0, 0), (2, 3)))


def test_no_box_leaves_the_one_element_of_a_0d_tensor_a_hole() -> None:
    assert gap_of([], ()) == ("hole", Box((), ()))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 0, 2)])
def test_an_empty_tensor_needs_no_boxes(shape: Shape) -> None:
    assert gap_of([], shape) is None


def test_a_grid_of_many_boxes_is_checked_along_every_dimension() -> None:
    side = 60
    boxes = [Box((row, col), (1, 1)) for row in range(side) for col in range(side)]
    assert gap_of(boxes, (side, side)) is None
    del boxes[17 * side + 23]
    assert gap_of(boxes, (side, side)) == ("hole", Box((17, 23), (1, 1)))


# distinct


def first_of_equal(boxes: list[Box]) -> list[int]:
    first: dict[Box, int] = {}
    for row, box in enumerate(boxes):
        if box.volume:
            first.setdefault(box, row)
    return sorted(first.values())


@given(some_boxes(min_size=0), st.data())
def test_distinct_keeps_the_first_of_equal_boxes(given_boxes: Tiling, data: st.DataObject) -> None:
    shape, boxes = given_boxes
    boxes += data.draw(st.lists(st.sampled_from(boxes), max_size=6)) if boxes else []
    boxes = data.draw(st.permutations(boxes))
    assert distinct(*columns(boxes, len(shape))).tolist() == first_of_equal(boxes)


def test_boxes_of_equal_sizes_at_other_offsets_are_distinct() -> None:
    boxes = [Box((0, 1), (2, 2)), Box((1, 0), (2, 2)), Box((0, 1), (2, 2))]
    assert distinct(*columns(boxes, 2)).tolist() == [0, 1]


def test_replicas_of_a_0d_tensor_are_one() -> None:
    assert distinct(*columns([Box((), ())] * 3, 0)).tolist() == [0]


@given(tilings(), st.data())
def test_a_tiling_with_replicas_and_empty_boxes_is_whole_once_distinct(
    tiling: Tiling, data: st.DataObject
) -> None:
    shape, boxes = tiling
    boxes += data.draw(st.lists(st.sampled_from(boxes), max_size=4))
    boxes += [Box(shape, (0,) * len(shape))] if shape else []
    offsets, sizes = columns(data.draw(st.permutations(boxes)), len(shape))
    rows = distinct(offsets, sizes)
    assert find_gap(offsets[rows], sizes[rows], shape) is None


# strides


@given(shapes)
def test_row_major_strides_are_numpys(shape: Shape) -> None:
    array = np.empty(shape, dtype=np.int64)
    assert row_major_strides(shape) == tuple(step // array.itemsize for step in array.strides)


def test_an_empty_dimension_counts_as_one_in_strides_as_torch_has_it() -> None:
    assert row_major_strides((2, 0, 3)) == (3, 3, 1)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), max_size=4),
)
def test_elements_are_row_major_where_numpy_says_so(dims: list[tuple[int, int]]) -> None:
    sizes, strides = [size for size, _ in dims], [step for _, step in dims]
    storage = np.empty(256, dtype=np.int64)
    view = np.lib.stride_tricks.as_strided(storage, sizes, [8 * step for step in strides])
    assert is_row_major(sizes, strides) == view.flags.c_contiguous


@given(shapes)
def test_row_major_strides_are_row_major(shape: Shape) -> None:
    assert is_row_major(shape, row_major_strides(shape))


def test_strides_of_single_elements_do_not_matter() -> None:
    assert is_row_major((1, 4, 1), (99, 1, 77))


def test_a_transposed_matrix_is_not_row_major() -> None:
    assert not is_row_major((2, 3), (1, 2))
