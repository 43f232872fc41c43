"""The safetensors container: the bytes of the reference implementation, and no laxer than it."""

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from struct import pack

import ml_dtypes  # noqa: F401 (teaches numpy bfloat16)
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from unshard.containers.safetensors_file import (
    MAX_HEADER,
    HeaderEntry,
    encode_header,
    read_safetensors,
)
from unshard.errors import CorruptError, IncompleteError, UnshardError
from unshard.tensors.dtypes import BY_CODE, BY_NAME

DIGITS = b"12345678"
ODD_NAME = 'näme "quoted" \\ \n \x1f \x7f 😀'


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a path that every example may overwrite."""
    return tmp_path_factory.mktemp("safetensors") / "model.safetensors"


def container(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """Return a file of a header (JSON, or bytes as they are) and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return pack("<Q", len(text) if length is None else length) + text + data


def tensor(
    code: object = "U8", shape: object = (4,), offsets: object = (0, 4)
) -> dict[str, object]:
    return {"dtype": code, "shape": shape, "data_offsets": offsets}


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

ONE = b'{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'

INCOMPLETE: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": b"\x02" + bytes(6),
    "truncated header": container({"a": tensor()})[:20],
    "no header": pack("<Q", 10),
    "no data": container({"a": tensor()}),
    "a byte of data missing": container({"a": tensor()}, b"123"),
}

CORRUPT: dict[str, bytes] = {
    "header of 2**63 bytes": container({"a": tensor()}, length=2**63),
    "header longer than any": container({"a": tensor()}, length=MAX_HEADER + 1),
    "header of no bytes": container(b"", b"1234"),
    "not JSON": container(b"{hello}"),
    "JSON and more": container(b'{"a":' + ONE + b"}x", b"1234"),
    "not UTF-8": container(b'{"\xff":' + ONE + b"}", b"1234"),
    "byte order mark": container(b"\xef\xbb\xbf{}"),
    "list": container([]),
    "text": container("a"),
    "nested dicts": container(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "nested lists": container(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "same name, other data": container(
        b'{"a":' + ONE + b',"a":' + ONE.replace(b"[0,4]", b"[4,8]") + b"}", DIGITS
    ),
    "dtype twice": container(b'{"a":' + ONE.replace(b"{", b'{"dtype":"U8",') + b"}", b"1234"),
    "hole": container({"a": tensor(), "b": tensor(offsets=(5, 9))}, DIGITS + b"9"),
    "hole at the start": container({"a": tensor(offsets=(4, 8))}, DIGITS),
    "overlap": container({"a": tensor(), "b": tensor(offsets=(2, 6))}, b"123456"),
    "two tensors in one place": container({"a": tensor(), "b": tensor()}, b"1234"),
    "trailing bytes": container({"a": tensor()}, b"12345"),
    "trailing bytes and no tensor": container({}, b"1"),
    "unknown dtype": container({"a": tensor("X8")}, b"1234"),
    "dtype in small letters": container({"a": tensor("u8")}, b"1234"),
    "dtype a number": container({"a": tensor(8)}, b"1234"),
    "dtype null": container({"a": tensor(None)}, b"1234"),
    "negative shape": container({"a": tensor(shape=(-2, -2))}, b"1234"),
    "bool in shape": container({"a": tensor(shape=(True, 4))}, b"1234"),
    "float in shape": container({"a": tensor(shape=(4.0,))}, b"1234"),
    "shape no list": container({"a": tensor(shape=4)}, b"1234"),
    "shape beyond 64 bits": container({"a": tensor(shape=(2**32, 2**32, 4))}, b"1234"),
    "size beyond 64 bits": container({"a": tensor(shape=(2**64 + 4,))}, b"1234"),
    "no elements beyond 64 bits": container({"a": tensor(shape=(2**40, 2**40, 0), offsets=(0, 0))}),
    "shape of 5,400 digits": container({"a": tensor(shape=(10**18,) * 300)}, b"1234"),
    "shape and bytes differ": container({"a": tensor("I16")}, b"1234"),
    "offsets reversed": container({"a": tensor(offsets=(4, 0))}, b"1234"),
    "negative offset": container({"a": tensor(offsets=(-4, 0))}),
    "bools as offsets": container({"a": tensor(shape=(1,), offsets=(False, True))}, b"1"),
    "floats as offsets": container({"a": tensor(offsets=(0.0, 4.0))}, b"1234"),
    "three offsets": container({"a": tensor(offsets=(0, 4, 4))}, b"1234"),
    "no shape": container({"a": {"dtype": "U8", "data_offsets": [0, 4]}}, b"1234"),
    "entry no object": container({"a": [0, 4]}, b"1234"),
    "NaN": container(b'{"a":' + ONE.replace(b"}", b',"x":NaN}') + b"}", b"1234"),
    "metadata a text": container({"__metadata__": "x"}),
    "metadata of numbers": container({"__metadata__": {"a": 1}}),
    "metadata nested": container({"__metadata__": {"a": {"b": "c"}}}),
    "half a surrogate pair as name": container(b'{"\\ud800":' + ONE + b"}", b"1234"),
    "half a surrogate pair as metadata": container(b'{"__metadata__":{"a":"\\ud800"}}'),
}

# What safetensors itself lets pass: of two equal names it takes one in silence.
STRICTER: dict[str, bytes] = {
    "same name, same data": container(b'{"a":' + ONE + b',"a":' + ONE + b"}", b"1234"),
    "space before the header": container(b' {"a":' + ONE + b"}", b"1234"),
    "metadata null": container({"__metadata__": None}),
    "elements of four bits": container({"a": tensor("F4", (8,))}, b"1234"),
}


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
