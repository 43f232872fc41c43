"""Shapes checked against config.json: what is refused, and what a config does not determine.

That the table is transformers' own is shown in `oracle/test_config_shapes.py`.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

import unshard
from ranks import assert_same, merged, save_ranks
from tiny_models import tiny_model
from unshard import ConversionError
from unshard.convert.expected.shapes import shape_in_config

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

Tensors = Mapping[str, torch.Tensor]

LAYER = "model.layers.1"
FIRST_HALF: Callable[[torch.Tensor], torch.Tensor] = lambda one: one[: len(one) // 2]  # noqa: E731


def saved(
    directory: Path, tensors: Tensors, config: Mapping[str, Any], left_out: tuple[str, ...] = ()
) -> Path:
    save_ranks(directory, dict(tensors), 2)
    fields = {key: value for key, value in config.items() if key not in left_out}
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def model(family: str, /, **fields: object) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of a tiny model, and its config as `save_pretrained` writes it."""
    built = tiny_model(family, **fields)
    config = json.loads(built.config.to_json_string(use_diff=True))
    return built.state_dict(), {**config, "architectures": [type(built).__name__]}


def assert_refused(ckpt: Path, tmp_path: Path, *words: str, **options: Any) -> None:
    with pytest.raises(ConversionError) as raised:
        unshard.merge(ckpt, tmp_path / "out", **options)
    for word in (*words, str(ckpt / "config.json")):
        assert word in str(raised.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "end", "change", "said"),
    [
        ("qwen2", "mlp.up_proj.weight", FIRST_HALF, "[12, 16] instead of [24, 16]"),
        ("qwen2", "mlp.down_proj.weight", lambda one: one.T.contiguous(), "(hidden_size, interm"),
        ("qwen2", "self_attn.k_proj.weight", FIRST_HALF, "(num_key_value_heads, "),
        ("qwen3", "self_attn.q_norm.weight", FIRST_HALF, "[2] instead of [4] (head_dim)"),
        ("llama", "input_layernorm.weight", FIRST_HALF, "[8] instead of [16] (hidden_size)"),
        ("llama", "self_attn.o_proj.weight", lambda one: one[:0], "[0, 16] instead of [16, 16]"),
        ("llama", "self_attn.v_proj.weight", lambda one: one[:, :0], "[8, 0] instead of [8, 16]"),
        ("deepseek_v3", "self_attn.kv_b_proj.weight", FIRST_HALF, "kv_lora_rank"),
        ("glm4_moe", "mlp.shared_experts.up_proj.weight", FIRST_HALF, "n_shared_experts"),
        ("qwen3_moe", "mlp.gate.weight", lambda one: one[:3], "[3, 16] instead of [4, 16]"),
        ("gpt_oss", "self_attn.sinks", FIRST_HALF, "(num_attention_heads)"),
    ],
)
def test_a_tensor_of_another_shape_is_refused(
    tmp_path: Path, family: str, end: str, change: Any, said: str
) -> None:
    tensors, config = model(family)
    name = f"{LAYER}.{end}"
    ckpt = saved(tmp_path / "ckpt", {**tensors, name: change(tensors[name])}, config)
    assert_refused(ckpt, tmp_path, "1 tensor has another shape", name, said)
    assert_refused(ckpt, tmp_path, name, allow_missing=True, allow_unexpected=True)
    assert_refused(ckpt, tmp_path, name, include="layers.1")
    unshard.merge(ckpt, tmp_path / "rest", include="layers.0")


@pytest.mark.parametrize(
    ("family", "name", "said"),
    [
        ("llava", "model.multi_modal_projector.linear_1.weight", "(text_config.hidden_size"),
        ("gemma3", "model.vision_tower.encoder.layers.0.mlp.fc1.bias", "(intermediate_size)"),
        ("qwen2_5_vl", "model.visual.merger.mlp.0.weight", "spatial_merge_size"),
        ("qwen3_vl", "model.language_model.layers.0.mlp.up_proj.weight", "(intermediate_size"),
    ],
)
def test_so_is_a_tensor_of_a_tower_or_of_what_joins_them(
    tmp_path: Path, family: str, name: str, said: str
) -> None:
    tensors, config = model(family)
    unshard.merge(saved(tmp_path / "right", tensors, config), tmp_path / "right_out")
    ckpt = saved(tmp_path / "ckpt", {**tensors, name: FIRST_HALF(tensors[name])}, config)
    assert_refused(ckpt, tmp_path, said)


