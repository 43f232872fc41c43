"""Executed plans against a slow, obvious reference: the tensors that the sources were made from.

Source files are written here byte by byte, chunks at odd places between random bytes; the output is
read by safetensors' own reader, and casts are compared with torch's.
"""

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sources import (
    COPYING,
    Bits,
    Chunk,
    Knobs,
    Sources,
    Tensor,
    column_major,
    grid,
    merged,
    some_settings,
    some_tensors,
    tensors,
    tensors_in,
)
from unshard.engines.threads import MIN_BUFFER, Resources
from unshard.errors import CheckpointError, CorruptError
from unshard.plan.operations import Cast, CopyRange, Gather
from unshard.plan.work import split_into_units
from unshard.tensors.boxes import Box
from unshard.tensors.dtypes import BY_NAME, numpy_dtype
from unshard.write.execute import Executor


@contextmanager
def sources_of(drawn: list[Tensor]) -> Iterator[Sources]:
    with tempfile.TemporaryDirectory() as directory:
        sources = Sources(Path(directory))
        for number, tensor in enumerate(drawn):
            sources.add(f"t{number}", tensor)
        yield sources


def assert_merges(drawn: list[Tensor], knobs: Knobs, resources: Resources, limit: int) -> None:
    with sources_of(drawn) as sources, knobs.turned():
        files = merged(sources.plan(max_shard_size=limit), resources)
        assert tensors_in(files) == sources.expected()


@given(some_tensors, some_settings, st.integers(1, 2000))
def test_gathered_tensors_have_the_bits_that_are_stored(
    drawn: list[Tensor], resources: Resources, limit: int
) -> None:
    assert_merges(drawn, Knobs(), resources, limit)


@given(some_tensors, some_settings, st.integers(1, 20), st.integers(1, 2000))
def test_copied_tensors_have_the_bits_that_are_stored(
    drawn: list[Tensor], resources: Resources, copy_unit: int, limit: int
) -> None:
    assert_merges(drawn, Knobs(long_run=1, copy_unit=copy_unit), resources, limit)


@given(some_tensors, st.integers(1, 3), st.integers(1, 200), st.sampled_from([0, 16, 16384]))
def test_tensors_made_in_the_smallest_tiles_have_the_bits_that_are_stored(
    drawn: list[Tensor], workers: int, tile_bytes: int, small_read: int
) -> None:
    knobs = Knobs(tile_bytes=tile_bytes, small_read=small_read, least_buffer=1)
    assert_merges(drawn, knobs, Resources(workers, 1000), 10**9)


# larger tensors, with the machinery's own thresholds


SHAPE = (120, 90, 60)

