"""Plans: which operations make a tensor, and how they are divided into units of work."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sources import COPYING, Sources, grid
from unshard.containers.chunks import chunk_part
from unshard.containers.open_files import OpenFiles
from unshard.convert.outputs import ConvertedTensor
from unshard.convert.recipes import take
from unshard.plan import planner, work
from unshard.plan.layout import lay_out
from unshard.plan.operations import Cast, CopyRange, Gather, Operation, Plan
from unshard.plan.planner import LONG_RUN, make_plan
from unshard.plan.work import Tile, Unit, split_into_units, units_by_file
from unshard.read.zero.flat import FlatCuts, FlatRun
from unshard.tensors.boxes import Box, row_major_strides
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.chunk_rows import ChunkRows
from unshard.tensors.dtypes import BY_NAME

PATHS = tuple(Path(f"rank{n}") for n in range(4))
WHOLE = 10**15

Shape = tuple[int, ...]
Chunk = tuple[Shape, Shape, int, int]  # offsets, sizes, file, start


def entry(
    name: str,
    dtype: str,
    shape: Shape,
    chunks: Sequence[Chunk],
    strides: Shape | None = None,
) -> TensorEntry:
    rows = ChunkRows(len(shape))
    for offsets, sizes, file, start in chunks:
        rows.add(
            rank=file,
            file=file,
            start=start,
            itemsize=BY_NAME[dtype].itemsize,
            offsets=offsets,
            sizes=sizes,
            strides=strides or row_major_strides(sizes),
        )
    return TensorEntry(name, BY_NAME[dtype], shape, rows.table(PATHS))


def rows_of(name: str, dtype: str, heights: Sequence[int], width: int) -> TensorEntry:
    """Return a matrix cut along dimension 0, each chunk at byte 0 of the next file."""
    tops = [sum(heights[:n]) for n in range(len(heights))]
    chunks = [((tops[n], 0), (height, width), n, 0) for n, height in enumerate(heights)]
    return entry(name, dtype, (sum(heights), width), chunks)


def plan_of(*entries: TensorEntry, to: str | None = None, max_shard_size: int = WHOLE) -> Plan:
    outputs = [
        ConvertedTensor(e.fqn, e.dtype if to is None else BY_NAME[to], take(e)) for e in entries
    ]
    return make_plan(lay_out(outputs, max_shard_size))


def operations(*entries: TensorEntry, to: str | None = None) -> list[Operation]:
    return list(plan_of(*entries, to=to).operations())


def copies(*entries: TensorEntry) -> list[CopyRange]:
    """Return the plan's copies, with targets counted from the start of the tensor data."""
    plan = plan_of(*entries)
    start = len(plan.layout.files[0].header)
    return [replace(copy, target=copy.target - start) for copy in all_copies(plan.operations())]


def all_copies(units: Iterable[Operation | Unit]) -> list[CopyRange]:
    found = []
    for unit in units:
        assert isinstance(unit, CopyRange)
        found.append(unit)
    return found


def kinds(*entries: TensorEntry, to: str | None = None) -> list[type[Operation]]:
    return [type(operation) for operation in operations(*entries, to=to)]


@pytest.fixture
def every_run_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "LONG_RUN", 1)


all_runs_long = pytest.mark.usefixtures("every_run_is_long")


# copy or tiles


def test_runs_are_copied_from_the_length_on_that_is_called_long() -> None:
    long = entry("w", "uint8", (LONG_RUN,), [((0,), (LONG_RUN,), 0, 0)])
    short = entry("w", "uint8", (LONG_RUN - 1,), [((0,), (LONG_RUN - 1,), 0, 0)])
    assert kinds(long) == [CopyRange]
    assert kinds(short) == [Gather]


def test_the_length_of_a_run_is_counted_in_bytes() -> None:
    elements = LONG_RUN // 2
    assert kinds(entry("w", "int16", (elements,), [((0,), (elements,), 0, 0)])) == [CopyRange]


@all_runs_long
def test_a_cast_goes_through_memory_however_long_its_runs() -> None:
    (cast,) = operations(rows_of("w", "float32", [2, 2], 8), to="bfloat16")
    assert isinstance(cast, Cast)
    assert (cast.source.dtype, cast.to) == (BY_NAME["float32"], BY_NAME["bfloat16"])


@all_runs_long
def test_a_cast_to_the_dtype_that_is_stored_is_a_copy() -> None:
    assert kinds(rows_of("w", "bfloat16", [4], 8), to="bfloat16") == [CopyRange]


