"""The safetensors container: the bytes of the reference implementation, and no laxer than it."""

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path

import ml_dtypes  # noqa: F401 (teaches numpy bfloat16)
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from hostile.texts import CORRUPT, DIGITS, INCOMPLETE, STRICTER, container, tensor
from unshard.containers.safetensors_file import (
    HeaderEntry,
    encode_header,
    read_safetensors,
)
from unshard.errors import CorruptError, IncompleteError, UnshardError
from unshard.tensors.dtypes import BY_CODE, BY_NAME

ODD_NAME = 'näme "quoted" \\ \n \x1f \x7f 😀'


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a path that every example may overwrite."""
    return tmp_path_factory.mktemp("safetensors") / "model.safetensors"


def reference_accepts(path: Path) -> bool:
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            file.keys()
    except safetensors.SafetensorError:
        return False
    return True


# --- the same bytes as the reference -------------------------------------------------------------


def test_the_header_is_byte_for_byte_what_safetensors_writes() -> None:
    tensors = {
        "scalar": torch.tensor(1.5),
        "half": torch.ones(3, 5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "ids": torch.arange(3),
        "mask": torch.tensor([True, False, True]),
        "float8": torch.ones(5).to(torch.float8_e4m3fn),
        ODD_NAME: torch.zeros(2, dtype=torch.float64),
    }
    expected = safetensors.torch.save(tensors, {"format": "pt"})
    order = ["ids", ODD_NAME, "empty", "scalar", "half", "float8", "mask"]
    entries, at = [], 0
    for value, name in ((tensors[name], name) for name in order):
        dtype = BY_NAME[str(value.dtype).removeprefix("torch.")]
        entries.append(HeaderEntry(name, dtype, tuple(value.shape), at, at + value.nbytes))
        at += value.nbytes
    assert encode_header(entries, {"format": "pt"}) == expected[:-at]


CODES = {
    "F64": "f8", "F32": "f4", "F16": "f2", "BF16": "bfloat16", "I64": "i8", "I32": "i4",
    "I16": "i2", "I8": "i1", "U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip
shapes = st.lists(st.integers(0, 4), max_size=4)
arrays = st.builds(
    lambda dtype, shape: np.zeros(shape, np.dtype(dtype)),
    st.sampled_from(list(CODES.values())),
    shapes,
)
names = st.text(max_size=12).filter(lambda name: name != "__metadata__")


@given(
    tensors=st.dictionaries(names, arrays, max_size=6),
    metadata=st.dictionaries(st.just("format") | st.just("x"), st.text(max_size=9), max_size=1),
)
def test_any_file_of_safetensors_is_read_right_and_its_header_encoded_again(
    file: Path,
    tensors: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]],
    metadata: dict[str, str],
) -> None:
    data = safetensors.numpy.save(tensors, metadata or None)
    file.write_bytes(data)
    found = read_safetensors(file)
    assert (found.path, found.metadata) == (file, metadata)
    assert {entry.name for entry in found.entries} == set(tensors)
    for entry in found.entries:
        array = tensors[entry.name]
        assert (entry.shape, entry.end - entry.begin) == (array.shape, array.nbytes)
        assert np.dtype(CODES[str(entry.dtype.code)]) == array.dtype
    assert encode_header(found.entries, metadata) == data[: found.data_start]


@pytest.mark.parametrize("code", BY_CODE)
def test_every_dtype_we_write_is_read_by_safetensors(file: Path, code: str) -> None:
    dtype = BY_CODE[code]
    entry = HeaderEntry("a", dtype, (2, 3), 0, 6 * dtype.itemsize)
    file.write_bytes(encode_header([entry], {}) + bytes(entry.end))
    assert read_safetensors(file).entries == (entry,)
    with safetensors.safe_open(file, framework="numpy") as reference:
        found = reference.get_slice("a")
        assert (found.get_dtype(), found.get_shape()) == (code, [2, 3])


@given(st.dictionaries(names, st.integers(0, 40), min_size=1, max_size=5))
def test_data_always_starts_at_a_multiple_of_8(sizes: Mapping[str, int]) -> None:
    entries, at = [], 0
    for name, size in sizes.items():
        entries.append(HeaderEntry(name, BY_CODE["U8"], (size,), at, at + size))
        at += size
    assert len(encode_header(entries, {"format": "pt"})) % 8 == 0


def test_entries_come_in_the_order_of_their_data_whatever_the_header_says(file: Path) -> None:
    header = {"b": tensor(offsets=(4, 8)), "z": tensor(shape=(0,), offsets=(4, 4)), "a": tensor()}
    file.write_bytes(container(header, DIGITS))
    assert [entry.name for entry in read_safetensors(file).entries] == ["a", "z", "b"]
    assert reference_accepts(file)


@pytest.mark.parametrize("header", [{}, {"__metadata__": {"format": "pt"}}])
def test_a_file_without_tensors_is_read(file: Path, header: dict[str, object]) -> None:
    file.write_bytes(container(header))
    assert read_safetensors(file).entries == ()
    assert reference_accepts(file)


def test_tensors_may_lie_beyond_the_first_4_gib(file: Path) -> None:
    sizes = {"a": (1 << 32) - 4, "b": 8, "c": 1 << 33}
    entries, at = [], 0
    for name, size in sizes.items():
        entries.append(HeaderEntry(name, BY_CODE["U8"], (size,), at, at + size))
        at += size
    header = encode_header(entries, {})
    file.write_bytes(header)
    os.truncate(file, len(header) + at)  # the data is a hole: it takes no space
    assert read_safetensors(file).entries == tuple(entries)
    assert reference_accepts(file)


# --- attacks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", INCOMPLETE.values(), ids=INCOMPLETE.keys())
def test_a_file_that_ends_too_early_is_incomplete(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    with pytest.raises(IncompleteError, match=file.name):
        read_safetensors(file)
    assert not reference_accepts(file)


@pytest.mark.parametrize("data", CORRUPT.values(), ids=CORRUPT.keys())
def test_a_file_that_breaks_a_rule_is_corrupt(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    assert not reference_accepts(file)
    with pytest.raises(CorruptError, match=file.name) as error:
        read_safetensors(file)
    assert str(error.value).encode()


@pytest.mark.parametrize("data", STRICTER.values(), ids=STRICTER.keys())
def test_what_safetensors_lets_pass_is_refused_all_the_same(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    assert reference_accepts(file)
    with pytest.raises(CorruptError, match=file.name):
        read_safetensors(file)


@pytest.mark.parametrize("size", range(8 + 64 + 8))
def test_a_file_cut_anywhere_is_incomplete(file: Path, size: int) -> None:
    whole = container(
        json.dumps({"a": tensor(shape=[8], offsets=[0, 8])}).ljust(64).encode(), DIGITS
    )
    assert size < len(whole) == 80
    file.write_bytes(whole[:size])
    with pytest.raises(IncompleteError):
        read_safetensors(file)


numbers = st.integers(-1, 9) | st.sampled_from([True, False, None, 4.0, 2**63, 2**64, "4"])
lists = st.lists(numbers, max_size=3)
sound = st.tuples(shapes, st.integers(0, 9)).map(
    lambda drawn: tensor("U8", drawn[0], [drawn[1], drawn[1] + prod(drawn[0])])
)
broken = st.builds(tensor, st.sampled_from(["U8", "I16", "F32", "X", None]), lists, lists)
headers = st.dictionaries(
    st.sampled_from(["a", "b", "__metadata__", "\ud800"]),
    sound | broken | st.dictionaries(st.just("k"), st.just("v") | numbers, max_size=1),
    max_size=2,
)


@given(header=headers, size=st.integers(0, 16))
def test_no_header_passes_here_that_safetensors_refuses(
    file: Path, header: dict[str, object], size: int
) -> None:
    file.write_bytes(container(header, bytes(size)))
    try:
        read_safetensors(file)
    except UnshardError:
        return
    assert reference_accepts(file)


@given(
    edits=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_flipped_bytes_pass_only_where_safetensors_lets_them_pass(
    file: Path, edits: list[tuple[int, int]]
) -> None:
    header = {"a": tensor(), "b": tensor("I16", [2, 1], [4, 8]), "__metadata__": {"format": "pt"}}
    data = bytearray(container(header, DIGITS))
    for place, byte in edits:
        data[place % len(data)] = byte
    file.write_bytes(data)
    try:
        read_safetensors(file)
    except UnshardError as error:
        assert file.name in str(error)  # noqa: PT017 (an error is allowed, not demanded)
    else:
        assert reference_accepts(file)