LARGE = {
    "rows": grid("float32", SHAPE, (5, 1, 1)),
    "columns": grid("float32", SHAPE, (1, 1, 4)),
    "planes": grid("float32", SHAPE, (1, 3, 1)),
    "grid": grid("float32", SHAPE, (3, 2, 5)),
    "transposed": grid("float32", SHAPE, (2, 3, 2), column_major),
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("memory", [MIN_BUFFER, 1_000_000, 64_000_000])
@pytest.mark.parametrize("workers", [1, 3])
def test_the_bytes_do_not_depend_on_workers_or_memory(
    tmp_path: Path, name: str, workers: int, memory: int
) -> None:
    sources = Sources(tmp_path)
    sources.add("w", LARGE[name])
    files = merged(sources.plan(), Resources(workers, memory))
    assert tensors_in(files) == sources.expected()


@pytest.mark.parametrize("target", [None, "bfloat16"])
def test_the_files_of_a_model_do_not_depend_on_workers_or_memory(
    tmp_path: Path, target: str | None
) -> None:
    """Copied, gathered and cast, in several files."""
    sources = Sources(tmp_path)
    for name, tensor in LARGE.items():
        sources.add(name, tensor)
    plan = sources.plan(target, max_shard_size=4_000_000)
    first, *others = (
        merged(plan, Resources(workers, memory))
        for workers in (1, 2, 5)
        for memory in (MIN_BUFFER, 1_000_000, 64_000_000)
    )
    assert len(first) >= 2
    assert all(files == first for files in others)


def test_the_large_tensors_take_both_ways(tmp_path: Path) -> None:
    sources = Sources(tmp_path)
    kinds = {}
    for name, tensor in LARGE.items():
        sources.entries.clear()
        sources.add(name, tensor)
        kinds[name] = {type(operation) for operation in sources.plan().operations()}
    assert kinds["rows"] == {CopyRange}
    assert kinds["columns"] == kinds["grid"] == kinds["transposed"] == {Gather}


def test_an_expanded_tensor_is_written_in_full(tmp_path: Path) -> None:
    """A stride of 0: one stored row is all rows."""
    row = np.arange(50, dtype=np.float32)
    box = Box.whole((40, 50))
    sources = Sources(tmp_path)
    tensor = Tensor(BY_NAME["float32"], (40, 50), (Chunk(box, (0, 1)),))
    sources.add("w", tensor, np.broadcast_to(row, (40, 50)))
    assert tensors_in(merged(sources.plan())) == {"w": np.tile(row, (40, 1)).tobytes()}


def test_a_file_is_header_and_data_and_nothing_else(tmp_path: Path) -> None:
    sources = Sources(tmp_path)
    sources.add("b", grid("int8", (6, 4), (2, 1)))
    sources.add("a", grid("float32", (6, 4), (1, 2)))
    plan = sources.plan()
    expected = sources.expected()
    assert merged(plan) == {
        "model.safetensors": plan.layout.files[0].header + expected["a"] + expected["b"]
    }


# without the kernel's copy


def refuses(code: int, *, after: int = 0) -> Callable[[int, int, int, int, int], int]:
    """Return a copy_file_range that fails from the `after`-th call on."""
    calls = 0

    def copy_file_range(source: int, target: int, count: int, start: int, at: int) -> int:
        nonlocal calls
        calls += 1
        if calls > after:
            raise OSError(code, os.strerror(code))
        return os.pwrite(target, os.pread(source, count, start), at)

    return copy_file_range


def copies_some(source: int, target: int, count: int, start: int, at: int) -> int:
    return os.pwrite(target, os.pread(source, min(count, 7), start), at)


def copies_nothing(_source: int, _target: int, _count: int, _start: int, _at: int) -> int:
    return 0


def copied_with(
    sources: Sources, monkeypatch: pytest.MonkeyPatch, copy_file_range: object
) -> dict[str, bytes]:
    monkeypatch.setattr(os, "copy_file_range", copy_file_range, raising=False)
    with COPYING.turned():
        plan = sources.plan()
        assert all(isinstance(operation, CopyRange) for operation in plan.operations())
        return tensors_in(merged(plan))


@pytest.fixture
def copied(tmp_path: Path) -> Sources:
    sources = Sources(tmp_path)
    for name in ("rows", "columns"):
        sources.add(name, LARGE[name])
    sources.add("short", grid("int8", (6, 4), (3, 2)))
    return sources


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("name", ["EXDEV", "EINVAL", "ENOSYS", "EOPNOTSUPP", "EPERM"])
def test_where_the_kernel_refuses_to_copy_the_bytes_are_the_same(
    copied: Sources, monkeypatch: pytest.MonkeyPatch, name: str, after: int
) -> None:
    copy = refuses(getattr(errno, name), after=after)
    assert copied_with(copied, monkeypatch, copy) == copied.expected()


@pytest.mark.parametrize("copy", [copies_some, copies_nothing])
def test_a_kernel_that_copies_less_than_asked_for_makes_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copy: object
) -> None:
    sources = Sources(tmp_path)
    sources.add("w", grid("float32", (30, 20), (3, 2)))
    assert copied_with(sources, monkeypatch, copy) == sources.expected()


def test_a_system_without_kernel_copies_makes_the_same_bytes(
    copied: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "copy_file_range", raising=False)
    with COPYING.turned():
        assert tensors_in(merged(copied.plan())) == copied.expected()


def test_other_failures_of_the_kernels_copy_are_raised(
    copied: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        copied_with(copied, monkeypatch, refuses(errno.ENOSPC, after=1))


def test_a_system_that_writes_less_than_asked_for_makes_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:7], at))
    sources = Sources(tmp_path)
    sources.add("w", grid("float32", (30, 20), (3, 2)))
    assert tensors_in(merged(sources.plan())) == sources.expected()


# descriptors


def open_descriptors() -> int:
    return len(list(Path("/dev/fd").iterdir()))


