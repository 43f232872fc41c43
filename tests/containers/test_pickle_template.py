"""A pickle that is compared with a template gives what the machine makes of it."""

import io
import pickle
from collections import OrderedDict
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unshard.containers.pickles.machine import MalformedPickleError, SaltedInt
from unshard.containers.pickles.records import Persistent, Record, Value
from unshard.containers.pickles.template import make_template
from unshard.containers.pickles.unpickle import unpickle
from unshard.read.torch_save.template_slots import with_numbers

NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-2, 300) | st.integers(0, 1 << 33)
LEAVES = NUMBERS | st.none() | st.booleans() | st.text(max_size=3) | st.floats(allow_nan=False)
NESTED = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


class Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> object:
        return ("storage", str(obj), int(min(abs(obj), 1e6))) if isinstance(obj, float) else None


def pickled(value: object) -> bytes:
    file = io.BytesIO()
    Pickler(file, 2).dump(value)
    return file.getvalue()


def shown(value: Value) -> object:
    """Return a value whose parts can be compared; records are compared by identity."""
    match value:
        case Record(callee, args, state, items, elements):
            return ("record", *map(shown, (callee, args, state, items or [], elements or [])))
        case Persistent(pid):
            return ("persistent", shown(pid))
        case dict():
            return {key: shown(one) for key, one in value.items() if type(key) is not SaltedInt}
        case tuple() | list():
            return [type(value).__name__, *map(shown, value)]
    return (type(value).__name__, value)


def other_numbers(value: object, draw: st.DrawFn) -> object:
    """Return the same value with other numbers, of the kinds that a pickle writes alike."""
    if type(value) is int:
        return draw(NUMBERS)
    if isinstance(value, dict):
        made = {key: other_numbers(one, draw) for key, one in value.items()}
        return OrderedDict(made) if isinstance(value, OrderedDict) else made
    if isinstance(value, list | tuple):
        return type(value)(other_numbers(one, draw) for one in value)
    return value


def agree(template_of: bytes, other: bytes) -> bool:
    """Compare what a template and the machine make of a pickle; return whether it is alike."""
    template, value = make_template(template_of)
    found = template.numbers_in(other)
    if found is None or not found.fits.all():
        return False
    assert shown(with_numbers(value, found.values)) == shown(unpickle(other))
    return True


@given(value=NESTED)
def test_a_pickle_is_like_itself(value: object) -> None:
    assert agree(pickled(value), pickled(value))


@given(data=st.data(), value=NESTED)
def test_numbers_of_any_width_are_found(data: st.DataObject, value: object) -> None:
    one, other = (other_numbers(value, cast("st.DrawFn", data.draw)) for _ in range(2))
    assert agree(pickled(one), pickled(other))


@given(data=st.data(), value=NESTED)
def test_a_changed_byte_is_a_changed_number_or_is_noticed(
    data: st.DataObject, value: object
) -> None:
    whole = pickled(value)
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    agree(whole, bytes(changed))


@given(data=st.data(), value=NESTED)
def test_bytes_that_are_lost_or_added_are_noticed(data: st.DataObject, value: object) -> None:
    whole = pickled(value)
    at = data.draw(st.integers(0, len(whole)))
    agree(whole, whole[:at])
    agree(whole, whole[:at] + data.draw(st.binary(min_size=1, max_size=5)) + whole[at:])


@pytest.mark.parametrize(
    "data",
    [
        b"I281474976710656\n.",
        b"L281474976710656L\n.",
        b"\x8b\x07\0\0\0\0\0\0\0\0\0\x01\0.",
        b"cm\nn\n)K\0\x92.",
    ],
    ids=["text integer", "text long", "long of four bytes", "keyword arguments"],
)
def test_no_template_is_made_where_a_number_could_pass_for_another(data: bytes) -> None:
    with pytest.raises(MalformedPickleError):
        make_template(data)


def test_a_number_of_more_than_64_bits_does_not_fit() -> None:
    template, _ = make_template(pickled([1 << 64, 1]))
    assert template.numbers.fits.tolist() == [False, True]
