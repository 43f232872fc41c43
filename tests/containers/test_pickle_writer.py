"""Pickles of plain values: torch's restricted unpickler gives every one of them back."""

import io
import math
import pickle
import struct
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from plain import same
from properties import examples
from unshard.containers.pickles.pickler import MAX_DEPTH
from unshard.containers.torch_files.writer import (
    Plain,
    SavedTensor,
    write_pickle,
    write_torch_file,
)
from unshard.tensors.dtypes import BY_NAME

LONGEST = 2 ** (8 * 255 - 1)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-LONGEST, LONGEST - 1)
    | st.integers(-(2**33), 2**33)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec=None))
    | st.binary()
)
keys = scalars | st.tuples(scalars, scalars)


def containers(inner: st.SearchStrategy[Plain]) -> st.SearchStrategy[Plain]:
    dicts = st.dictionaries(keys, inner, max_size=5)
    lists = st.lists(inner, max_size=5)
    return (
        lists
        | lists.map(tuple)
        | dicts
        | dicts.map(OrderedDict)
        | st.dictionaries(keys, st.integers(), max_size=5).map(Counter)
        | st.sets(keys, max_size=5)
    )


values = st.recursive(scalars, containers, max_leaves=30)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("values") / "value.pt"


@settings(max_examples=examples(1000))
@given(value=values)
def test_torch_gives_any_plain_value_back(place: Path, value: Plain) -> None:
    write_torch_file(place, value)
    assert same(torch.load(place, weights_only=True), value)


@settings(max_examples=examples(1000))
@given(value=values)
def test_pythons_own_unpickler_gives_it_back_too(value: Plain) -> None:
    pickled, tensors = write_pickle(value)
    assert same(pickle.loads(pickled), value)
    assert tensors == ()


@pytest.mark.parametrize("value", [math.inf, -math.inf, -0.0, 5e-324])
def test_special_floats_keep_their_bits(place: Path, value: float) -> None:
    write_torch_file(place, value)
    assert struct.pack("d", torch.load(place)) == struct.pack("d", value)


def test_nan_stays_nan(place: Path) -> None:
    write_torch_file(place, [math.nan])
    assert math.isnan(torch.load(place)[0])


def test_the_order_of_a_set_does_not_show() -> None:
    one, two = {0, 8}, {8, 0}  # they share a slot: the first one comes first
    assert list(one) != list(two)
    assert write_pickle(one) == write_pickle(two)


def test_subclasses_are_written_as_what_they_are_made_of() -> None:
    made = defaultdict(list, {"a": [1]})
    assert same(pickle.loads(write_pickle(made)[0]), {"a": [1]})


@pytest.mark.parametrize("value", [LONGEST, -LONGEST - 1])
def test_an_integer_that_torch_cannot_read_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match="an integer of 256 bytes; torch reads up to 255"):
        write_pickle(value)


def test_what_is_nested_deeper_than_any_state_is_refused() -> None:
    value: Plain = 1
    for _ in range(MAX_DEPTH):
        value = [value]
    assert same(pickle.loads(write_pickle(value)[0]), value)
    with pytest.raises(ValueError, match="nested deeper than 100"):
        write_pickle([value])


def test_a_cycle_is_written_as_python_writes_it() -> None:
    endless: list[Plain] = []
    endless.append(endless)
    assert write_pickle(endless)[0] == pickle.dumps(endless, 2)


@pytest.mark.parametrize("value", [io.BytesIO(), object(), 1j, frozenset({1}), Path("x"), [print]])
def test_anything_else_is_refused(value: Plain) -> None:
    with pytest.raises(TypeError, match="cannot be written"):
        write_pickle(value)


def test_a_tensor_in_a_set_is_refused() -> None:
    tensor = SavedTensor(BY_NAME["int8"], (1,), b"\1")
    with pytest.raises(TypeError, match="a tensor in a set"):
        write_pickle({tensor})


ordered = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(keys, inner, max_size=5)
        | st.dictionaries(keys, inner, max_size=5).map(OrderedDict)
    ),
    max_leaves=30,
)


@settings(max_examples=examples(1000))
@given(ordered)
def test_the_opcodes_are_those_of_pythons_own_pickler(value: Plain) -> None:
    assume(
        "b''" not in repr(value)
    )  # torch's restricted unpickler does not know how Python does it
    assert write_pickle(value)[0] == pickle.dumps(value, 2)


@pytest.mark.parametrize("count", [0, 1, 2, 999, 1000, 1001, 2000, 2001])
def test_many_entries_are_added_in_batches_as_python_adds_them(count: int) -> None:
    entries = {f"name {number}": [number] * 300 for number in range(count)}
    for value in (list(entries), tuple(entries), entries, OrderedDict(entries)):
        assert write_pickle(value)[0] == pickle.dumps(value, 2)
