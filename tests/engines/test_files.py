"""Files that a plan would write: any part of them is what a merge writes there."""

import io
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe_values import moves
from sources import (
    COPYING,
    Knobs,
    Shape,
    Sources,
    Tensor,
    column_major,
    grid,
    merged,
    row_major,
    some_tensors,
    tensors,
)
from unshard.containers.file_states import FileStates
from unshard.containers.open_files import OpenFiles
from unshard.containers.strided import Elements
from unshard.convert.outputs import ConvertedTensor
from unshard.convert.recipes import LowRank, dtype_of, take
from unshard.engines import files as engine
from unshard.engines.files import PieceReader, PlannedFile
from unshard.errors import CorruptError, UsageError
from unshard.plan import pieces
from unshard.plan.layout import lay_out
from unshard.plan.operations import Plan
from unshard.plan.pieces import Contents, contents_of
from unshard.plan.planner import make_plan
from unshard.plan.work import Tile
from unshard.tensors.boxes import Box
from unshard.tensors.dtypes import BY_NAME
from unshard.write.execute import make_tile

Opened = dict[str, PlannedFile]


@contextmanager
def small_slabs(slab_bytes: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "_SLAB_BYTES", slab_bytes)
        patch.setattr(pieces, "_TURNED_BYTES", slab_bytes)
        patch.setattr(engine, "CACHE_BYTES", 3 * slab_bytes)
        yield


def opened(plan: Plan, states: FileStates | None = None) -> tuple[PieceReader, Opened]:
    contents = dict(contents_of(plan))
    reader = PieceReader(Path("checkpoint"), states)

    def file(name: str, one: Contents) -> PlannedFile:
        return PlannedFile(name, one.size, lambda at, out: reader.read(one, at, out))

    return reader, {name: file(name, one) for name, one in contents.items()}


def same_parts(plan: Plan, ranges: list[tuple[int, int]]) -> None:
    """Compare files with those of a merge: whole, and parts of them."""
    truth = merged(plan)
    reader, files = opened(plan)
    assert files.keys() == truth.keys()
    for name, file in files.items():
        data = truth[name]
        assert file.size == len(data)
        for start, length in ranges:
            at = start % (len(data) + 1)
            file.seek(at)
            assert file.read(length) == data[at : at + length]
        file.seek(0)
        assert file.read() == data
    reader.close()


some_ranges = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 300)), max_size=8)


@given(
    some_tensors,
    some_ranges,
    st.sampled_from([Knobs(), COPYING]),
    st.sampled_from([None, "bfloat16", "float32"]),
    st.integers(1, 200),
)
def test_any_part_of_any_file_is_what_a_merge_writes(
    drawn: list[Tensor],
    ranges: list[tuple[int, int]],
    knobs: Knobs,
    target: str | None,
    slab_bytes: int,
) -> None:
    with tempfile.TemporaryDirectory() as directory, knobs.turned(), small_slabs(slab_bytes):
        sources = Sources(Path(directory))
        for number, tensor in enumerate(drawn):
            sources.add(f"t{number}", tensor)
        same_parts(sources.plan(target, max_shard_size=100), ranges)


@given(tensors([BY_NAME["float32"]]), some_ranges, st.integers(1, 200), st.data())
def test_any_part_of_what_a_recipe_moves_is_what_a_merge_writes(
    tensor: Tensor, ranges: list[tuple[int, int]], slab_bytes: int, data: st.DataObject
) -> None:
    if 0 in tensor.shape:
        return
    with tempfile.TemporaryDirectory() as directory, COPYING.turned(), small_slabs(slab_bytes):
        sources = Sources(Path(directory))
        sources.add("w", tensor)
        sources.plan()
        recipe = data.draw(moves(sources.entries["w"]))
        converted = ConvertedTensor("w", dtype_of(recipe), recipe)
        same_parts(make_plan(lay_out([converted], 10**9)), ranges)


