"""Placements against brute force: an array of indices, cut as torch cuts it, cut by cut."""

from itertools import permutations, product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from numpy.typing import NDArray

from unshard.tensors import placements as module
from unshard.tensors.placements import (
    DeviceMesh,
    Partial,
    Placement,
    PlacementError,
    Replicate,
    Shard,
    Sharding,
    StridedShard,
    place,
)

Shape = tuple[int, ...]
Order = tuple[tuple[int, tuple[int, ...]], ...]
Indices = NDArray[np.int64]


def sharding(
    mesh: Shape, at: Shape, placements: tuple[Placement, ...], order: Order | None = None
) -> Sharding:
    return Sharding(DeviceMesh(mesh, None, at), placements, order)


def coordinates_of(mesh: Shape) -> list[Shape]:
    return list(product(*(range(size) for size in mesh)))


def indices_of(shape: Shape) -> Indices:
    return np.arange(prod(shape), dtype=np.int64).reshape(shape)


def cut(array: Indices, dim: int, parts: int, index: int) -> Indices:
    """Return piece `index` of torch.chunk along `dim`; empty where torch.chunk has none."""
    step = -(-array.shape[dim] // parts)
    return array[(slice(None),) * dim + (slice(index * step, (index + 1) * step),)]


def held(shape: Shape, sharding: Sharding) -> Indices:
    """Return the local tensor that `place` describes, put together of its pieces."""
    local, pieces = place(shape, sharding)
    full = indices_of(shape)
    out = np.full(local, -1, dtype=np.int64)
    for piece in pieces:
        where = zip(piece.local_offsets, piece.box.sizes, strict=True)
        into = tuple(slice(lo, lo + size) for lo, size in where)
        taken = zip(piece.box.offsets, piece.box.ends, strict=True)
        out[into] = full[tuple(slice(lo, hi) for lo, hi in taken)]
    return out


def assert_holds(shape: Shape, sharding: Sharding, expected: Indices) -> None:
    assert place(shape, sharding)[0] == expected.shape
    assert held(shape, sharding).tolist() == expected.tolist()


shapes = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)
meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@st.composite
def shard_cases(draw: DrawFn) -> tuple[Shape, Shape, tuple[Placement, ...]]:
    """A shape, a mesh, and Shard or Replicate for every mesh dimension."""
    shape, mesh = draw(shapes), draw(meshes)
    one = st.one_of(st.builds(Shard, st.integers(0, len(shape) - 1)), st.just(Replicate()))
    return shape, mesh, tuple(draw(one) for _ in mesh)


@st.composite
def ordered_cases(draw: DrawFn) -> tuple[int, Shape, tuple[int, ...]]:
    """A size, a mesh, and the order in which its dimensions cut that size."""
    mesh = draw(st.lists(st.integers(1, 4), min_size=2, max_size=3).map(tuple))
    order = draw(st.permutations(range(len(mesh))))
    return draw(st.integers(0, 40)), mesh, tuple(order)


def split_factors(mesh: Shape, order: tuple[int, ...]) -> tuple[Placement, ...]:
    """Encode an order as torch does: the ranks of later mesh dimensions that cut before."""
    placed: list[Placement] = []
    for mesh_dim in range(len(mesh)):
        before = order[: order.index(mesh_dim)]
        factor = prod(mesh[other] for other in before if other > mesh_dim)
        placed.append(Shard(0) if factor == 1 else StridedShard(0, factor))
    return tuple(placed)


def cut_in_order(size: int, mesh: Shape, order: tuple[int, ...], at: Shape) -> Indices:
    array = indices_of((size,))
    for mesh_dim in order:
        array = cut(array, 0, mesh[mesh_dim], at[mesh_dim])
    return array


# Shard and Replicate


@given(shard_cases())
def test_plain_shards_are_cut_left_to_right(
    case: tuple[Shape, Shape, tuple[Placement, ...]],
) -> None:
    shape, mesh, placements = case
    for at in coordinates_of(mesh):
        expected = indices_of(shape)
        for parts, index, placement in zip(mesh, at, placements, strict=True):
            if isinstance(placement, Shard):
                expected = cut(expected, placement.dim, parts, index)
        assert_holds(shape, sharding(mesh, at, placements), expected)