@all_runs_long
def test_chunks_of_odd_strides_go_through_memory() -> None:
    transposed = entry("w", "uint8", (4, 5), [((0, 0), (4, 5), 0, 0)], strides=(1, 4))
    assert kinds(transposed) == [Gather]


@pytest.mark.parametrize("long_run", [1, LONG_RUN])
def test_compressed_chunks_are_not_read_as_if_they_were_plain(
    monkeypatch: pytest.MonkeyPatch, long_run: int
) -> None:
    """No executor decompresses: copying such chunks would write compressed bytes as weights."""
    monkeypatch.setattr(planner, "LONG_RUN", long_run)
    compressed = rows_of("w", "uint8", [2, 2], 8)
    compressed.chunks.compressed[1] = True
    (gather,) = operations(compressed)
    assert isinstance(gather, Gather)
    with OpenFiles(os.O_RDONLY, limit=1) as files, pytest.raises(RuntimeError, match="inflate"):
        chunk_part(gather.source.chunks, 1, Box((0, 0), (2, 8)), np.dtype("u1"), files)


@pytest.mark.parametrize("shape", [(0,), (0, 8), (8, 0)])
def test_an_empty_tensor_needs_no_operation(shape: Shape) -> None:
    assert operations(entry("w", "float32", shape, [])) == []


@all_runs_long
def test_a_0d_tensor_is_one_run() -> None:
    (copy,) = copies(entry("w", "int64", (), [((), (), 2, 96)]))
    assert copy == CopyRange(0, 0, PATHS[2], 96, 8, 1, 8)


# copied runs


@all_runs_long
def test_a_chunk_of_whole_rows_is_one_run() -> None:
    found = copies(rows_of("w", "float32", [3, 2], 5))
    assert [(c.target, c.source, c.start, c.length, c.count) for c in found] == [
        (0, PATHS[0], 0, 60, 1),
        (60, PATHS[1], 0, 40, 1),
    ]


@all_runs_long
def test_a_chunk_of_columns_is_a_run_per_row_at_even_distances() -> None:
    halves = [((0, 0), (3, 4), 0, 10), ((0, 4), (3, 2), 1, 20)]
    assert copies(entry("w", "int16", (3, 6), halves)) == [
        CopyRange(0, 0, PATHS[0], 10, length=8, count=3, target_stride=12),
        CopyRange(0, 8, PATHS[1], 20, length=4, count=3, target_stride=12),
    ]


@all_runs_long
def test_a_chunk_cut_along_the_first_and_a_later_dimension_is_evenly_spaced() -> None:
    chunks = [((2 * n, 0, 3 * m), (2, 3, 3), n, 100 * m) for n in range(2) for m in range(2)]
    found = copies(entry("w", "uint8", (4, 3, 6), chunks))
    assert [(c.target, c.start, c.length, c.count, c.target_stride) for c in found] == [
        (0, 0, 3, 6, 6),
        (3, 100, 3, 6, 6),
        (36, 0, 3, 6, 6),
        (39, 100, 3, 6, 6),
    ]


@all_runs_long
def test_a_leading_dimension_of_one_does_not_hide_the_first_that_is_cut() -> None:
    chunks = [((0, 2 * n, 3 * m), (1, 2, 3), n, 100 * m) for n in range(2) for m in range(2)]
    assert kinds(entry("w", "uint8", (1, 4, 6), chunks)) == [CopyRange] * 4


@all_runs_long
def test_a_chunk_whose_runs_are_not_evenly_spaced_goes_through_memory() -> None:
    """Cut along dimensions 1 and 2: the runs step by 6, but by more where dimension 0 steps."""
    chunks = [((0, 2 * n, 3 * m), (2, 2, 3), n, 100 * m) for n in range(2) for m in range(2)]
    assert kinds(entry("w", "uint8", (2, 4, 6), chunks)) == [Gather]


@all_runs_long
def test_every_region_comes_from_the_first_of_its_replicas() -> None:
    chunks = [((0,), (4,), 1, 0), ((4,), (4,), 3, 0), ((0,), (4,), 0, 0), ((4,), (4,), 2, 0)]
    assert [c.source for c in copies(entry("w", "uint8", (8,), chunks))] == [PATHS[1], PATHS[3]]


