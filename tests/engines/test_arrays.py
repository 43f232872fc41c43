"""Tensors and parts of them made in memory: numpy's indexing is the oracle; threads, closing."""

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier, Event, Lock
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import basic_indices

from recipe_values import filled, moves, whole
from sources import ANY_DTYPE, Sources, Tensor, column_major, grid, merged, tensors, tensors_in
from unshard.containers import open_files, strided
from unshard.containers.open_files import AT_ONCE
from unshard.convert.outputs import ConvertedTensor
from unshard.convert.recipes import LowRank, Recipe, WeightedSum, dtype_of, shape_of, take
from unshard.engines import arrays
from unshard.engines.arrays import TILE_BYTES, TensorReader
from unshard.engines.threads import MIN_BUFFER, Resources
from unshard.errors import CorruptError, UsageError
from unshard.plan.layout import lay_out
from unshard.plan.operations import Target, Tiled
from unshard.plan.planner import make_operation, make_plan
from unshard.tensors.dtypes import BY_NAME, DType, numpy_dtype
from unshard.tensors.selection import select


@contextmanager
def small(tile_bytes: int, small_read: int) -> Iterator[None]:
    """Make tiles so small that small tensors have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "TILE_BYTES", tile_bytes)
        patch.setattr(strided, "SMALL", small_read)
        yield


def operation(recipe: Recipe, to: DType | None = None) -> Tiled:
    return make_operation(Target(0, 0, shape_of(recipe)), recipe, to or dtype_of(recipe))


def read(recipe: Recipe, index: Any, to: DType | None = None) -> Any:
    reader = TensorReader(Path("checkpoint"))
    found = reader.read(operation(recipe, to), select(index, shape_of(recipe)))
    reader.close()
    return found


def read_both(recipe: Recipe, index: Any, to: DType | None = None) -> Any:
    """Read a part as one, and again in parts, which must be the same."""
    found = read(recipe, index, to)
    reader, selection = TensorReader(Path("checkpoint")), select(index, shape_of(recipe))
    whole = np.empty(selection.counts, found.dtype)
    for place, bits in reader.parts(operation(recipe, to), selection):
        whole[place] = bits
    reader.close()
    assert np.flip(whole, selection.turned).tobytes() == found.tobytes()
    return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, int, int]:
    return draw(tensors(ANY_DTYPE)), draw(st.integers(64, 200)), draw(st.sampled_from([0, 16384]))


@given(cases(), st.data())
def test_a_part_of_any_tensor_is_what_numpy_takes(
    case: tuple[Tensor, int, int], data: st.DataObject
) -> None:
    tensor, tile_bytes, small_read = case
    with tempfile.TemporaryDirectory() as directory, small(tile_bytes, small_read):
        sources = Sources(Path(directory))
        sources.add("w", tensor)
        sources.plan()
        index = data.draw(basic_indices(tensor.shape, allow_newaxis=True))
        expected = np.asarray(sources.values["w"][index])
        found = read_both(take(sources.entries["w"]), index)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert found.flags.c_contiguous
    assert found.flags.writeable
    assert found.tobytes() == np.ascontiguousarray(expected).tobytes()


@given(cases(), st.data())
def test_a_part_of_what_a_recipe_moves_is_what_numpy_takes(
    case: tuple[Tensor, int, int], data: st.DataObject
) -> None:
    tensor, tile_bytes, small_read = case
    if 0 in tensor.shape:
        return
    with tempfile.TemporaryDirectory() as directory, small(tile_bytes, small_read):
        sources = Sources(Path(directory))
        sources.add("w", tensor)
        sources.plan()
        recipe = data.draw(moves(sources.entries["w"]))
        all_of_it = read(recipe, ...)
        assert (
            all_of_it.tobytes()
            == tensors_in(
                merged(make_plan(lay_out([ConvertedTensor("w", dtype_of(recipe), recipe)], 10**9)))
            )["w"]
        )
        index = data.draw(basic_indices(shape_of(recipe), allow_newaxis=True))
        found = read_both(recipe, index)
    assert found.tobytes() == np.ascontiguousarray(all_of_it[index]).tobytes()


@pytest.mark.parametrize("kind", ["low rank", "mean"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_computed_values_are_those_that_a_merge_writes(
    tmp_path: Path, kind: str, dtype: str
) -> None:
    """Bit for bit, whichever part is asked for: sums depend on how tiles are cut."""
    sources, to, shape = Sources(tmp_path), BY_NAME[dtype], (2, 300, 1100)
    filled(sources, "w", dtype, shape, 0)
    filled(sources, "a", dtype, (2, 24, 1100), 1)
    filled(sources, "b", dtype, (2, 300, 24), 2)
    filled(sources, "v", dtype, shape, 3)
    sources.plan()
    w, a, b, v = (whole(sources, name) for name in "wabv")
    recipe: Recipe = (
        LowRank(w, a, b, 0.7) if kind == "low rank" else WeightedSum(((1.0, w), (0.3, v)))
    )
    plan = make_plan(lay_out([ConvertedTensor("w", to, recipe)], 10**9))
    written = tensors_in(merged(plan, Resources(2, MIN_BUFFER)))["w"]
    bits = np.frombuffer(written, f"u{to.itemsize}").reshape(shape)
    every: list[Any] = [
        ...,
        (1, 7, 9),
        (slice(None), -1),
        (0, slice(None, None, -3), slice(5, None, 513)),
        (slice(None, None, -1), slice(120, 140), 511),
        (slice(0), None),
    ]
    for index in every:
        found = read_both(recipe, index, to)
        assert found.shape == bits[index].shape
        assert found.tobytes() == np.ascontiguousarray(bits[index]).tobytes(), index


def test_a_cast_is_that_of_a_merge(tmp_path: Path) -> None:
    sources = Sources(tmp_path)
    values = filled(sources, "w", "float32", (50, 60), 0)
    sources.plan()
    found = read(whole(sources, "w"), (slice(None, None, 7), slice(3, 9)), BY_NAME["bfloat16"])
    expected = values[::7, 3:9].astype(numpy_dtype(BY_NAME["bfloat16"]))
    assert found.tobytes() == expected.tobytes()


class Counted:
    """Counts the bytes that are read, and the files that are opened."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reads: list[int] = []
        preadv = os.preadv

        def counting(fd: int, buffers: list[memoryview], offset: int) -> int:
            self.reads.append(sum(len(buffer) for buffer in buffers))
            return preadv(fd, buffers, offset)

        patch.setattr(os, "preadv", counting)


