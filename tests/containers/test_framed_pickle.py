"""Pickles of protocol 4 are those of Python's own pickler, byte for byte."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from properties import examples
from unshard.containers.pickles.pickler import pickled

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


def containers(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    lists = st.lists(inner, max_size=5)
    return lists | lists.map(tuple) | st.dictionaries(st.text(), inner, max_size=5)


@settings(max_examples=examples(300))
@given(st.recursive(scalars, containers, max_leaves=30))
def test_any_value_is_pickled_as_by_python(value: object) -> None:
    assert pickled(value, protocol=4) == pickle.dumps(value, 4)


@pytest.mark.parametrize("count", [1, 255, 256, 999, 1000, 1001, 20_000])
def test_long_values_are_cut_into_the_same_frames(count: int) -> None:
    parts = [f"layers.{number}.weight" for number in range(count)]
    value: dict[str, object] = {part: ("model", part, at, []) for at, part in enumerate(parts)}
    written: list[object] = ["n" * count, parts, value]
    for one in written:
        assert pickled(one, protocol=4) == pickle.dumps(one, 4)


def test_bytes_and_sets_are_refused() -> None:
    refused: list[object] = [b"", {1}, object()]
    for value in refused:
        with pytest.raises(TypeError, match="cannot be written"):
            pickled([value], protocol=4)
