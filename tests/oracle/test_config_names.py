"""The tensors that a config says there are, against the models that transformers builds of it.

Models without values, of every type that the table knows, in every switch that it looks at.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_models import TINY_FAMILIES
from unshard.convert.expected.config_names import expected_by_config
from unshard.convert.expected.tensors import Expected
from unshard.convert.expected.whole_models import MODELS
from unshard.convert.names import hub_names
from unshard.convert.recipes import shape_of, take
from unshard.read.model_config import ModelConfig
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.chunk_rows import ChunkRows
from unshard.tensors.dtypes import BY_NAME

pytestmark = pytest.mark.xdist_group("families")

Fields = Mapping[str, Any]

SWITCHES: tuple[tuple[str, Fields], ...] = (
    ("llama", {"attention_bias": True}),
    ("llama", {"mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"num_hidden_layers": 1}),
    ("granite", {"attention_bias": True, "mlp_bias": True}),
    ("mistral", {"sliding_window": 8}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    ("gemma2", {"attention_bias": True, "sliding_window": 8}),
    ("gemma3_text", {"tie_word_embeddings": False, "attention_bias": True}),
    ("smollm3", {"attention_bias": True, "mlp_bias": True, "no_rope_layers": [1, 0]}),
    ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    ("arcee", {"attention_bias": True, "mlp_bias": True}),
    ("ernie4_5", {"use_bias": True}),
    ("glm", {"attention_bias": False}),
    ("glm4", {"attention_bias": False}),
    ("olmo2", {"attention_bias": True}),
    ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    ("gpt2", {"add_cross_attention": True}),
    ("gpt2", {"tie_word_embeddings": False, "n_layer": 3}),
    ("qwen2_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    ("qwen2_moe", {"qkv_bias": False}),
    ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1], "attention_bias": True}),
    ("olmoe", {"attention_bias": True}),
    ("deepseek_v2", {"q_lora_rank": None, "first_k_dense_replace": 0, "mlp_bias": True}),
    ("deepseek_v2", {"mlp_bias": True, "n_shared_experts": 1, "attention_bias": True}),
    ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}),
    ("deepseek_v3", {"num_hidden_layers": 4, "first_k_dense_replace": 3, "attention_bias": True}),
    ("glm4_moe", {"use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 0}),
    ("dots1", {"attention_bias": True, "first_k_dense_replace": 2}),
    ("gpt_oss", {"attention_bias": False}),
    ("llama4_text", {"num_hidden_layers": 4, "interleave_moe_layer_step": 2}),
    ("llama4_text", {"moe_layers": [1], "attention_bias": True}),
    ("qwen3_next", {"num_hidden_layers": 4, "mlp_only_layers": [2], "attention_bias": True}),
    ("qwen3_next", {"layer_types": ["full_attention", "linear_attention"]}),
    ("qwen3_5_text", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    ("qwen3_5_moe_text", {"num_hidden_layers": 4}),
)
INSIDE: tuple[tuple[str, str, Fields], ...] = (
    ("gemma3", "vision_config", {"vision_use_head": False}),
    ("gemma3", "text_config", {"num_hidden_layers": 3, "sliding_window": 8}),
    ("qwen2_vl", "vision_config", {"depth": 3}),
    ("qwen2_5_vl", "text_config", {"num_hidden_layers": 3, "tie_word_embeddings": True}),
    ("qwen3_vl", "vision_config", {"deepstack_visual_indexes": [0, 1]}),
    ("qwen3_vl_moe", "text_config", {"mlp_only_layers": [0]}),
    ("internvl", "vision_config", {"attention_bias": True, "use_qk_norm": True}),
    ("internvl", "vision_config", {"use_mean_pooling": False, "use_mask_token": True}),
    ("internvl", "vision_config", {"use_absolute_position_embeddings": False}),
    ("llava", "text_config", {"model_type": "mistral", "num_hidden_layers": 1}),
    ("llava", "vision_config", {"model_type": "siglip_vision_model", "num_hidden_layers": 3}),
)


@pytest.fixture(scope="module")
def models() -> Any:
    """Return the module that builds them: importing transformers takes seconds."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read once, when it is imported
    return import_module("oracle.writers.family_models")


def changed(models: Any, model_type: str, fields: Fields) -> Any:
    """Return a hollow model whose config has other fields."""
    usual = models.hollow_model(model_type)
    given = {**json.loads(usual.config.to_json_string(use_diff=True)), **fields}
    if "num_hidden_layers" in fields and "layer_types" not in fields:
        given.pop("layer_types", None)
    if "interleave_moe_layer_step" in fields:
        given.pop("moe_layers", None)
    given.pop("no_rope_layers", None) if "no_rope_layers" not in fields else None
    return built(type(usual), given)


def built(model_class: Any, fields: Fields) -> Any:
    with torch.device("meta"):
        return model_class(model_class.config_class(**fields))


def config_of(model: Any) -> dict[str, Any]:
    """Return the config as `save_pretrained` writes it."""
    fields: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=True))
    return {**fields, "architectures": [type(model).__name__]}


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    recipes = {
        name: take(
            TensorEntry(
                name,
                BY_NAME["float32"],
                tuple(one.shape),
                ChunkRows(one.ndim).table((Path("f"),)),
            )
        )
        for name, one in model.state_dict().items()
    }
    named = hub_names(recipes, ModelConfig(config_of(model))).value
    return {name: shape_of(recipe) for name, recipe in named.items()}


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
        assert len(expected.shapes) == 2
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