@given(shard_cases())
def test_all_ranks_hold_every_element_once_per_replica(
    case: tuple[Shape, Shape, tuple[Placement, ...]],
) -> None:
    shape, mesh, placements = case
    copies = prod(
        size for size, placement in zip(mesh, placements, strict=True) if placement == Replicate()
    )
    everything = [held(shape, sharding(mesh, at, placements)) for at in coordinates_of(mesh)]
    found = np.sort(np.concatenate([part.reshape(-1) for part in everything]))
    assert found.tolist() == sorted(list(range(prod(shape))) * copies)


@given(st.integers(0, 40), st.integers(1, 12))
def test_one_dimension_is_cut_as_torch_chunk_cuts_it(size: int, ranks: int) -> None:
    chunks = list(torch.arange(size).chunk(ranks))
    chunks += [torch.empty(0, dtype=torch.int64)] * (ranks - len(chunks))
    for rank, chunk in enumerate(chunks):
        assert_holds((size,), sharding((ranks,), (rank,), (Shard(0),)), chunk.numpy())


def test_a_plain_shard_is_one_piece() -> None:
    _, (piece,) = place((10, 4), sharding((4,), (3,), (Shard(0),)))
    assert (piece.box.offsets, piece.box.sizes) == ((9, 0), (1, 4))
    assert piece.local_offsets == (0, 0)


def test_a_rank_without_rows_holds_one_empty_piece() -> None:
    local, (piece,) = place((3, 5), sharding((4,), (3,), (Shard(0),)))
    assert local == (0, 5)
    assert piece.box.volume == 0


def test_a_0d_tensor_is_held_whole_by_every_rank() -> None:
    local, (piece,) = place((), sharding((2, 2), (1, 0), (Replicate(), Replicate())))
    assert (local, piece.box.offsets, piece.box.volume) == ((), (), 1)


# _StridedShard with later mesh dimensions that explain it


@given(ordered_cases())
def test_split_factors_are_decoded_to_the_order_they_encode(
    case: tuple[int, Shape, tuple[int, ...]],
) -> None:
    size, mesh, order = case
    for at in coordinates_of(mesh):
        placed = sharding(mesh, at, split_factors(mesh, order))
        assert_holds((size,), placed, cut_in_order(size, mesh, order, at))


@pytest.mark.parametrize("rows", [12, 18, 36, 11, 7, 2, 0])
@pytest.mark.parametrize("mesh", [(3, 3), (2, 3), (3, 2), (4, 1)])
def test_fsdp_over_tp_cuts_by_tp_first(rows: int, mesh: Shape) -> None:
    placements = (StridedShard(0, mesh[1]), Shard(0))
    for at in coordinates_of(mesh):
        expected = cut(cut(indices_of((rows, 2)), 0, mesh[1], at[1]), 0, mesh[0], at[0])
        assert_holds((rows, 2), sharding(mesh, at, placements), expected)


def test_the_last_of_11_rows_on_nine_ranks_is_on_rank_2_2() -> None:
    """FORMATS 6.3: measured; torch's left-to-right rule says rank (2, 0)."""
    placements = (StridedShard(0, 3), Shard(0))
    rows = [held((11,), sharding((3, 3), at, placements)).tolist() for at in coordinates_of((3, 3))]
    assert rows == [[0, 1], [4, 5], [8], [2, 3], [6, 7], [9], [], [], [10]]


def test_the_order_of_each_tensor_dimension_is_its_own() -> None:
    placements = (StridedShard(0, 2), Shard(1), Shard(0))
    mesh, shape = (2, 3, 2), (6, 7)
    for at in coordinates_of(mesh):
        expected = cut(cut(indices_of(shape), 0, 2, at[2]), 0, 2, at[0])
        expected = cut(expected, 1, 3, at[1])
        assert_holds(shape, sharding(mesh, at, placements), expected)


# a lone _StridedShard