def test_gathered_regions_come_from_the_first_of_their_replicas() -> None:
    chunks = [((0,), (4,), 1, 0), ((4,), (4,), 3, 0), ((0,), (4,), 0, 0), ((4,), (4,), 2, 0)]
    (gather,) = operations(entry("w", "uint8", (8,), chunks))
    assert isinstance(gather, Gather)
    assert [chunk.source.path for chunk in gather.source.chunks] == [PATHS[1], PATHS[3]]


# coalescing


@all_runs_long
def test_runs_that_follow_on_in_source_and_target_become_one() -> None:
    chunks = [((4,), (4,), 0, 54), ((0,), (4,), 0, 50), ((8,), (2,), 0, 58)]
    (copy,) = copies(entry("w", "uint8", (10,), chunks))
    assert (copy.target, copy.start, copy.length) == (0, 50, 10)


@all_runs_long
def test_pieces_of_a_flattened_tensor_are_a_copy_each() -> None:
    flat = FlatCuts(PATHS)
    runs = [FlatRun(rank, rank, 100 * rank, count) for rank, count in enumerate((11, 11, 8))]
    found = copies(flat.entry("w", BY_NAME["uint8"], (2, 5, 3), runs))
    places = [(one.source.name, one.start, one.target, one.length) for one in found]
    assert places == [("rank0", 0, 0, 11), ("rank1", 100, 11, 11), ("rank2", 200, 22, 8)]
    assert all(one.count == 1 for one in found)


@all_runs_long
def test_tensors_that_follow_on_in_source_and_target_are_copied_as_one() -> None:
    a = entry("a", "uint8", (4,), [((0,), (4,), 0, 50)])
    b = entry("b", "uint8", (6,), [((0,), (6,), 0, 54)])
    (copy,) = copies(b, a)
    assert (copy.target, copy.start, copy.length) == (0, 50, 10)


@all_runs_long
@pytest.mark.parametrize(("file", "start"), [(1, 54), (0, 55), (0, 53), (0, 46)])
def test_runs_from_elsewhere_are_copied_apart(file: int, start: int) -> None:
    chunks = [((0,), (4,), 0, 50), ((4,), (4,), file, start)]
    assert len(copies(entry("w", "uint8", (8,), chunks))) == 2


@all_runs_long
def test_runs_with_a_gap_in_the_target_are_copied_apart() -> None:
    """Between them is a tensor that is made in memory."""
    a = entry("a", "uint8", (4,), [((0,), (4,), 0, 50)])
    b = entry("b", "uint8", (2, 2), [((0, 0), (2, 2), 1, 0)], strides=(1, 2))
    c = entry("c", "uint8", (4,), [((0,), (4,), 0, 54)])
    assert kinds(a, b, c) == [CopyRange, CopyRange, Gather]


@all_runs_long
def test_runs_for_several_files_are_copied_apart() -> None:
    a = entry("a", "uint8", (4,), [((0,), (4,), 0, 50)])
    b = entry("b", "uint8", (4,), [((0,), (4,), 0, 54)])
    plan = plan_of(a, b, max_shard_size=4)
    assert plan.copies["file"].tolist() == [0, 1]


@all_runs_long
def test_chunks_of_several_runs_are_not_joined() -> None:
    halves = [((0, 0), (2, 3), 0, 0), ((0, 3), (2, 3), 0, 3)]
    assert len(copies(entry("w", "uint8", (2, 6), halves))) == 2


# totals


def test_bytes_read_are_what_is_stored_and_bytes_written_are_whole_files() -> None:
    entries = rows_of("a", "float32", [3, 2], 5), rows_of("b", "int64", [4], 2)
    plan = plan_of(*entries, to="bfloat16", max_shard_size=60)
    headers = sum(len(file.header) for file in plan.layout.files)
    assert len(plan.layout.files) == 2
    assert plan.bytes_read == 5 * 5 * 4 + 4 * 2 * 8
    assert plan.bytes_written == headers + 5 * 5 * 2 + 4 * 2 * 2


def test_a_plan_counts_its_operations() -> None:
    long = entry("long", "uint8", (LONG_RUN,), [((0,), (LONG_RUN,), 0, 0)])
    plan = plan_of(long, rows_of("short", "uint8", [2, 2], 8))
    assert len(plan) == len(list(plan.operations())) == 2


# units of work