@pytest.mark.parametrize("open_files", [2, 3, 6, 30])
@pytest.mark.parametrize("knobs", [COPYING, Knobs()], ids=["copied", "gathered"])
def test_an_executor_keeps_to_its_number_of_open_files(
    tmp_path: Path, knobs: Knobs, open_files: int
) -> None:
    sources = Sources(tmp_path, files=12)
    for number in range(12):
        sources.add(f"t{number}", grid("int8", (12, 5), (12, 1), files=12))
    with knobs.turned():
        plan = sources.plan(max_shard_size=60)
    outputs = tuple(tmp_path / file.filename for file in plan.layout.files)
    for output in outputs:
        output.touch()
    before = open_descriptors()
    with closing(Executor(outputs, open_files=open_files, buffer_bytes=1000)) as executor:
        for unit in split_into_units(plan, buffer_bytes=1000):
            executor.do(unit)
            assert open_descriptors() - before <= open_files
    assert len(outputs) == 12
    assert open_descriptors() <= before


# sources that change meanwhile


@pytest.mark.parametrize("knobs", [COPYING, Knobs()], ids=["copied", "gathered"])
@pytest.mark.parametrize("kernel", [True, False])
def test_a_source_that_ends_early_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    knobs: Knobs,
    kernel: bool,  # noqa: FBT001
) -> None:
    sources = Sources(tmp_path)
    sources.add("w", grid("float32", (30, 20), (3, 1)))
    if not kernel:
        monkeypatch.setattr(os, "copy_file_range", refuses(errno.EXDEV), raising=False)
    with knobs.turned():
        plan = sources.plan()
        size = sources.paths[1].stat().st_size
        os.truncate(sources.paths[1], size - 1)
        with pytest.raises(CorruptError, match=rf"rank1\.bin: ends at byte {size - 1}"):
            merged(plan)


@pytest.mark.parametrize("knobs", [COPYING, Knobs()], ids=["copied", "gathered"])
def test_a_source_that_is_gone_is_named(tmp_path: Path, knobs: Knobs) -> None:
    sources = Sources(tmp_path)
    sources.add("w", grid("float32", (30, 20), (3, 1)))
    with knobs.turned():
        plan = sources.plan()
        sources.paths[2].unlink()
        with pytest.raises(CorruptError, match=r"rank2\.bin: no longer exists"):
            merged(plan)


