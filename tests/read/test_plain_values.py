"""From pickles to plain values: what real torch saves comes back equal; the rest is named."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from plain import same
from properties import examples
from ranks import bits
from unshard.containers.torch_files.reader import read_torch_file
from unshard.containers.torch_files.writer import Plain, SavedTensor, write_torch_file
from unshard.errors import CorruptError
from unshard.read.training_state import plain_values as module
from unshard.read.training_state.plain_values import plain_values
from unshard.tensors.catalog import ByteRange
from unshard.with_notes import WithNotes


class Thing:
    """What no reader knows."""


def read(tmp_path: Path, value: object, **how: bool) -> WithNotes[Plain]:
    torch.save(value, tmp_path / "x.pt", **how)
    return plain_values(read_torch_file(tmp_path / "x.pt"))


def again(tmp_path: Path, value: object) -> object:
    """Save with torch, read, write, load with torch."""
    found = read(tmp_path, value)
    assert found.notes == ()
    write_torch_file(tmp_path / "y.pt", found.value)
    return torch.load(tmp_path / "y.pt", weights_only=True)


def sample() -> dict[str, Plain]:
    return {
        "numbers": [1, -(2**40), 2**200, 1.5, float("inf"), True, None],
        "texts": ("a", "ü", "\ud800", b"", b"\x00\xff"),
        "sets": {1, "a", (2, None)},
        "keys": {3: 1, None: 2, (1, "x"): 3, b"k": 4},
        "counter": Counter({10: 1, 20: -2}),
        "ordered": OrderedDict(b=1, a=OrderedDict()),
        "nested": [[], (), {}, set(), [({"a": [1]},)]],
    }


def test_what_torch_saves_comes_back_equal(tmp_path: Path) -> None:
    assert same(again(tmp_path, sample()), sample())


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_is_read(tmp_path: Path, protocol: int) -> None:
    torch.save(sample(), tmp_path / "x.pt", pickle_protocol=protocol)
    assert same(plain_values(read_torch_file(tmp_path / "x.pt")).value, sample())


def test_the_legacy_format_is_read(tmp_path: Path) -> None:
    value = {"a": torch.arange(5), "b": [1]}
    found = read(tmp_path, value, _use_new_zipfile_serialization=False).value
    assert isinstance(found, dict)
    assert found["a"].source == bits(value["a"])  # type: ignore[arg-type]  # the tensor


keys = st.none() | st.booleans() | st.integers(-(2**64) + 1, 2**64 - 1) | st.text() | st.binary()
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys | st.tuples(keys, keys), inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.sets(keys, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=examples(1000))
@given(value=values)
def test_what_was_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, value: Plain
) -> None:
    path = tmp_path_factory.getbasetemp() / "value.pt"
    write_torch_file(path, value)
    found = plain_values(read_torch_file(path))
    assert same(found.value, value)
    assert found.notes == ()


def test_numbers_of_numpy_become_pythons_and_arrays_tensors(tmp_path: Path) -> None:
    made = {
        "scalars": [np.float64(0.1), np.float32(0.5), np.int64(7), np.bool_(True)],  # noqa: FBT003
        "array": np.arange(6, dtype=np.uint16).reshape(2, 3),
        "empty": np.zeros((0, 2), np.float32),
    }
    found = again(tmp_path, made)
    assert isinstance(found, dict)
    assert same(found["scalars"], [0.1, 0.5, 7, True])
    assert found["array"].dtype is torch.uint16
    assert found["array"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["empty"].shape == (0, 2)


def test_a_defaultdict_becomes_a_dict_and_a_size_a_tuple(tmp_path: Path) -> None:
    made = {"a": defaultdict(list, {"x": [1]}), "b": torch.Size([2, 3])}
    assert same(again(tmp_path, made), {"a": {"x": [1]}, "b": (2, 3)})


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.arange(7),
    "number": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 3),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "slice": lambda: torch.arange(20)[3:9],
    "rows": lambda: torch.arange(20).reshape(4, 5)[1:3],
    "expanded": lambda: torch.arange(3).expand(4, 3),
    "parameter": lambda: Parameter(torch.ones(2)),
    "bfloat16": lambda: torch.ones(3).bfloat16(),
    "large": lambda: torch.rand(40_000),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_come_back_bit_for_bit(tmp_path: Path, name: str) -> None:
    tensor = TENSORS[name]()
    found = again(tmp_path, [tensor])
    assert isinstance(found, list)
    assert found[0].dtype is tensor.dtype
    assert found[0].shape == tensor.shape
    assert bits(found[0]) == bits(tensor)


def test_large_tensors_stay_in_their_file(tmp_path: Path) -> None:
    found = read(tmp_path, [torch.rand(40_000), torch.rand(3)]).value
    assert isinstance(found, list)
    assert isinstance(found[0], SavedTensor)
    assert isinstance(found[0].source, ByteRange)
    assert isinstance(found[1].source, bytes)


def test_what_has_no_plain_form_is_left_out_by_name(tmp_path: Path) -> None:
    made = {
        "kept": 1,
        "thing": Thing(),
        "type": torch.float32,
        "list": [1, Thing(), 3],
        "tuple": (Thing(),),
        "inner": {"objects": np.array([None]), "kept": 2},
        "sparse": torch.eye(2).to_sparse(),
        "long": 1 << 3000,
        2: {"x": 1j},
    }
    found = read(tmp_path, made)
    assert found.value == {
        "kept": 1,
        "list": [1, None, 3],
        "tuple": (None,),
        "inner": {"kept": 2},
        2: {},
    }
    thing = "an instance of test_plain_values.Thing"
    told = dict(one.split(": ", maxsplit=1) for one in found.notes)
    assert told.keys() == {
        "thing", "type", "list[1]", "tuple[0]", "inner.objects", "sparse", "long", "[2].x",
    }  # fmt: skip
    assert told["thing"] == told["list[1]"] == told["tuple[0]"] == thing
    assert told["type"] == "torch.float32"
    assert told["inner.objects"] == "a numpy array or scalar of dtype 'O8'"
    assert told["long"] == "an integer of 3001 bits"
    assert "complex" in told["[2].x"]


def test_keys_that_cannot_be_written_are_left_out(tmp_path: Path) -> None:
    found = read(tmp_path, {"a": {torch.float32: 1, "b": 2}, "c": {torch.int8, "d"}})
    assert found.value == {"a": {"b": 2}, "c": {"d"}}
    assert len(found.notes) == 2


def test_keys_of_odd_characters_are_shown_as_such(tmp_path: Path) -> None:
    found = read(tmp_path, {"\x1b[31m": Thing(), "\ud800": Thing(), "ü": Thing()})
    places = [one.split(": ")[0] for one in found.notes]
    assert places == ["['\\x1b[31m']", "['\\ud800']", "ü"]


class Listed(list):  # type: ignore[type-arg]
    """As configurations have them."""


def test_a_subclass_of_list_keeps_its_elements(tmp_path: Path) -> None:
    found = read(tmp_path, {"betas": Listed([0.8, 0.95]), "none": Listed()})
    assert found.value == {"betas": [0.8, 0.95]}
    assert [one.split(": ")[0] for one in found.notes] == ["betas", "none"]


class Keyed(dict):  # type: ignore[type-arg]
    """As configurations have them, too."""


def test_a_subclass_of_dict_keeps_its_items(tmp_path: Path) -> None:
    found = read(tmp_path, {"rates": Keyed(a=[1]), "none": Keyed()})
    assert found.value == {"rates": {"a": [1]}}
    assert [one.split(": ")[0] for one in found.notes] == ["rates", "none"]


def test_values_of_omegaconf_are_kept() -> None:
    """verl gives AdamW its betas as the configuration has them, and torch needs them to go on."""
    file = Path(__file__).parents[1] / "data" / "omegaconf.pt"
    found = plain_values(read_torch_file(file))
    sub = {"x": None, "deep": {"a": ["b", 1]}}
    assert found.value == {"betas": [0.9, 0.95], "sub": sub, "rate": 0.5}
    unresolved = [one for one in found.notes if "only OmegaConf resolves" in one]
    assert [one.split(": ")[0] for one in unresolved] == ["sub.y", "sub.z"]
    assert "betas: the class of an instance of omegaconf" in found.notes[0]


def test_attributes_of_a_dict_are_named(tmp_path: Path) -> None:
    made: OrderedDict[str, int] = OrderedDict(a=1)
    made.note = "lost"  # type: ignore[attr-defined]  # as `state_dict()` does with _metadata
    found = read(tmp_path, {"state": made})
    assert same(found.value, {"state": OrderedDict(a=1)})
    assert found.notes == ("state: the attributes of an instance of collections.OrderedDict",)


def test_what_contains_itself_ends(tmp_path: Path) -> None:
    made: dict[str, object] = {"a": 1}
    made["self"] = made
    found = read(tmp_path, made)
    assert isinstance(found.value, dict)
    assert found.value["a"] == 1
    assert "nested deeper than 80" in found.notes[0]


def test_what_grows_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_VALUES", 10_000)
    made: list[object] = [1]
    for _ in range(60):
        made = [made, made]
    with pytest.raises(CorruptError, match="has more than 10000 values"):
        read(tmp_path, made)


def test_tensors_far_larger_than_the_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match="far larger than the file"):
        read(tmp_path, [torch.zeros(1).expand(1 << 40)])


def test_a_tensor_with_a_flipped_bit_is_left_out(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(100), "b": 1}, tmp_path / "x.pt")
    file = read_torch_file(tmp_path / "x.pt")
    data = bytearray((tmp_path / "x.pt").read_bytes())
    data[file.storages["0"].offset + 9] ^= 4
    (tmp_path / "x.pt").write_bytes(data)
    found = plain_values(read_torch_file(tmp_path / "x.pt"))
    assert found.value == {"b": 1}
    assert found.notes == ("a: a tensor that does not fit its checksum (CRC-32)",)


def test_a_file_that_holds_one_thing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match="has no plain values"):
        read(tmp_path, Thing())
