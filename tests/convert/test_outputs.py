"""Which tensors come out, and in which dtype."""

from pathlib import Path
from typing import get_args

import ml_dtypes
import numpy as np
import pytest
import torch

from unshard import MergeOptions
from unshard.convert import outputs
from unshard.convert.outputs import ConvertedTensor, Precision, finish, precision
from unshard.convert.recipes import Recipe, take
from unshard.errors import ConversionError, UsageError
from unshard.keywords import Alias, Cast, DtypeLike
from unshard.read.model_config import Fields, ModelConfig
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.chunk_rows import ChunkRows
from unshard.tensors.dtypes import BY_NAME, CASTS, DType

NEVER_CAST = sorted(name for name, dtype in BY_NAME.items() if not dtype.castable and dtype.code)


def catalog(**dtypes: str) -> dict[str, Recipe]:
    """Return 2 x 3 tensors, by name and dtype."""
    return named(dtypes)


def named(dtypes: dict[str, str]) -> dict[str, Recipe]:
    return {
        name: take(TensorEntry(name, BY_NAME[dtype], (2, 3), ChunkRows(2).table((Path("f"),))))
        for name, dtype in dtypes.items()
    }


def convert(tensors: dict[str, Recipe], target: DType | None) -> list[ConvertedTensor]:
    return finish(tensors, Precision(target))


def target_dtype(choice: DtypeLike, config: Fields | None) -> DType | None:
    known = None if config is None else ModelConfig(config)
    return precision(choice, known, None, None).target


# convert


def test_tensors_come_out_whole_under_their_names_in_the_checkpoints_order() -> None:
    source = catalog(z="float32", a="int64", m="bfloat16")
    converted = convert(source, None)
    assert [output.name for output in converted] == ["z", "a", "m"]
    assert [output.recipe for output in converted] == list(source.values())


@pytest.mark.parametrize("dtype", sorted(name for name, dtype in BY_NAME.items() if dtype.code))
def test_without_a_target_every_dtype_stays(dtype: str) -> None:
    (output,) = convert(catalog(w=dtype), None)
    assert output.dtype is BY_NAME[dtype]


@pytest.mark.parametrize("target", CASTS)
@pytest.mark.parametrize("stored", ["float64", "float32", "float16", "bfloat16"])
def test_floats_take_the_target_dtype(stored: str, target: str) -> None:
    (output,) = convert(catalog(w=stored), BY_NAME[target])
    assert output.dtype is BY_NAME[target]


@pytest.mark.parametrize("target", CASTS)
@pytest.mark.parametrize("stored", NEVER_CAST)
def test_integers_bools_complex_and_8_bit_floats_are_never_cast(stored: str, target: str) -> None:
    (output,) = convert(catalog(w=stored), BY_NAME[target])
    assert output.dtype is BY_NAME[stored]


def test_a_complex128_tensor_is_refused_by_name() -> None:
    with pytest.raises(
        ConversionError, match="tensor freqs: safetensors does not have the dtype complex128"
    ):
        convert(catalog(w="float32", freqs="complex128"), None)


@pytest.mark.parametrize("name", ["__metadata__", "a\nb", "a\0b", "a\x7fb", "a\ud800b", "a\u202eb"])
def test_names_that_a_header_cannot_hold_are_refused(name: str) -> None:
    with pytest.raises(ConversionError, match="its name is not allowed") as raised:
        convert(named({name: "float32"}), None)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("name", ["a b", "wéight", "层.权重", 'a"b', "a\\b", "__metadata__.w"])
def test_other_names_are_kept_as_they_are(name: str) -> None:
    (output,) = convert(named({name: "float32"}), None)
    assert output.name == name


def test_all_tensors_that_cannot_be_held_are_listed_at_once() -> None:
    with pytest.raises(ConversionError) as raised:
        convert(named({"one": "complex128", "two\n": "int8", "three": "complex128"}), None)
    assert all(name in str(raised.value) for name in ("one", "two", "three", "3 problems"))


# target_dtype


def test_keep_means_no_target() -> None:
    assert target_dtype("keep", {"dtype": "bfloat16"}) is None


@pytest.mark.parametrize("choice", CASTS)
def test_a_named_dtype_is_the_target_whatever_the_config_says(choice: Cast) -> None:
    assert target_dtype(choice, {"dtype": "float16"}) is BY_NAME[choice]


def test_type_checkers_know_the_other_names_of_dtypes() -> None:
    assert {*get_args(Alias)} == outputs._ALIASES.keys()


@pytest.mark.parametrize("choice", CASTS)
def test_the_configs_dtype_is_the_target_where_it_is_asked_for(choice: str) -> None:
    assert target_dtype("config", {"torch_dtype": choice}) is BY_NAME[choice]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("half", "float16"),
        ("fp32", "float32"),
        ("float", "float32"),
        ("torch.bfloat16", "bfloat16"),
        (np.float16, "float16"),
        (np.dtype("float32"), "float32"),
        (ml_dtypes.bfloat16, "bfloat16"),
        (np.dtype(ml_dtypes.bfloat16), "bfloat16"),
        (torch.bfloat16, "bfloat16"),
        (torch.half, "float16"),
    ],
    ids=repr,
)
def test_dtypes_are_taken_as_numpy_ml_dtypes_and_torch_spell_them(
    given: DtypeLike, meant: str
) -> None:
    assert target_dtype(given, None) is BY_NAME[meant]
    assert MergeOptions(dtype=given).recorded["dtype"] == meant


UNKNOWN = (
    *("float64", "int8", "bfloat 16", "", "Keep"),
    *(torch.int8, torch.float64, np.float64, np.dtype("int8"), float, int, None, 3, ["bf16"]),
)


@pytest.mark.parametrize("choice", UNKNOWN, ids=repr)
def test_an_unknown_choice_is_answered_with_the_known_ones(choice: object) -> None:
    with pytest.raises(UsageError) as raised:
        MergeOptions(dtype=choice)  # type: ignore[arg-type]  # that is the point
    assert all(known in raised.value.expected for known in ("keep", "config", *CASTS))


def test_the_configs_dtype_needs_a_config() -> None:
    with pytest.raises(ConversionError, match=r"there is no config\.json") as raised:
        target_dtype("config", None)
    assert "config=…" in raised.value.hint


def test_a_config_may_have_no_dtype() -> None:
    with pytest.raises(ConversionError, match=r"config\.json has no dtype"):
        target_dtype("config", {"hidden_size": 8})


@pytest.mark.parametrize("named", ["float64", "float8_e4m3fn", "int8", "auto"])
def test_a_config_may_name_a_dtype_that_is_not_a_target(named: str) -> None:
    with pytest.raises(ConversionError, match=rf"config\.json has the dtype {named}") as raised:
        target_dtype("config", {"dtype": named})
    assert raised.value.expected == ", ".join(CASTS)


# config_dtype


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "bfloat16"),
        ({"dtype": None, "torch_dtype": "float16"}, "float16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"torch_dtype": "float16", "text_config": {"dtype": "bfloat16"}}, "float16"),
        ({"dtype": None, "text_config": {"torch_dtype": "float16"}}, "float16"),
        ({"text_config": "bfloat16"}, None),
        ({"dtype": 16}, None),
    ],
)
def test_a_config_names_its_own_dtype_or_else_its_text_models(
    config: dict[str, object], expected: str | None
) -> None:
    assert ModelConfig(config).dtype == expected