def moved_bytes(copy: CopyRange) -> list[tuple[int, int]]:
    """Return (source byte, target byte) of every byte that a copy moves."""
    return [
        (copy.start + run * copy.length + byte, copy.target + run * copy.target_stride + byte)
        for run in range(copy.count)
        for byte in range(copy.length)
    ]


def copy_units(plan: Plan) -> list[CopyRange]:
    return all_copies(split_into_units(plan, buffer_bytes=2**20))


@given(
    rows=st.integers(1, 9),
    left=st.integers(1, 9),
    right=st.integers(0, 9),
    limit=st.integers(1, 50),
)
def test_large_copies_are_divided_into_units_that_move_the_same_bytes(
    rows: int, left: int, right: int, limit: int
) -> None:
    parts = [((0, 0), (rows, left), 0, 7), ((0, left), (rows, right), 1, 3)]
    chunks = [part for part in parts if prod(part[1])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "LONG_RUN", 1)
        patch.setattr(work, "_COPY_UNIT", limit)
        plan = plan_of(entry("w", "uint8", (rows, left + right), chunks))
        divided = copy_units(plan)
    whole = [(c.source, *pair) for c in all_copies(plan.operations()) for pair in moved_bytes(c)]
    assert [(c.source, *pair) for c in divided for pair in moved_bytes(c)] == whole
    assert all(unit.size <= limit or unit.count == 1 for unit in divided)


@all_runs_long
def test_one_long_run_is_divided_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_COPY_UNIT", 10)
    divided = copy_units(plan_of(entry("w", "uint8", (25,), [((0,), (25,), 0, 100)])))
    assert [(unit.start, unit.length) for unit in divided] == [(100, 10), (110, 10), (120, 5)]


@pytest.mark.parametrize("strides", [None, (1, 40)])
@pytest.mark.parametrize("to", ["float32", "bfloat16"])
@pytest.mark.parametrize("buffer_bytes", [1, 100, 1000, 10**6])
def test_tiles_cover_a_tensor_once_within_the_buffer(
    strides: Shape | None, to: str, buffer_bytes: int
) -> None:
    tensor = entry("w", "float32", (40, 30), [((0, 0), (40, 30), 0, 0)], strides=strides)
    (operation,) = operations(tensor, to=to)
    count = np.zeros((40, 30), dtype=np.int64)
    for unit in split_into_units(plan_of(tensor, to=to), buffer_bytes=buffer_bytes):
        assert isinstance(unit, Tile)
        assert type(unit.operation) is type(operation)
        read_and_written = 4 * (1 if strides is None else 2) + BY_NAME[to].itemsize
        assert unit.box.volume == 1 or unit.box.volume * read_and_written <= buffer_bytes
        (top, left), (bottom, right) = unit.box.offsets, unit.box.ends
        count[top:bottom, left:right] += 1
    assert (count == 1).all()


def test_the_copies_into_a_file_are_one_part_in_the_order_of_the_file(tmp_path: Path) -> None:
    sources = Sources(tmp_path)
    for number in range(6):
        sources.add(f"t{number}", grid("int8", (6, 4), (3, 1)))
    with COPYING.turned():
        plan = sources.plan(max_shard_size=48)
    work = [(list(copies), list(made)) for copies, made in units_by_file(plan, buffer_bytes=1000)]
    parts = [copies for copies, _ in work]
    assert [made for _, made in work] == [[], [], []]
    assert [{copy.file for copy in part} for part in parts] == [{0}, {1}, {2}]
    for part in parts:
        assert [copy.target for copy in part] == sorted(copy.target for copy in part)
    assert [*chain.from_iterable(parts)] == list(split_into_units(plan, buffer_bytes=1000))


def tile_sizes(strides: Shape | None, buffer_bytes: int) -> set[Shape]:
    tensor = entry("w", "float32", (400, 30), [((0, 0), (400, 30), 0, 0)], strides=strides)
    found = split_into_units(plan_of(tensor), buffer_bytes=buffer_bytes)
    return {unit.box.sizes for unit in found if isinstance(unit, Tile)}


def test_tiles_of_row_major_chunks_are_as_many_whole_rows_as_the_buffer_holds() -> None:
    """4 bytes read and 4 written per element."""
    assert tile_sizes(None, buffer_bytes=8 * 30 * 50) == {(50, 30)}


def test_tiles_of_chunks_of_odd_strides_are_square() -> None:
    """Up to twice 4 bytes read and 4 written per element."""
    assert tile_sizes((1, 400), buffer_bytes=12 * 10 * 10) == {(10, 10)}
