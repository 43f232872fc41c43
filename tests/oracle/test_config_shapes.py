"""The shapes that a config states, against the models that transformers builds of it.

Models without values, of every type whose names are checked, in sizes that are all different.
"""

import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import pytest
import torch

from hollow_models import (
    INSIDE,
    SWITCHES,
    Shapes,
    built,
    changed,
    config_of,
    recipes_of,
    shapes_of,
)
from tiny_models import TINY_FAMILIES
from unshard.convert.expected.config_names import expected_by_config
from unshard.convert.expected.tensors import Expected, check_expected
from unshard.convert.expected.whole_models import MODELS
from unshard.errors import ConversionError

pytestmark = pytest.mark.xdist_group("families")

Fields = Mapping[str, Any]
Shape = tuple[int, ...]

_GROUPED: Fields = {
    "vocab_size": 97,
    "hidden_size": 60,
    "n_embd": 60,
    "n_inner": 43,
    "n_positions": 41,
    "intermediate_size": 34,
    "num_attention_heads": 6,
    "n_head": 6,
    "num_key_value_heads": 2,
    "head_dim": 14,
    "moe_intermediate_size": 22,
    "shared_expert_intermediate_size": 26,
    "intermediate_size_mlp": 38,
    "q_lora_rank": 18,
    "kv_lora_rank": 21,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "n_shared_experts": 3,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 9,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "linear_conv_kernel_dim": 3,
    "num_local_experts": 5,
    "num_experts": 5,
    "n_routed_experts": 10,
    "n_group": 1,
    "topk_group": 1,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Query heads share those of keys; the heads together are wider than the hidden size."""
_PLAIN: Fields = {
    **_GROUPED,
    "vocab_size": 53,
    "hidden_size": 48,
    "n_embd": 48,
    "n_inner": None,
    "intermediate_size": 46,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "moe_intermediate_size": 10,
    "q_lora_rank": None,
    "n_shared_experts": 1,
    "linear_num_value_heads": 6,
    "num_local_experts": 3,
    "num_experts": 3,
    "n_routed_experts": 7,
}
"""A head of keys for each of queries; the heads together are narrower than the hidden size."""
_VISION: Fields = {
    "hidden_size": 36,
    "embed_dim": 36,
    "mlp_ratio": 2,
    "intermediate_size": 28,
    "num_heads": 4,
    "num_attention_heads": 4,
    "num_channels": 5,
    "in_channels": 5,
    "num_position_embeddings": 49,
    "out_hidden_size": 60,
}
SIZES = {
    "grouped": (_GROUPED, _VISION),
    "usual": ({}, {}),
    "plain": (_PLAIN, {**_VISION, "intermediate_size": 31, "mlp_ratio": 3, "out_hidden_size": 48}),
}


def sized(usual: Any, sizes: Fields, vision: Fields) -> dict[str, Any]:
    """Return the fields of a config with other sizes, also of the configs inside it."""
    known = usual.to_dict()
    fields: dict[str, Any] = json.loads(usual.to_json_string(use_diff=True))
    fields |= {
        key: value
        for key, value in sizes.items()
        if key == "head_dim" or (key in known and isinstance(known[key], int | None))
    }
    for key in usual.sub_configs:
        inner = vision if key == "vision_config" else sizes
        fields[key] = sized(getattr(usual, key), inner, inner)
    return fields


@pytest.fixture(scope="module", params=SIZES)
def sizes(request: pytest.FixtureRequest) -> tuple[Fields, Fields]:
    return SIZES[request.param]


def model_of(models: Any, model_type: str, sizes: tuple[Fields, Fields]) -> Any:
    usual = models.hollow_model(model_type)
    return built(type(usual), sized(usual.config, *sizes))


def expected_of(config: Fields, shapes: Shapes, *, tied: bool = False) -> Expected:
    expected = expected_by_config(config, list(shapes), list, tied=tied)
    assert expected is not None
    return expected._replace(name="/run/config.json")


def check(shapes: Shapes, expected: Expected) -> list[str]:
    return check_expected(recipes_of(shapes), expected, allow_missing=False, allow_unexpected=False)


def mistakes(shape: Shape) -> Iterator[Shape]:
    """Yield shapes that are wrong: halves, one less, empty, turned, flat."""
    for dim, size in enumerate(shape):
        for other in {size // 2, size - 1, 0, size + 1}:
            yield *shape[:dim], other, *shape[dim + 1 :]
    if shape[::-1] != shape:
        yield shape[::-1]
    yield (*shape, 1)
    yield shape[1:]


@pytest.mark.parametrize("model_type", sorted(MODELS))
def test_every_tensor_of_every_type_has_the_shape_that_its_config_states(
    models: Any, model_type: str, sizes: tuple[Fields, Fields]
) -> None:
    model = model_of(models, model_type, sizes)
    shapes = shapes_of(model)
    expected = expected_of(config_of(model), shapes)
    assert shapes == {name: expected.shapes.get(name) for name in shapes}
    assert not check(shapes, expected)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(MODELS))
def test_every_tensor_of_another_shape_is_refused(
    models: Any, model_type: str, sizes: tuple[Fields, Fields]
) -> None:
    """A layer's tensors once: all that differ only in their numbers are alike."""
    model = model_of(models, model_type, sizes)
    shapes = shapes_of(model)
    expected = expected_of(config_of(model), shapes)
    alike = {"".join(c for c in name if not c.isdigit()): name for name in shapes}
    turns = model_type == "qwen3_vl_moe"  # transformers 4 and 5 differ
    for name in alike.values():
        stated, fields = shapes[name], vars(expected.shapes[name])["fields"]
        assert fields
        for found in mistakes(stated):
            if turns and ".experts." in name and sorted(found) == sorted(stated):
                continue
            with pytest.raises(ConversionError) as raised:
                check({**shapes, name: found}, expected)
            said = str(raised.value)
            for words in (name, str(list(found)), str(list(stated)), "/run/config.json"):
                assert words in said
            assert f"({', '.join(fields)})" in said


def _keys(fields: Fields, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in fields.items():
        if isinstance(value, dict):
            yield from _keys(value, (*path, key))
        elif key not in ("model_type", "architectures"):
            yield *path, key


def _without(fields: Fields, path: tuple[str, ...]) -> dict[str, Any]:
    key, *inner = path
    rest = {name: value for name, value in fields.items() if name != key or inner}
    return {**rest, key: _without(rest[key], tuple(inner))} if inner else rest


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(MODELS))
def test_a_config_that_leaves_a_size_out_states_the_same_shapes_or_none(
    models: Any, model_type: str, sizes: tuple[Fields, Fields]
) -> None:
    """transformers has a default for each, which differs by type and version."""
    model = model_of(models, model_type, sizes)
    config = config_of(model)
    for path in _keys(config):
        fields = _without(config, path)
        try:
            shapes = shapes_of(built(type(model), fields))
        except Exception:  # noqa: BLE001, S112 (transformers refuses it in its own ways)
            continue
        expected = expected_by_config(fields, list(shapes), list, tied=False)
        if expected is None:
            continue
        assert {
            name: shape
            for name, shape in expected.shapes.items()
            if shapes.get(name, shape) != shape
        } == {}, path


@pytest.mark.parametrize(("model_type", "fields"), SWITCHES)
def test_tensors_that_a_switch_adds_have_shapes(
    models: Any, model_type: str, fields: Fields
) -> None:
    model = changed(models, model_type, fields)
    shapes = shapes_of(model)
    expected = expected_of(config_of(model), shapes, tied=bool(model.all_tied_weights_keys))
    assert shapes == {name: expected.shapes.get(name) for name in shapes}
    assert not check(shapes, expected)


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(("model_type", "key", "fields"), INSIDE)
def test_tensors_that_a_switch_of_an_inner_config_adds_have_shapes(
    model_type: str, key: str, fields: Fields
) -> None:
    name, usual = TINY_FAMILIES[model_type]
    given = {**usual, key: {**usual.get(key, {}), **fields}}
    model = built(getattr(import_module("transformers"), name), given)
    shapes = shapes_of(model)
    expected = expected_of(config_of(model), shapes, tied=bool(model.all_tied_weights_keys))
    assert shapes == {name: expected.shapes.get(name) for name in shapes}


_SEEING: Fields = {"depth": 2, "in_chans": 3, "patch_size": 14, "temporal_patch_size": 2}
_TOWER: Fields = {"image_size": 56, "intermediate_size": 48, "num_attention_heads": 4}
AS_ON_THE_HUB: tuple[tuple[str, int, Fields], ...] = (
    ("LlamaForCausalLM", 0, {"hidden_size": 60, "num_attention_heads": 6, "vocab_size": 97}),
    ("GPT2LMHeadModel", 0, {"n_embd": 60, "n_head": 6, "n_ctx": 64, "n_positions": 64}),
    ("MixtralForCausalLM", 0, {"num_key_value_heads": 2, "num_local_experts": 2}),
    (
        "Qwen2VLForConditionalGeneration",
        1,
        {
            "num_key_value_heads": 2,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
            "vision_config": {
                **_SEEING,
                "embed_dim": 32,
                "hidden_size": 64,
                "mlp_ratio": 4,
                "num_heads": 4,
                "spatial_merge_size": 2,
                "model_type": "qwen2_vl",
            },
        },
    ),
    (
        "Gemma3ForConditionalGeneration",
        15,
        {
            "text_config": {
                "hidden_size": 64,
                "intermediate_size": 34,
                "model_type": "gemma3_text",
                "num_hidden_layers": 2,
            },
            "vision_config": {
                **_TOWER,
                "hidden_size": 36,
                "model_type": "siglip_vision_model",
                "num_hidden_layers": 2,
                "patch_size": 14,
                "vision_use_head": False,
            },
        },
    ),
)
"""As older versions wrote them: a class, how many shapes its config does not state, and fields."""


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(("name", "unknown", "fields"), AS_ON_THE_HUB)
def test_a_config_as_on_the_hub_states_shapes_that_are_right(
    name: str, unknown: int, fields: Fields
) -> None:
    model_class = getattr(import_module("transformers"), name)
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4}
    given: dict[str, Any] = {"vocab_size": 97, "num_hidden_layers": 2, "n_layer": 2, **fields}
    if "text_config" not in fields and "n_embd" not in fields:
        given = sizes | given
    given["model_type"] = model_class.config_class.model_type
    with torch.device("meta"):
        model = model_class(model_class.config_class.from_dict(dict(given)))
    shapes = shapes_of(model)
    expected = expected_of({**given, "architectures": [name]}, shapes, tied=True)
    assert not check(shapes, expected)
    assert len([one for one in shapes if one not in expected.shapes]) == unknown
