"""Chunk tables sliced with steps, and parts of tiles: pure, against numpy."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import basic_indices

from sources import Sources, Tensor, grid, tensors
from unshard.convert.recipes import take
from unshard.plan.planner import table_of
from unshard.plan.work import tile_parts
from unshard.tensors.boxes import find_gap
from unshard.tensors.catalog import ChunkTable
from unshard.tensors.dtypes import BY_NAME
from unshard.tensors.selection import Selection, cut_out, select, sliced

DTYPES = [BY_NAME[name] for name in ("uint8", "float16", "float32", "complex64")]


@st.composite
def sliced_tensors(draw: st.DrawFn) -> tuple[Tensor, Any]:
    tensor = draw(tensors(DTYPES))
    return tensor, draw(basic_indices(tensor.shape))


def gathered(table: ChunkTable, data: dict[Path, bytes], counts: Any, dtype: Any) -> Any:
    """Return what a table describes, with numpy's own strides; every element from one chunk."""
    out, times = np.zeros(counts, dtype), np.zeros(counts, int)
    for chunk in table:
        strides = chunk.strides or grid_strides(chunk.box.sizes)
        source = data[chunk.source.path]
        end = chunk.source.offset + chunk.source.length
        part = np.ndarray(
            chunk.box.sizes,
            dtype,
            source[:end],  # an array that reached further would be refused
            chunk.source.offset,
            tuple(step * dtype.itemsize for step in strides),
        )
        where = tuple(
            slice(lo, hi) for lo, hi in zip(chunk.box.offsets, chunk.box.ends, strict=True)
        )
        out[where] = part
        times[where] += 1
    assert (times == 1).all()
    return out


def grid_strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(np.prod(sizes[dim + 1 :])) for dim in range(len(sizes)))


@given(sliced_tensors())
def test_a_sliced_table_describes_what_numpy_takes(case: tuple[Tensor, Any]) -> None:
    tensor, index = case
    with tempfile.TemporaryDirectory() as directory:
        sources = Sources(Path(directory))
        sources.add("w", tensor)
        sources.plan()
        data = {path: path.read_bytes() for path in sources.paths}
    values = sources.values["w"]
    selection = select(index, tensor.shape)
    table = sliced(table_of(take(sources.entries["w"])), selection, values.itemsize)
    assert find_gap(table.offsets, table.sizes, selection.counts) is None
    found = gathered(table, data, selection.counts, values.dtype)
    expected = np.asarray(values[index])
    assert np.flip(found, selection.turned).reshape(selection.shape).tobytes() == (
        np.ascontiguousarray(expected).tobytes()
    )


def test_only_the_chunks_that_are_met_stay(tmp_path: Path) -> None:
    sources = Sources(tmp_path, files=4)
    sources.add("w", grid("float32", (40, 6), (4, 1), files=4))
    table = table_of(take(sources.entries["w"]))
    assert set(sliced(table, select(slice(25, 28), (40, 6)), 4).file.tolist()) == {2}
    assert len(sliced(table, select(slice(5, 5), (40, 6)), 4)) == 0
    assert sliced(table, select(slice(3, 14), (40, 6)), 4).strides is None
    assert sliced(table, select((slice(None), 0), (40, 6)), 4).length.tolist() == [9 * 24 + 4] * 4


def test_parts_that_are_cut_alike_share_their_boxes(tmp_path: Path) -> None:
    """So a plan finds their runs of bytes once, not for every expert of a layer."""
    sources = Sources(tmp_path)
    sources.add("w", grid("float32", (4, 6, 8), (2, 1, 1)))
    experts = [((at, 0, 0), (1, 1, 1), (1, 6, 8)) for at in range(4)]
    parts = cut_out(sources.entries["w"].chunks, experts, 4, (1, 2))
    assert {id(part.offsets) for part in parts} == {id(parts[0].offsets)}
    assert parts[1].start - parts[0].start == [6 * 8 * 4]


@st.composite
def tiled_selections(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], Selection]:
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    tile = tuple(draw(st.integers(1, 10)) for _ in shape)
    return shape, tile, select(draw(basic_indices(shape)), shape)


@given(tiled_selections())
def test_parts_of_tiles_make_the_selection(
    case: tuple[tuple[int, ...], tuple[int, ...], Selection],
) -> None:
    shape, tile, selection = case
    array = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    out, times = np.zeros(selection.counts, int), np.zeros(selection.counts, int)
    for part in tile_parts(shape, tile, selection):
        assert all(at % size == 0 for at, size in zip(part.tile.offsets, tile, strict=True))
        assert all(end <= size for end, size in zip(part.tile.ends, shape, strict=True))
        ranges = zip(part.tile.offsets, part.tile.ends, strict=True)
        made = array[tuple(slice(lo, hi) for lo, hi in ranges)]
        out[part.place] = made[part.taken]
        times[part.place] += 1
        assert made[part.taken].size  # no tile is made for nothing
    assert (times == 1).all()
    rows = [
        [start + step * n for n in range(count)]
        for start, step, count in zip(
            selection.starts, selection.steps, selection.counts, strict=True
        )
    ]
    assert (out == (array[np.ix_(*rows)] if shape else array)).all()
