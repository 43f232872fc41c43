"""Models of transformers without values, and the switches of configs that add tensors to them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from unshard.convert.names import hub_names
from unshard.convert.recipes import Recipe, shape_of, take
from unshard.read.model_config import ModelConfig
from unshard.tensors.catalog import TensorEntry
from unshard.tensors.chunk_rows import ChunkRows
from unshard.tensors.dtypes import BY_NAME

__all__ = [
    "INSIDE",
    "SWITCHES",
    "Shapes",
    "built",
    "changed",
    "config_of",
    "recipes_of",
    "shapes_of",
]

Fields = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]

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


def recipes_of(shapes: Shapes) -> dict[str, Recipe]:
    return {
        name: take(
            TensorEntry(
                name, BY_NAME["float32"], tuple(shape), ChunkRows(len(shape)).table((Path("f"),))
            )
        )
        for name, shape in shapes.items()
    }


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    recipes = recipes_of({name: one.shape for name, one in model.state_dict().items()})
    named = hub_names(recipes, ModelConfig(config_of(model))).value
    return {name: shape_of(recipe) for name, recipe in named.items()}
