"""The tensors that a config says there are, against the models that transformers builds of it.

Models without values, of every type that the table knows, in every switch that it looks at.
"""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

import pytest

from hollow_models import INSIDE, SWITCHES, built, changed, config_of, shapes_of
from tiny_models import TINY_FAMILIES
from unshard.convert.expected.config_names import expected_by_config
from unshard.convert.expected.tensors import Expected
from unshard.convert.expected.whole_models import MODELS
from unshard.read.model_config import ModelConfig

pytestmark = pytest.mark.xdist_group("families")

Fields = Mapping[str, Any]


def names_of(model: Any) -> list[str]:
    return list(shapes_of(model))


def everything(names: Iterable[str]) -> list[str]:
    return list(names)


def assert_exact(config: Fields, names: list[str], *, tied: bool | None = None) -> Expected:
    """Every name is expected; and nothing else is, but a tied head and buffers."""
    known = ModelConfig(config).may_be_tied if tied is None else tied
    expected = expected_by_config(config, names, everything, tied=known)
    assert expected is not None
    assert set(expected.names) <= set(names)
    assert set(names) <= {*expected.names, *expected.excused}
    optional = ("lm_head.weight", ".e_score_correction_bias")
    assert all(name.endswith(optional) for name in set(names) - set(expected.names))
    return expected


@pytest.mark.parametrize("model_type", sorted(MODELS))
def test_every_known_type_has_the_tensors_that_its_config_says(
    models: Any, model_type: str
) -> None:
    model = models.hollow_model(model_type)
    assert_exact(config_of(model), names_of(model))
    if model_type in TINY_FAMILIES:
        name, fields = TINY_FAMILIES[model_type]
        small = built(getattr(import_module("transformers"), name), fields)
        expected = assert_exact(config_of(small), names_of(small), tied=False)
        assert any(one.endswith("lm_head.weight") for one in expected.names)
        shapes = shapes_of(small)
        assert expected.shapes == {name: shapes[name] for name in expected.shapes}


@pytest.mark.parametrize(("model_type", "fields"), SWITCHES)
def test_every_switch_is_followed(models: Any, model_type: str, fields: Fields) -> None:
    model = changed(models, model_type, fields)
    assert_exact(config_of(model), names_of(model))


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(("model_type", "key", "fields"), INSIDE)
def test_every_switch_of_an_inner_config_is_followed(
    model_type: str, key: str, fields: Fields
) -> None:
    name, usual = TINY_FAMILIES[model_type]
    given = {**usual, key: {**usual.get(key, {}), **fields}}
    model = built(getattr(import_module("transformers"), name), given)
    assert_exact(config_of(model), names_of(model))


@pytest.mark.parametrize("model_type", sorted(MODELS))
def test_a_config_that_leaves_out_its_defaults_says_the_same_or_nothing(
    models: Any, model_type: str
) -> None:
    """Configs on the hub were written before a switch was there."""
    model = models.hollow_model(model_type)
    config, names = _without_switches(config_of(model)), names_of(model)
    tied = bool(model.all_tied_weights_keys)
    expected = expected_by_config(config, names, everything, tied=tied)
    if expected is not None:
        assert_exact(config, names, tied=tied)


def _without_switches(config: Fields) -> dict[str, Any]:
    needed = {"architectures", "deepstack_visual_indexes"}
    return {
        key: _without_switches(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key in needed or not isinstance(value, bool | list)
    }


@pytest.mark.parametrize(
    "name",
    [
        "LlamaModel",
        "Qwen3MoeModel",
        "GPT2Model",
        "LlamaForSequenceClassification",
        "Qwen2ForTokenClassification",
        "Qwen3ForTokenClassification",
        "Gemma2ForSequenceClassification",
        "GPT2ForTokenClassification",
        "MixtralForSequenceClassification",
    ],
)
def test_a_model_without_a_head_or_with_a_classifiers_is_known(models: Any, name: str) -> None:
    made: Callable[..., Any] = getattr(import_module("transformers"), name)
    few = models.hollow_model(made.config_class.model_type).config.to_dict()  # type: ignore[attr-defined]
    model = built(made, few)
    config, names = config_of(model), names_of(model)
    for fields in (config, {**config, "architectures": None}):
        expected = expected_by_config(fields, names, everything, tied=False)
        assert expected is not None
        assert set(expected.names) <= set(names) <= {*expected.names, *expected.excused}
    short = names[1:]
    expected = expected_by_config(config, short, everything, tied=False)
    assert expected is not None
    assert not set(expected.names) <= set(short)