@pytest.mark.parametrize("lie", [row_major, column_major])
@pytest.mark.parametrize("grid_of", [(3, 1), (1, 3), (3, 3)])
@pytest.mark.parametrize("target", [None, "bfloat16"])
def test_runs_of_several_ranks_are_told_apart(
    tmp_path: Path, lie: Callable[[Shape], Shape], grid_of: tuple[int, int], target: str | None
) -> None:
    """Copies that are interleaved, next to some that are not, and tensors made in tiles."""
    sources = Sources(tmp_path)
    for number, name in enumerate("abc"):
        form = grid("float32", (12 + 3 * number, 18), grid_of, lie)
        sources.add(name, form)
        sources.add(f"{name}-scalar", grid("float32", (), ()))
    with COPYING.turned(), small_slabs(100):
        plan = sources.plan(target)
        ranges = [(at, length) for at in range(0, 6000, 37) for length in (1, 4, 71, 1000)]
        same_parts(plan, ranges)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fused_adapter_is_made_of_the_tiles_of_a_merge(tmp_path: Path, dtype: str) -> None:
    """Bit for bit, in two experts of several tiles each: sums depend on how tiles are cut."""
    sources, to = Sources(tmp_path), BY_NAME[dtype]
    for name, shape in {"w": (2, 300, 1100), "a": (2, 24, 1100), "b": (2, 300, 24)}.items():
        values = sources.random.standard_normal(shape).astype("float32")
        sources.add(name, grid("float32", shape, (1, 1, 1)), values.view("u4"))
    sources.plan()
    w, a, b = (take(sources.entries[name]) for name in "wab")
    plan = make_plan(lay_out([ConvertedTensor("w", to, LowRank(w, a, b, 0.7))], 10**9))
    same_parts(plan, [(at, 5000) for at in range(0, 3_000_000, 99_991)])


def test_a_slab_is_made_once_for_who_reads_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = Sources(tmp_path)
    for name in "ab":
        sources.add(name, grid("float32", (40, 100), (4, 1)))
    plan = sources.plan("bfloat16")
    made: list[Box] = []

    def counting(tile: Tile, files: OpenFiles) -> Elements:
        made.append(tile.box)
        return make_tile(tile, files)

    monkeypatch.setattr(engine, "make_tile", counting)
    with small_slabs(1600):  # of four rows
        reader, files = opened(plan)
        (file,) = files.values()
        while file.read(7):
            pass
        assert len(made) == 2 * 40 // 4
        file.seek(file.size - 16_000)
        assert file.read(7)
        assert len(made) == 2 * 40 // 4 + 1
        reader.close()


@pytest.mark.parametrize("target", [None, "bfloat16"])
def test_threads_do_not_wait_for_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str | None
) -> None:
    """Two threads are in the middle of a piece at the same time, copied or cast."""
    sources = Sources(tmp_path)
    sources.add("w", grid("float32", (40, 100), (4, 1)))
    name = "read_exactly" if target is None else "make_tile"
    work, both = getattr(engine, name), threading.Barrier(2)

    def together(*given: object) -> object:
        both.wait(timeout=60)
        return work(*given)

    with COPYING.turned(), small_slabs(1600):
        plan = sources.plan(target)
        truth = merged(plan)["model.safetensors"]
        reader, files = opened(plan)
        monkeypatch.setattr(engine, name, together)
        (file,) = files.values()
        out = [bytearray(100), bytearray(100)]
        ends = file.size - 16_000 // (1 if target is None else 2), file.size - 100
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(file.read_at, ends, map(memoryview, out)))
        assert out == [truth[at : at + 100] for at in ends]
        reader.close()


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("read"), st.none() | st.integers(-2, 900), st.just(0)),
            st.tuples(st.just("readinto"), st.integers(0, 900), st.just(0)),
            st.tuples(st.just("seek"), st.integers(-900, 900), st.integers(0, 2)),
        ),
        max_size=20,
    )
)
def test_it_does_what_a_file_of_these_bytes_does(
    steps: list[tuple[str, int | None, int]],
) -> None:
    data = bytes(range(256)) * 2
    contents = Contents.of_bytes(data)
    reader = PieceReader(Path("checkpoint"))
    ours = PlannedFile("f", len(data), lambda at, out: reader.read(contents, at, out))
    theirs = io.BufferedReader(io.BytesIO(data))
    for what, number, whence in steps:
        if what == "readinto":
            mine, other = bytearray(number or 0), bytearray(number or 0)
            assert ours.readinto(mine) == theirs.readinto(other)
            assert mine == other
        elif what == "read":
            size = -1 if number is None or number < 0 else number
            assert ours.read(number) == theirs.read(size)
        else:
            target = (number or 0) + (0, theirs.tell(), len(data))[whence]
            if target < 0:
                with pytest.raises(ValueError, match="invalid position"):
                    ours.seek(number or 0, whence)
            else:
                assert ours.seek(number or 0, whence) == theirs.seek(number or 0, whence)
        assert ours.tell() == theirs.tell()