@pytest.fixture
def large(tmp_path: Path) -> Sources:
    """A tensor of 12 MB in four files, by rows."""
    sources = Sources(tmp_path, files=4)
    sources.add("w", grid("float32", (3000, 1000), (4, 1), files=4))
    sources.plan()
    return sources


@pytest.mark.parametrize(
    ("index", "most"),
    [
        (slice(0, 16), 16 * 4000),
        (slice(None, None, 1000), 3 * 4000),
        ((slice(None), 7), 3000 * 4),
        ((slice(None), slice(None, None, 500)), 3000 * 2004),
        ((slice(None, None, -250), slice(None, None, -300)), 12 * 4000),
        ((2999, 999), 4),
    ],
)
def test_little_else_is_read_than_what_is_taken(
    large: Sources, monkeypatch: pytest.MonkeyPatch, index: Any, most: int
) -> None:
    counted = Counted(monkeypatch)
    found = read(take(large.entries["w"]), index)
    assert found.tobytes() == np.ascontiguousarray(large.values["w"][index]).tobytes()
    assert sum(counted.reads) <= most


def test_a_step_of_a_thousand_reads_elements_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = Sources(tmp_path)
    sources.add("w", grid("float32", (400_000,), (4,)))
    sources.plan()
    counted = Counted(monkeypatch)
    found = read(take(sources.entries["w"]), slice(None, None, -1000))
    assert found.tobytes() == sources.values["w"][::-1000].tobytes()
    assert counted.reads == [4] * 400


def test_neighbours_are_read_together_in_few_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = Sources(tmp_path)
    sources.add("w", grid("float32", (400_000,), (4,)))
    sources.plan()
    counted = Counted(monkeypatch)
    read(take(sources.entries["w"]), slice(None, None, 10))
    assert len(counted.reads) <= 110
    assert max(counted.reads) <= strided.SMALL