def test_a_lone_strided_shard_of_36_elements_holds_two_segments() -> None:
    """FORMATS 6.4: measured."""
    placed = sharding((9,), (0,), (StridedShard(0, 2),))
    assert held((36,), placed).tolist() == [0, 1, 18, 19]
    _, pieces = place((36,), placed)
    assert [(p.box.offsets, p.box.sizes, p.local_offsets) for p in pieces] == [
        ((0,), (2,), (0,)),
        ((18,), (2,), (2,)),
    ]


@given(st.integers(0, 40), st.integers(1, 6), st.integers(2, 12), st.integers(1, 3))
def test_a_lone_strided_shard_is_a_cut_of_every_part(
    size: int, ranks: int, factor: int, width: int
) -> None:
    for rank in range(ranks):
        full = indices_of((size, width))
        parts = [cut(cut(full, 0, factor, j), 0, ranks, rank) for j in range(factor)]
        placed = sharding((ranks,), (rank,), (StridedShard(0, factor),))
        assert_holds((size, width), placed, np.concatenate(parts))


def test_a_rank_that_a_lone_strided_shard_leaves_nothing_holds_one_empty_piece() -> None:
    local, (piece,) = place((2, 3), sharding((4,), (3,), (StridedShard(0, 2),)))
    assert local == (0, 3)
    assert piece.box.volume == 0


def test_lone_strided_shards_of_two_dimensions_make_pieces_of_both() -> None:
    placements = (StridedShard(0, 2), StridedShard(1, 3))
    mesh, shape = (2, 2), (8, 12)
    for at in coordinates_of(mesh):
        rows = np.concatenate([cut(cut(indices_of(shape), 0, 2, j), 0, 2, at[0]) for j in range(2)])
        parts = [cut(cut(rows, 1, 3, j), 1, 2, at[1]) for j in range(3)]
        assert_holds(shape, sharding(mesh, at, placements), np.concatenate(parts, axis=1))
        assert len(place(shape, sharding(mesh, at, placements))[1]) == 6