def test_a_source_that_cannot_be_read_is_named_and_not_blamed_on_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An OSError is taken for a failure to write: see `Stage.__exit__`."""

    def broken_disk(_fd: int, _buffers: object, _at: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    sources = Sources(tmp_path)
    sources.add("w", grid("float32", (30, 20), (3, 2)))
    plan = sources.plan()
    monkeypatch.setattr(os, "preadv", broken_disk)
    with pytest.raises(CheckpointError, match=rf"rank\d\.bin: .*{os.strerror(errno.EIO)}"):
        merged(plan)


# casts


def bit_patterns(dtype: str) -> Bits:
    """Return values that are hard to round: all signs and exponents, ties and their neighbours."""
    random = np.random.default_rng(0)
    if BY_NAME[dtype].itemsize == 2:
        return np.arange(2**16, dtype=np.uint16).view(numpy_dtype(BY_NAME[dtype]))
    upper = np.arange(2**16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    single = (upper[:, None] | lower.astype(np.uint32)).reshape(-1).view(np.float32)
    if dtype == "float32":
        return np.concatenate([single, random.standard_normal(50_000).astype(np.float32)])
    bits = random.integers(0, 2**64, 200_000, dtype=np.uint64).view(np.float64)
    with np.errstate(invalid="ignore"):
        return np.concatenate([single.astype(np.float64), bits])


def cast_by_torch(values: Bits, dtype: str, to: str) -> Bits:
    integers = torch.from_numpy(values.view(f"i{values.itemsize}").copy())
    cast = integers.view(getattr(torch, dtype)).to(getattr(torch, to))
    bits = cast.view(torch.int32 if cast.itemsize == 4 else torch.int16)
    return bits.numpy().view(numpy_dtype(BY_NAME[to]))


def cast_by_us(directory: Path, tensor: Tensor, values: Bits, to: str) -> Bits:
    sources = Sources(directory)
    sources.add("w", tensor, values)
    plan = sources.plan(to)
    assert [type(operation) for operation in plan.operations()] == [Cast]
    data = tensors_in(merged(plan, Resources(2, MIN_BUFFER * 2)))["w"]
    return np.frombuffer(data, numpy_dtype(BY_NAME[to])).reshape(tensor.shape)


def is_nan(values: Bits) -> NDArray[np.bool_]:
    with np.errstate(invalid="ignore"):
        return np.isnan(values.astype(np.float64))


def assert_same_but_for_nan_payloads(found: Bits, expected: Bits) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    numbers = ~is_nan(expected)
    assert (is_nan(found) == ~numbers).all()
    bits = f"u{expected.itemsize}"
    assert (found.view(bits)[numbers] == expected.view(bits)[numbers]).all()


CASTS = [
    (dtype, to)
    for dtype in ("float64", "float32", "float16", "bfloat16")
    for to in ("float32", "float16", "bfloat16")
    if dtype != to
]


def in_two_files(dtype: str, size: int) -> Tensor:
    first = Chunk(Box((0,), (size // 3,)), (1,), file=1, padding=3)
    second = Chunk(Box((size // 3,), (size - size // 3,)), (1,), file=0, padding=1)
    return Tensor(BY_NAME[dtype], (size,), (first, second))


@pytest.mark.parametrize(("dtype", "to"), CASTS)
@pytest.mark.parametrize("signalling", [False, True], ids=["quiet", "signalling"])
def test_values_are_rounded_as_torch_rounds_them(
    tmp_path: Path,
    dtype: str,
    to: str,
    signalling: bool,  # noqa: FBT001
) -> None:
    """Infinities, denormals, ties, overflow; and NaNs, the signalling ones on their own."""
    values = bit_patterns(dtype)
    values = values if signalling else values[~is_signalling(values)]
    found = cast_by_us(tmp_path, in_two_files(dtype, len(values)), values, to)
    assert_same_but_for_nan_payloads(found, cast_by_torch(values, dtype, to))


def is_signalling(values: Bits) -> NDArray[np.bool_]:
    """Tell which values are NaNs whose first mantissa bit is not set."""
    mantissa_bits = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}[values.dtype.name]
    quiet = np.array(1 << (mantissa_bits - 1), dtype=f"u{values.itemsize}")
    loud: NDArray[np.bool_] = (values.view(quiet.dtype) & quiet) == 0
    return is_nan(values) & loud


@pytest.mark.parametrize("to", ["float16", "bfloat16"])
def test_float64_between_two_float32_is_rounded_as_torch_rounds_it(tmp_path: Path, to: str) -> None:
    """torch goes through float32, so that a value just above a tie may be rounded as the tie."""
    values = np.random.default_rng(1).standard_normal(500_000)
    found = cast_by_us(tmp_path, in_two_files("float64", len(values)), values, to)
    assert_same_but_for_nan_payloads(found, cast_by_torch(values, "float64", to))


@pytest.mark.parametrize("name", LARGE)
def test_a_cast_puts_every_element_in_its_place(tmp_path: Path, name: str) -> None:
    values = np.arange(prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    found = cast_by_us(tmp_path, LARGE[name], values, "bfloat16")
    assert (found.view(np.uint16) == values.astype(ml_dtypes.bfloat16).view(np.uint16)).all()


@given(
    tensors([BY_NAME[name] for name in ("float64", "float32", "float16", "bfloat16")]),
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.integers(1, 200),
    st.sampled_from([1, 24, 256 * 1024]),
)
def test_casts_of_any_chunks_in_small_tiles_are_torchs(
    tensor: Tensor, to: str, tile_bytes: int, block: int
) -> None:
    count = prod(tensor.shape)
    numbers = np.linspace(-9, 60_000, num=count, dtype=np.float32).reshape(tensor.shape)
    values = numbers.astype(numpy_dtype(tensor.dtype))
    knobs = Knobs(tile_bytes=tile_bytes, block=block)
    with tempfile.TemporaryDirectory() as directory, knobs.turned():
        sources = Sources(Path(directory))
        sources.add("w", tensor, values)
        data = tensors_in(merged(sources.plan(to)))["w"]
    expected = cast_by_torch(values.reshape(-1), tensor.dtype.name, to)
    assert data == expected.tobytes()


def test_integers_next_to_cast_floats_keep_their_bits(tmp_path: Path) -> None:
    sources = Sources(tmp_path)
    for dtype in ("int64", "bool", "uint8", "float8_e4m3fn"):
        sources.add(dtype, grid(dtype, (6, 4), (2, 2)))
    kept = sources.expected()
    sources.add("float32", grid("float32", (6, 4), (2, 2)))
    found = tensors_in(merged(sources.plan("bfloat16")))
    assert len(found.pop("float32")) == 6 * 4 * 2
    assert found == kept
