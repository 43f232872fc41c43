"""A tiny model of every family that the table of names was measured on, built by transformers."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.models.auto import configuration_auto, modeling_auto

from oracle.writers.saving import copy_state, save_rank

__all__ = ["FAMILY_MODELS", "hollow_model", "save_gemma3", "save_qwen3_moe", "tiny_model"]

_Fields = Mapping[str, Any]

_TEXT: _Fields = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_MOE: _Fields = {
    **_TEXT,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_DEEPSEEK: _Fields = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}
_ROUTED: _Fields = {
    **_TEXT,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 12,
}
_ROPE: _Fields = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}
_LINEAR: _Fields = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "shared_expert_intermediate_size": 12,
}
_TOWER: _Fields = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
_VISUAL: _Fields = {"depth": 2, "num_heads": 4, "patch_size": 8, "spatial_merge_size": 2}
_DEEP: _Fields = {
    **_VISUAL,
    "hidden_size": 16,
    "intermediate_size": 24,
    "out_hidden_size": 16,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_VL_TEXT: _Fields = {**_TEXT, "rope_parameters": _ROPE}
_VL_MOE: _Fields = {**_MOE, "rope_parameters": _ROPE}
_LLAVA: _Fields = {"image_token_index": 36, "image_token_id": 36}

FAMILY_MODELS: Mapping[str, tuple[str, _Fields]] = {
    "llama": ("LlamaForCausalLM", _TEXT),
    "qwen3": ("Qwen3ForCausalLM", _TEXT),
    "gemma2": ("Gemma2ForCausalLM", {**_TEXT, "tie_word_embeddings": True}),
    "phi3": ("Phi3ForCausalLM", _TEXT),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _MOE),
    "mixtral": ("MixtralForCausalLM", {**_TEXT, "num_local_experts": 4}),
    "gpt_oss": (
        "GptOssForCausalLM",
        {**_TEXT, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**_ROUTED, **_DEEPSEEK}),
    "glm4_moe": ("Glm4MoeForCausalLM", _ROUTED),
    "olmoe": ("OlmoeForCausalLM", {**_MOE, "intermediate_size": 12}),
    "llama4_text": (
        "Llama4ForCausalLM",
        {
            **_TEXT,
            "num_local_experts": 4,
            "intermediate_size_mlp": 24,
            "interleave_moe_layer_step": 1,
        },
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": _VL_TEXT,
            "vision_config": {**_VISUAL, "embed_dim": 16, "hidden_size": 16, "mlp_ratio": 2},
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": _VL_TEXT,
            "vision_config": {
                **_VISUAL,
                "hidden_size": 16,
                "intermediate_size": 24,
                "out_hidden_size": 16,
                "fullatt_block_indexes": [1],
            },
        },
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {"text_config": _VL_TEXT, "vision_config": _DEEP},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        {"text_config": _VL_MOE, "vision_config": _DEEP},
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        {"text_config": {**_VL_TEXT, **_LINEAR}, "vision_config": _DEEP},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeForConditionalGeneration",
        {"text_config": {**_VL_MOE, **_LINEAR}, "vision_config": _DEEP},
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {**_TEXT, "tie_word_embeddings": True},
            "vision_config": _TOWER,
            "mm_tokens_per_image": 4,
            "image_token_id": 36,
            "tie_word_embeddings": True,
        },
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        {
            **_LLAVA,
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": {**_TOWER, "model_type": "clip_vision_model"},
        },
    ),
    "llava_onevision": (
        "LlavaOnevisionForConditionalGeneration",
        {
            **_LLAVA,
            "text_config": {**_TEXT, "model_type": "qwen2"},
            "vision_config": {**_TOWER, "model_type": "siglip_vision_model"},
        },
    ),
    "internvl": (
        "InternVLForConditionalGeneration",
        {
            **_LLAVA,
            "text_config": {**_TEXT, "model_type": "qwen2"},
            "vision_config": {**_TOWER, "image_size": [16, 16], "patch_size": [8, 8]},
        },
    ),
}


def tiny_model(model_type: str) -> Any:
    """Return a model with random values everywhere, the same every time."""
    name, fields = FAMILY_MODELS[model_type]
    made = getattr(transformers, name)
    torch.manual_seed(0)
    model = made(made.config_class(**fields)).train(mode=False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def save_qwen3_moe(rank: int, world: int, directory: Path) -> None:
    """Save the model under FSDP2, a unit per layer."""
    _save_sharded("qwen3_moe", rank, world, directory)


def save_gemma3(rank: int, world: int, directory: Path) -> None:
    """Save the model under FSDP2: a language model with a vision tower, and a tied head."""
    _save_sharded("gemma3", rank, world, directory)


def _save_sharded(model_type: str, rank: int, world: int, directory: Path) -> None:
    model = tiny_model(model_type)
    truth = copy_state(model)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    save_rank((rank, world, directory), model.state_dict(), truth)


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and module[0].__class__.__name__.endswith("Layer"):
            yield from module


# models without values, of every type that has rules

_FEW: _Fields = {
    "num_hidden_layers": 2,
    "num_layers": 2,
    "depth": 2,
    "encoder_layers": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 8,
    "moe_num_experts": 4,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
}
_NEEDED: Mapping[str, _Fields] = {
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
}
_CLASSES: Mapping[str, str] = {
    **modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    **modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    "qwen2_5_omni": "Qwen2_5OmniForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeForConditionalGeneration",
}


def hollow_model(model_type: str) -> Any:
    """Return a model of a few layers and experts, else of its type's usual sizes, no memory."""
    config = _few(type(configuration_auto.CONFIG_MAPPING[model_type]()))
    if model_type == "qwen3_omni_moe":
        config.enable_audio_output = False
    with torch.device("meta"):
        return getattr(transformers, _CLASSES[model_type])(config)


def _few(made: Any) -> Any:
    """Return a config with few layers and experts, and so the configs inside it."""
    usual = made()
    inner = {
        key: _few(type(getattr(usual, key))).to_dict()
        for key in made.sub_configs
        if getattr(usual, key, None) is not None
    }
    few = {key: value for key, value in _FEW.items() if type(getattr(usual, key, None)) is int}
    return made(**few, **inner, **_NEEDED.get(made.model_type, {}))