def test_a_huge_split_factor_costs_no_more_than_the_dimension_has_elements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pickle may state any factor; it must not decide how long the reader works."""
    cuts = 0
    chunk = module._chunk

    def counted(size: int, parts: int, index: int) -> tuple[int, int]:
        nonlocal cuts
        cuts += 1
        assert cuts < 100, "one cut for each of 10^12 parts"
        return chunk(size, parts, index)

    monkeypatch.setattr(module, "_chunk", counted)
    placed = sharding((2,), (0,), (StridedShard(0, 10**12),))
    assert held((10,), placed).tolist() == list(range(10))


# a stated shard order


@given(ordered_cases().filter(lambda case: list(case[2]) != sorted(case[2])), st.booleans())
def test_a_stated_order_replaces_what_split_factors_say(
    case: tuple[int, Shape, tuple[int, ...]],
    strided: bool,  # noqa: FBT001 (drawn by hypothesis)
) -> None:
    size, mesh, order = case
    other = split_factors(mesh, tuple(reversed(range(len(mesh)))))
    placements = other if strided else (Shard(0),) * len(mesh)
    for at in coordinates_of(mesh):
        placed = sharding(mesh, at, placements, ((0, order),))
        assert_holds((size,), placed, cut_in_order(size, mesh, order, at))


@pytest.mark.parametrize("at", coordinates_of((3, 3)))
def test_the_default_order_leaves_split_factors_in_force(at: Shape) -> None:
    placements = (StridedShard(0, 3), Shard(0))
    stated = sharding((3, 3), at, placements, ((0, (0, 1)),))
    assert place((11,), stated) == place((11,), sharding((3, 3), at, placements))


def test_a_stated_order_of_one_dimension_says_nothing_of_another() -> None:
    placements = (Shard(0), Shard(0), Shard(1))
    at, mesh = (1, 0, 1), (2, 3, 2)
    expected = cut(cut(indices_of((7, 4)), 0, 3, at[1]), 0, 2, at[0])
    placed = sharding(mesh, at, placements, ((0, (1, 0)),))
    assert_holds((7, 4), placed, cut(expected, 1, 2, at[2]))


def test_a_stated_order_may_pass_over_replicas() -> None:
    mesh, at = (2, 2, 3), (1, 0, 2)
    placed = sharding(mesh, at, (Shard(0), Replicate(), Shard(0)), ((0, (2, 0)),))
    assert_holds((13,), placed, cut(cut(indices_of((13,)), 0, 3, 2), 0, 2, 1))


@pytest.mark.parametrize("order", [(1, 0), (2, 1), (2, 1, 0), (2, 0, 0), (0, 1), (0,), (0, 1, 2)])
def test_a_stated_order_of_other_mesh_dimensions_is_refused(order: tuple[int, ...]) -> None:
    """Dimension 0 is cut by mesh dimensions 0 and 2."""
    placed = sharding((2, 2, 2), (0, 0, 0), (Shard(0), Replicate(), Shard(0)), ((0, order),))
    with pytest.raises(PlacementError, match="contradicts the placements"):
        place((8,), placed)


# errors


def test_a_partial_tensor_is_refused() -> None:
    placed = sharding((2, 2), (0, 0), (Shard(0), Partial("sum")))
    with pytest.raises(PlacementError, match=r"Partial\(sum\) is a pending reduction"):
        place((4,), placed)


@pytest.mark.parametrize("at", [(2, 0), (0, 3), (-1, 0)])
def test_coordinates_outside_the_mesh_are_refused(at: Shape) -> None:
    with pytest.raises(PlacementError, match="outside mesh"):
        place((4,), sharding((2, 3), at, (Shard(0), Replicate())))


@pytest.mark.parametrize(
    ("mesh", "at", "placements"),
    [
        ((2, 2), (0, 0), (Shard(0),)),
        ((2,), (0,), (Shard(0), Replicate())),
        ((2, 2), (0,), (Shard(0), Replicate())),
        ((2,), (), (Shard(0),)),
    ],
)
def test_counts_that_do_not_fit_the_mesh_are_refused(
    mesh: Shape, at: Shape, placements: tuple[Placement, ...]
) -> None:
    with pytest.raises(PlacementError, match="do not fit a mesh of shape"):
        place((4,), sharding(mesh, at, placements))


@pytest.mark.parametrize(
    "placement", [Shard(2), Shard(-1), StridedShard(2, 2), StridedShard(-1, 2)]
)
def test_dimensions_outside_the_tensor_are_refused(placement: Placement) -> None:
    with pytest.raises(PlacementError, match="does not fit a tensor of shape"):
        place((4, 4), sharding((2,), (0,), (placement,)))


def test_a_0d_tensor_cannot_be_cut() -> None:
    with pytest.raises(PlacementError, match="does not fit a tensor of shape"):
        place((), sharding((2,), (0,), (Shard(0),)))


@pytest.mark.parametrize(
    "placements",
    [
        (StridedShard(0, 3), Shard(0)),
        (Shard(0), StridedShard(0, 2)),
        (StridedShard(0, 2), StridedShard(0, 2)),
    ],
)
def test_split_factors_that_no_order_meets_are_refused(placements: tuple[Placement, ...]) -> None:
    with pytest.raises(PlacementError, match="no order of cuts of dimension 0"):
        place((8,), sharding((2, 2), (0, 0), placements))


@pytest.mark.parametrize("factor", [0, -2])
def test_a_split_factor_below_one_is_refused(factor: int) -> None:
    with pytest.raises(PlacementError):
        place((8,), sharding((2,), (0,), (StridedShard(0, factor),)))


def test_placements_read_as_torch_prints_them() -> None:
    placed = (Shard(1), StridedShard(0, 4), Replicate(), Partial("avg"))
    assert [str(placement) for placement in placed] == [
        "Shard(1)",
        "_StridedShard(0, split_factor=4)",
        "Replicate()",
        "Partial(avg)",
    ]


def test_every_order_of_three_mesh_dimensions_has_its_own_split_factors() -> None:
    """The encoding used above is one to one, so that decoding it is a fair test."""
    encoded = {split_factors((2, 3, 4), order) for order in permutations(range(3))}
    assert len(encoded) == 6