def test_an_average_is_checked_too(tmp_path: Path) -> None:
    tensors, config = model("qwen2")
    name = f"{LAYER}.mlp.up_proj.weight"
    for step in (1, 2):
        changed = {**tensors, name: FIRST_HALF(tensors[name])}
        saved(tmp_path / f"global_step_{step}" / "actor", changed, config)
    with pytest.raises(ConversionError, match="intermediate_size"):
        unshard.average(tmp_path, tmp_path / "out")


# experts


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3"])
def test_experts_that_were_never_saved_are_said_to_be_lost(tmp_path: Path, family: str) -> None:
    """What torch leaves of two groups of ranks that give their experts the same names."""
    tensors, config = model(family)
    first = {n: FIRST_HALF(one) if ".experts." in n else one for n, one in tensors.items()}
    save(first, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    (tmp_path / "ckpt" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConversionError, match=r"layers have 2 of 4 experts: .* are lost"):
        unshard.merge(tmp_path / "ckpt", tmp_path / "out")


@pytest.mark.parametrize(
    "end", ["experts.3.up_proj.weight", "experts.down_proj", "mlp.gate.weight"]
)
def test_a_tensor_of_experts_that_is_missing_is_not_said_to_be_lost(
    tmp_path: Path, end: str
) -> None:
    tensors, config = model("qwen3_moe")
    ckpt = saved(tmp_path / "whole", tensors, config)
    whole = tensors
    if "experts.3" in end:
        unshard.merge(ckpt, tmp_path / "hub")
        whole = merged(tmp_path / "hub")
    rest = {
        name: one
        for name, one in whole.items()
        if name not in (f"{LAYER}.mlp.{end}", f"{LAYER}.{end}")
    }
    assert len(rest) == len(whole) - 1
    with pytest.raises(ConversionError, match="Missing key") as raised:
        unshard.merge(saved(tmp_path / "ckpt", rest, config), tmp_path / "out")
    assert "are lost" not in str(raised.value)


# the vocabulary


def with_rows(tensors: Tensors, embedding: int, head: int | None) -> dict[str, torch.Tensor]:
    rest = {name: one for name, one in tensors.items() if name != "lm_head.weight"}
    rows = {"model.embed_tokens.weight": embedding} | ({"lm_head.weight": head} if head else {})
    return rest | {name: torch.randn(count, 16) for name, count in rows.items()}


@pytest.mark.parametrize(("embedding", "head"), [(37, 40), (40, 37), (40, 36), (37, 1)])
def test_a_head_of_another_vocabulary_than_the_embeddings_is_refused(
    tmp_path: Path, embedding: int, head: int
) -> None:
    tensors, config = model("qwen2")
    ckpt = saved(tmp_path / "ckpt", with_rows(tensors, embedding, head), config)
    assert_refused(ckpt, tmp_path, "instead of [37, 16] (vocab_size, hidden_size)")
    unshard.merge(ckpt, tmp_path / "body", exclude="lm_head")


def test_an_embedding_without_rows_is_refused(tmp_path: Path) -> None:
    tensors, config = model("qwen2", tie_word_embeddings=True)
    ckpt = saved(tmp_path / "ckpt", with_rows(tensors, 0, None), config)
    assert_refused(ckpt, tmp_path, "[0, 16] instead of [37, 16]")


@pytest.mark.parametrize("rows", [33, 64])
@pytest.mark.parametrize("tied", [False, True])
def test_a_resized_or_padded_vocabulary_is_kept(tmp_path: Path, rows: int, *, tied: bool) -> None:
    tensors, config = model("qwen2", tie_word_embeddings=tied)
    resized = with_rows(tensors, rows, None if tied else rows)
    report = unshard.merge(saved(tmp_path / "ckpt", resized, config), tmp_path / "out")
    assert any("another vocabulary than" in warning for warning in report.warnings)
    assert_same(merged(tmp_path / "out"), resized)


# what a config does not determine


def test_a_head_dim_that_is_left_out_is_what_the_class_computes_or_is_not_checked(
    tmp_path: Path,
) -> None:
    """In Qwen3 it is 128 then, which another version may change; in Llama it follows."""
    for family in ("llama", "qwen3"):
        tensors, config = model(family, head_dim=6)
        ckpt = saved(tmp_path / family, tensors, config, left_out=("head_dim",))
        if family == "llama":
            assert_refused(ckpt, tmp_path, f"{LAYER}.self_attn.q_proj.weight [24, 16]")
        else:
            unshard.merge(ckpt, tmp_path / "out")
            assert_same(merged(tmp_path / "out"), tensors)


def test_a_model_of_remote_code_is_checked_as_before(tmp_path: Path) -> None:
    tensors, config = model("llama")
    name = f"{LAYER}.mlp.up_proj.weight"
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_ours.LlamaForCausalLM"}
    changed = with_rows({**tensors, name: FIRST_HALF(tensors[name])}, 37, 40)
    unshard.merge(saved(tmp_path / "ckpt", changed, config), tmp_path / "out")
    assert_same(merged(tmp_path / "out"), changed)
    wider = {**tensors, "model.embed_tokens.weight": torch.randn(37, 20)}
    assert_refused(saved(tmp_path / "wider", wider, config), tmp_path / "two", "[37, 20]")


def test_packed_values_are_not_checked(tmp_path: Path) -> None:
    tensors, config = model("llama")
    packed = torch.arange(192, dtype=torch.uint8).reshape(192, 1)
    changed = {**tensors, f"{LAYER}.mlp.up_proj.weight": packed}
    unshard.merge(saved(tmp_path / "ckpt", changed, config), tmp_path / "out")
    assert_same(merged(tmp_path / "out"), changed)
    quantised = config | {"quantization_config": {"quant_method": "bitsandbytes"}}
    halved = {**tensors, f"{LAYER}.mlp.up_proj.weight": torch.randn(12, 16)}
    ckpt = saved(tmp_path / "quantised", halved, quantised)
    assert unshard.merge(ckpt, tmp_path / "two").names_checked == "none"


def test_names_of_training_are_not_checked(tmp_path: Path) -> None:
    tensors, config = model("llama")
    changed = {**tensors, f"{LAYER}.mlp.up_proj.weight": torch.randn(12, 16)}
    unshard.merge(saved(tmp_path / "ckpt", changed, config), tmp_path / "out", names="training")


@pytest.mark.parametrize("turned", [False, True])
def test_fused_experts_of_both_versions_are_right(tmp_path: Path, *, turned: bool) -> None:
    tensors, config = model("qwen3_vl_moe")
    change = (lambda one: one.transpose(1, 2).contiguous()) if turned else torch.clone
    changed = {name: change(one) if ".experts." in name else one for name, one in tensors.items()}
    unshard.merge(saved(tmp_path / "ckpt", changed, config), tmp_path / "out")
    assert_same(merged(tmp_path / "out"), changed)
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    halved = {**tensors, name: tensors[name][:, ::2].contiguous()}
    assert_refused(saved(tmp_path / "halved", halved, config), tmp_path / "two", name)


@pytest.mark.parametrize(
    "value", [None, 0, -1, True, "16", [], [16], {}, 1.5e308, float("inf"), float("nan"), 10**400]
)
def test_a_field_that_is_not_a_size_states_nothing(value: object) -> None:
    config = {"hidden_size": value, "vision_config": [value], "downsample_ratio": value}
    config |= {"text_config": value, "image_size": value, "patch_size": value, "embed_dim": value}
    for kind, name in (
        ("llama", "layers.#.input_layernorm.weight"),
        ("internvl", "multi_modal_projector.linear_1.weight"),
        ("llava", "multi_modal_projector.linear_1.weight"),
        ("clip_vision_model", "embeddings.position_embedding.weight"),
        ("qwen2_vl", "merger.mlp.0.weight"),
    ):
        assert shape_in_config(kind, name, config) is None


def test_numbers_in_lists_are_read_by_their_place() -> None:
    name = "embeddings.position_embeddings"
    config = {"image_size": [28, 56], "patch_size": 14, "hidden_size": 8}
    assert shape_in_config("internvl_vision", name, config) == (1, 9, 8)
    assert shape_in_config("internvl_vision", name, {**config, "image_size": [28]}) is None
    layers = {"vision_feature_layer": [-2, -1], "text_config": {"hidden_size": 8}}
    layers["vision_config"] = {"hidden_size": 6}
    name = "multi_modal_projector.linear_1.weight"
    assert shape_in_config("llava", name, layers) == (8, 12)
    assert shape_in_config("llava", name, {**layers, "vision_feature_layer": -2}) == (8, 6)
