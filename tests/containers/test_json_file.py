"""JSON that others wrote: what is taken, and what is refused with the file and the key named."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import unshard
from hostile.texts import BAD_JSON, nested
from ranks import save_ranks, some_tensors
from unshard import CorruptError, UnshardError
from unshard.containers.json_file import (
    MAX_JSON,
    MAX_JSON_DEPTH,
    JsonFields,
    json_object,
    parsed_object,
)

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")


def test_what_python_writes_is_taken() -> None:
    text = '{"a": [1, NaN, -Infinity, 1e999], "b": {"ü": "\\ud83d\\ude00"}, "": null}'
    found = parsed_object(text.encode(), "x")
    assert found.keys() == {"a", "b", ""}
    assert found["b"] == {"ü": "\U0001f600"}
    assert parsed_object(b'\xef\xbb\xbf{"a": 1}', "x") == {"a": 1}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(), inside, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_it_is_what_python_reads(fields: dict[str, object]) -> None:
    for ascii_only in (True, False):
        assert parsed_object(json.dumps(fields, ensure_ascii=ascii_only).encode(), "x") == fields


@given(st.binary(max_size=40) | st.text('{}[]":,\\ud80019eE+-. ntrufalse', max_size=40))
def test_anything_else_is_refused(data: bytes | str) -> None:
    text = data if isinstance(data, bytes) else data.encode()
    try:
        found = parsed_object(text, "the file")
    except CorruptError as error:
        message = str(error)
    else:
        message = "the file is taken"
        json.dumps(found, ensure_ascii=False).encode()
    assert message.startswith("the file")


@pytest.mark.parametrize("kind", BAD_JSON)
def test_what_is_wrong_is_reported(kind: str) -> None:
    text, message = BAD_JSON[kind]
    with pytest.raises(CorruptError, match="the file") as caught:
        parsed_object(text, "the file")
    assert message in str(caught.value)


def test_real_depths_are_taken() -> None:
    assert parsed_object(json.dumps(nested(MAX_JSON_DEPTH)).encode(), "x") == nested(MAX_JSON_DEPTH)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_not_a_regular_file_is_refused_without_waiting(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "config.json")
    with pytest.raises(CorruptError, match=r"config\.json: cannot be read: (not a reg|Is a dir)"):
        json_object(tmp_path / "config.json")


def test_a_file_too_long_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(CorruptError, match=rf"config\.json: longer than {MAX_JSON} bytes"):
        json_object(path)


@pytest.mark.parametrize(
    ("take", "value", "expected"),
    [
        ("number", "1", "a number"),
        ("number", True, "a number"),
        ("number", -0.5, "a finite number, not below 0"),
        ("number", float("inf"), "a finite number, not below 0"),
        ("number", 10**400, "a finite number, not below 0"),
        ("count", 1.0, "a whole number, not below 0"),
        ("count", True, "a whole number, not below 0"),
        ("flag", 1, "true or false"),
        ("text", ["a"], "a string"),
        ("names", "a", "a list of names"),
        ("names", ["a", 1], "a list of names"),
        ("inside", [], "an object"),
    ],
)
def test_a_key_of_another_type_is_named(take: str, value: object, expected: str) -> None:
    fields = JsonFields(Path("f.json"), {"outer": {"key": value, "none": None}}).inside("outer")
    with pytest.raises(CorruptError, match=rf"f\.json: outer\.key is not {expected}"):
        getattr(fields, take)("key")


def test_null_is_the_same_as_nothing() -> None:
    for fields in (JsonFields(Path("f.json"), {"key": None}), JsonFields(Path("f.json"), {})):
        assert [fields.number("key"), fields.count("key"), fields.flag("key")] == [None] * 3
        assert [fields.text("key"), fields.names("key")] == [None, ()]
        assert fields.inside("key").fields == {}


# Every JSON file that unshard reads, end to end: each bad one ends in an error that names it.

BROKEN: dict[str, object] = {
    "a list": [1],
    "900 deep": nested(900),
    "half a pair": {"\ud800": 1},
    "model_type a list": {"model_type": []},
    "model_type an object": {"model_type": {"a": 1}},
    "peft_type a list": {"peft_type": []},
    "peft_type an object": {"peft_type": {}},
    "world_size a string": {"world_size": "2"},
    "a map of lists": {"weight_map": {"w": []}},
    "a file of 300 characters": {"weight_map": {"w": "x" * 300}},
    "options a list": {"options": []},
    "include a list": {"options": {"include": ["a"]}},
}
READ = {
    "config.json": ["a list", "900 deep", "half a pair", "model_type a list"],
    "fsdp_config.json": ["a list", "900 deep", "half a pair", "world_size a string"],
    "lora_train_meta.json": ["a list", "900 deep", "half a pair", "peft_type a list"],
    "adapter_config.json": ["a list", "900 deep", "half a pair", "peft_type an object"],
    "model.safetensors.index.json": ["a list", "900 deep", "half a pair", "a map of lists"],
    "unshard.json": ["a list", "900 deep", "half a pair", "options a list", "include a list"],
}
CASES = [(name, kind) for name, kinds in READ.items() for kind in kinds] + [
    ("config.json", "model_type an object"),
    ("adapter_config.json", "peft_type a list"),
    ("model.safetensors.index.json", "a file of 300 characters"),
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_broken_file_next_to_a_checkpoint_is_named(tmp_path: Path, name: str, kind: str) -> None:
    tensors = some_tensors()
    lora = {
        "base_model.model.q.base_layer.weight": torch.ones(4, 4),
        "base_model.model.q.lora_A.default.weight": torch.ones(2, 4),
        "base_model.model.q.lora_B.default.weight": torch.ones(4, 2),
    }
    save_ranks(tmp_path / "in", lora if "adapter" in name or "lora" in name else tensors, 2)
    (tmp_path / "whole").mkdir()
    save_file(tensors, tmp_path / "whole" / "model.safetensors")
    is_whole = name in ("unshard.json", "model.safetensors.index.json")
    folder = tmp_path / ("whole" if is_whole else "in")
    (folder / name).write_text(json.dumps(BROKEN[kind]))
    with pytest.raises(UnshardError, match=name):
        if name == "unshard.json":
            unshard.verify(tmp_path / "whole", tmp_path / "in")
        else:
            unshard.merge(folder, tmp_path / "out", config="none")
    assert not (tmp_path / "out").exists()