def test_it_is_a_binary_file_for_reading_only() -> None:
    contents = Contents.of_bytes(b"one\ntwo\n")
    reader = PieceReader(Path("checkpoint"))
    with PlannedFile("f", 8, lambda at, out: reader.read(contents, at, out)) as file:
        assert isinstance(file, io.BufferedIOBase)
        assert (file.name, file.size, file.mode) == ("f", 8, "rb")
        assert file.readable()
        assert file.seekable()
        assert not file.writable()
        assert file.readlines() == [b"one\n", b"two\n"]
        assert repr(file) == "<PlannedFile 'f': 8 bytes>"
        for forbidden in (file.fileno, lambda: file.write(b"")):
            with pytest.raises(io.UnsupportedOperation):
                forbidden()
        with pytest.raises(ValueError, match="invalid position"):
            file.seek(0, 3)
    for closed in (file.read, file.tell, file.readable, file.seekable, lambda: file.seek(0)):
        with pytest.raises(ValueError, match="f: the file is closed"):
            closed()
    reader.close()


def test_a_source_that_goes_or_shrinks_is_corrupt(tmp_path: Path) -> None:
    sources = Sources(tmp_path)
    sources.add("w", grid("float32", (30, 100), (3, 1)))
    plan, states = sources.plan(), FileStates()
    for path in sources.paths:
        states.add(path)
    reader, files = opened(plan, states)
    (file,) = files.values()
    states.check()
    os.link(sources.paths[0], tmp_path / "pin")  # changes nothing but the number of links
    states.check()
    sources.paths[1].write_bytes(sources.paths[1].read_bytes()[::-1])
    with pytest.raises(CorruptError, match=r"rank1\.bin: has changed while it was being read"):
        file.read()
    assert file.tell() == 0
    with pytest.raises(CorruptError, match=r"rank1\.bin: has changed while it was being read"):
        states.check()
    os.truncate(sources.paths[1], 100)
    with pytest.raises(CorruptError, match=r"rank1\.bin: ends at byte 100, .* bytes too early"):
        file.read()
    reader.close()
    with pytest.raises(UsageError, match="were closed"):
        file.read()
    sources.plan()  # writes them again
    states = FileStates()
    states.add(sources.paths[2])
    sources.paths[2].unlink()
    reader, files = opened(plan, states)
    with pytest.raises(CorruptError, match=r"rank2\.bin: no longer exists"):
        files["model.safetensors"].read()
    with pytest.raises(CorruptError, match=r"rank2\.bin: no longer exists"):
        states.check()
    sources.paths[2].symlink_to(sources.paths[2])
    with pytest.raises(CorruptError, match=r"rank2\.bin: cannot be opened: Too many levels"):
        states.check()
    reader.close()