def test_no_read_is_larger_than_a_tile(large: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    read(take(large.entries["w"]), ...)
    assert sum(counted.reads) == 3000 * 4000
    assert max(counted.reads) <= TILE_BYTES


@pytest.mark.parametrize("index", [..., (slice(None, None, 2), slice(None, None, 3))])
def test_turned_chunks_are_read_in_even_tiles(tmp_path: Path, index: Any) -> None:
    sources = Sources(tmp_path)
    sources.add("w", grid("float16", (600, 800), (2, 1), column_major))
    sources.plan()
    with small(64_000, 16384):
        found = read(take(sources.entries["w"]), index)
    assert found.tobytes() == np.ascontiguousarray(sources.values["w"][index]).tobytes()


def test_files_that_are_not_met_are_not_opened(large: Sources) -> None:
    reader, w = TensorReader(Path("checkpoint")), operation(take(large.entries["w"]))
    large.paths[0].unlink()
    found = reader.read(w, select(slice(750, 3000), (3000, 1000)))
    assert found.tobytes() == large.values["w"][750:].tobytes()
    with pytest.raises(CorruptError, match=r"rank0\.bin: no longer exists"):
        reader.read(w, select(slice(749, 751), (3000, 1000)))
    reader.close()


def test_many_threads_read_from_one_reader(large: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has one file open at a time, and there are more threads than may read at a time."""
    monkeypatch.setattr(open_files, "_OPEN_FILES", 1)
    reader, w = TensorReader(Path("checkpoint")), operation(take(large.entries["w"]))

    def rows(first: int) -> bool:
        index = slice(first, None, 997)
        selection = select(index, (3000, 1000))
        found = reader.read(w, selection)
        parts = [bits.copy() for _, bits in reader.parts(w, selection)]
        expected = large.values["w"][index].tobytes()
        return found.tobytes() == expected == np.concatenate(parts).tobytes()

    with ThreadPoolExecutor(2 * AT_ONCE) as pool:
        assert all(pool.map(rows, range(200)))
    reader.close()


def test_as_many_threads_read_at_once_as_memory_is_for(
    large: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits inside until the others are there, too: a lock around the reads would hang."""
    preadv, inside = os.preadv, Barrier(AT_ONCE)
    counted, now, most = Lock(), 0, 0

    def meeting(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal now, most
        with counted:
            now += 1
            most = max(most, now)
        inside.wait(60)
        with counted:
            now -= 1
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", meeting)
    reader, w = TensorReader(Path("checkpoint")), operation(take(large.entries["w"]))
    with ThreadPoolExecutor(4 * AT_ONCE) as pool:
        rows = pool.map(lambda row: reader.read(w, select(row, (3000, 1000))), range(4 * AT_ONCE))
        assert [row.tobytes() for row in rows] == [
            row.tobytes() for row in large.values["w"][: 4 * AT_ONCE]
        ]
    assert most == AT_ONCE
    reader.close()


def test_closing_waits_for_what_is_being_read(
    large: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, inside, closing = os.preadv, Event(), Event()

    def waiting(fd: int, buffers: list[memoryview], offset: int) -> int:
        inside.set()
        closing.wait(60)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", waiting)
    reader, w = TensorReader(Path("checkpoint")), operation(take(large.entries["w"]))
    with ThreadPoolExecutor(2) as pool:
        row = pool.submit(reader.read, w, select(0, (3000, 1000)))
        inside.wait(60)
        closed = pool.submit(reader.close)
        assert not closed.done()
        closing.set()
        closed.result()
        assert row.result().tobytes() == large.values["w"][0].tobytes()


def test_a_closed_reader_says_so(large: Sources) -> None:
    reader, w = TensorReader(Path("some/checkpoint")), operation(take(large.entries["w"]))
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir())) if descriptors.exists() else 0
    reader.read(w, select(..., (3000, 1000)))
    reader.close()
    reader.close()
    if before:
        assert len(list(descriptors.iterdir())) == before
    for index in (..., slice(0)):
        with pytest.raises(UsageError, match="some/checkpoint: the checkpoint was closed"):
            reader.read(w, select(index, (3000, 1000)))
