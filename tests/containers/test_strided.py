"""Elements at strides in a file: numpy's as_strided is the oracle."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from unshard.containers.strided import (
    NEAR,
    SLACK,
    SMALL,
    Elements,
    raw_dtype,
    read_exactly,
    read_strided,
)
from unshard.errors import CorruptError
from unshard.tensors.dtypes import BY_NAME

SIZE = 300_000


@dataclass(frozen=True, slots=True)
class Source:
    """An open file of random bytes, and the bytes."""

    path: Path
    fd: int
    data: bytes


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    path = tmp_path_factory.mktemp("strided") / "random"
    data = np.random.default_rng(0).bytes(SIZE)
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    yield Source(path, fd, data)
    os.close(fd)


@dataclass(frozen=True, slots=True)
class View:
    """What to read; strides in bytes."""

    start: int
    strides: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: np.dtype[np.generic]

    @property
    def span(self) -> int:
        steps = zip(self.sizes, self.strides, strict=True)
        return self.dtype.itemsize + sum((size - 1) * step for size, step in steps)

    def of(self, data: bytes) -> Elements:
        return np.ndarray(self.sizes, self.dtype, data, self.start, self.strides).copy()


dtypes = st.sampled_from([raw_dtype(dtype) for dtype in BY_NAME.values()])


@st.composite
def views(draw: st.DrawFn, *, smallest: int = 0) -> View:
    """Any view within the file: transposed, overlapping, broadcast, empty, far apart."""
    sizes = tuple(draw(st.lists(st.integers(smallest, 6), max_size=4)))
    dtype = draw(dtypes)
    strides, room = [], SIZE - dtype.itemsize
    for size in sizes:
        step = draw(st.integers(0, 40) | st.integers(0, room // max(size - 1, 1)))
        step = min(step, room // max(size - 1, 1))
        strides.append(step)
        room -= max(size - 1, 0) * step
    return View(draw(st.integers(0, room)), tuple(strides), sizes, dtype)


def read(source: Source, view: View) -> Elements:
    return read_strided(source.fd, view.start, view.strides, view.sizes, view.dtype)


@given(views())
@example(View(0, (100, 4), (0, 3), np.dtype("u4")))
@example(View(SIZE - 4, (100,), (0,), np.dtype("u4")))
@example(View(SIZE, (4, 400), (0, 5), np.dtype("u4")))
def test_every_view_is_what_numpy_sees_in_memory(source: Source, view: View) -> None:
    found = read(source, view)
    assert (found.shape, found.dtype) == (view.sizes, view.dtype)
    if prod(view.sizes):
        assert found.tobytes() == view.of(source.data).tobytes()


def recorded_reads(source: Source, view: View) -> list[int]:
    """Read a view; return how many bytes every single read asked for."""
    reads: list[int] = []
    preadv = os.preadv

    def recording(fd: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(sum(len(buffer) for buffer in buffers))
        return preadv(fd, buffers, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", recording)
        read(source, view)
    return reads


@given(views(smallest=1))
def test_memory_stays_within_the_promised_slack(source: Source, view: View) -> None:
    bound = max(SLACK * prod(view.sizes) * view.dtype.itemsize, SMALL)
    reads = recorded_reads(source, view)
    assert max(reads) <= bound
    assert len(reads) == 1 or view.span > bound


def test_a_dense_view_takes_one_read_however_it_is_turned(source: Source) -> None:
    transposed = View(8, (4, 400), (100, 100), np.dtype("u4"))
    assert recorded_reads(source, transposed) == [40_000]


def test_neighbours_beyond_the_slack_are_read_together_up_to_the_small_span(
    source: Source,
) -> None:
    every_third = View(8, (12,), (5000,), np.dtype("u4"))
    reads = recorded_reads(source, every_third)
    assert len(reads) == 4
    assert max(reads) <= SMALL


def test_elements_that_are_not_neighbours_are_read_one_by_one(source: Source) -> None:
    every = View(8, (NEAR + 4,), (250,), np.dtype("u4"))
    assert recorded_reads(source, every) == [4] * 250


def test_far_apart_rows_are_read_one_by_one(source: Source) -> None:
    rows = View(8, (50_000, 4), (5, 100), np.dtype("u4"))
    assert recorded_reads(source, rows) == [400] * 5


def test_a_view_that_is_far_apart_in_its_last_dimension_is_read_along_that(source: Source) -> None:
    columns = View(8, (4, 50_000), (100, 5), np.dtype("u4"))
    assert recorded_reads(source, columns) == [400] * 5
    assert read(source, columns).tobytes() == columns.of(source.data).tobytes()


@pytest.mark.parametrize("name", BY_NAME)
def test_raw_elements_have_the_size_of_their_dtype_and_any_bits(name: str) -> None:
    raw = raw_dtype(BY_NAME[name])
    assert raw.itemsize == BY_NAME[name].itemsize
    assert raw.kind in "uV"


@pytest.mark.parametrize(
    "view",
    [
        View(SIZE - 3, (), (), np.dtype("u4")),
        View(SIZE, (4,), (1,), np.dtype("u4")),
        View(0, (SIZE // 2, 1), (3, 5), np.dtype("u1")),
        View(SIZE - 39, (8,), (5,), np.dtype("u8")),
    ],
)
def test_a_file_that_has_become_too_short_is_named(source: Source, view: View) -> None:
    with pytest.raises(CorruptError, match="bytes too early") as error:
        read(source, view)
    assert str(source.path) in str(error.value) or not Path("/proc/self/fd").exists()


@pytest.mark.parametrize("piece", [1, 7, 4096])
def test_reads_that_return_less_than_asked_for_are_continued(
    source: Source, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    preadv = os.preadv

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(fd, [buffers[0][:piece]], offset)

    monkeypatch.setattr(os, "preadv", short)
    out = bytearray(5000)
    read_exactly(source.fd, 123, memoryview(out))
    assert out == source.data[123:5123]


def test_nothing_is_read_for_no_bytes(source: Source) -> None:
    read_exactly(source.fd, SIZE + 1000, memoryview(bytearray()))
    assert read(source, View(SIZE, (4,), (0,), np.dtype("u4"))).shape == (0,)
