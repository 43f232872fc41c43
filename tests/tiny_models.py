"""Tiny models of transformers: every family by name, their sizes as keywords.

transformers is imported when the first is made: that takes seconds.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn

from ranks import assert_same

__all__ = [
    "TINY_FAMILIES",
    "Fields",
    "assert_same_model",
    "logits",
    "model_class",
    "tiny_config",
    "tiny_model",
    "tiny_tokenizer",
    "with_adapter",
]

Fields = Mapping[str, Any]

_SIZES: Fields = {
    "vocab_size": 37,  # which divides by no common world size
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_TEXT: Fields = {
    **_SIZES,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_MOE: Fields = {
    **_TEXT,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_DEEPSEEK: Fields = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}
_ROUTED: Fields = {
    **_TEXT,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 12,
}
_ROPE: Fields = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}
_LINEAR: Fields = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "shared_expert_intermediate_size": 12,
}
_TOWER: Fields = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
_VISUAL: Fields = {"depth": 2, "num_heads": 4, "patch_size": 8, "spatial_merge_size": 2}
_DEEP: Fields = {
    **_VISUAL,
    "hidden_size": 16,
    "intermediate_size": 24,
    "out_hidden_size": 16,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_VL_TEXT: Fields = {**_TEXT, "rope_parameters": _ROPE}
_VL_MOE: Fields = {**_MOE, "rope_parameters": _ROPE}
_LLAVA: Fields = {"image_token_index": 36, "image_token_id": 36}

TINY_FAMILIES: Mapping[str, tuple[str, Fields]] = {
    "bert": ("BertForMaskedLM", _SIZES),
    "gpt2": (
        "GPT2LMHeadModel",
        {
            "vocab_size": 37,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 4,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "tie_word_embeddings": False,
        },
    ),
    "llama": ("LlamaForCausalLM", _TEXT),
    "qwen2": ("Qwen2ForCausalLM", _TEXT),
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


"""The class of each family, and the fields of its config."""

_UNKNOWN = "<unk>"


def model_class(family: str) -> Any:
    """Return the class of a family's models."""
    return getattr(import_module("transformers"), TINY_FAMILIES[family][0])


def tiny_config(family: str = "qwen2", /, **fields: object) -> Any:
    """Return a config of a family with some other fields."""
    return model_class(family).config_class(**{**TINY_FAMILIES[family][1], **fields})


def tiny_model(family: str = "qwen2", /, **fields: object) -> Any:
    """Return a model with random values everywhere, in norms and biases too, always the same."""
    torch.manual_seed(0)
    model = model_class(family)(tiny_config(family, **fields)).train(mode=False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def with_adapter(model: Any) -> Any:
    """Return a model with an adapter of peft in its attention: r 4, alpha 32, in its dtype."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def logits(model: Any) -> torch.Tensor:
    """Return what a model makes of a few tokens."""
    ids = torch.arange(3, 19).reshape(2, 8)
    with torch.no_grad():
        found: torch.Tensor = model.train(mode=False)(input_ids=ids).logits
    return found


def assert_same_model(found: Any, expected: Any) -> None:
    """Same class, parameters, buffers and ties, bit for bit; same config and generation config."""
    assert type(found) is type(expected)
    assert_same(found.state_dict(), expected.state_dict())
    assert_same(dict(found.named_buffers()), dict(expected.named_buffers()))
    ours, theirs = (
        # Of tied parameters only the first name is listed.
        {name: one.requires_grad for name, one in model.named_parameters()}
        for model in (found, expected)
    )
    assert ours == theirs
    assert found.training is expected.training is False
    assert _plain(found.config) == _plain(expected.config)
    assert found.can_generate() == expected.can_generate()
    if expected.can_generate():
        assert found.generation_config.to_dict() == expected.generation_config.to_dict()


def _plain(config: Any) -> dict[str, object]:
    """Return a config's fields, but for the place it was read from."""
    return {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}


def tiny_tokenizer() -> Any:
    """Return a tokenizer that has one token per character."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {chr(code): code - 31 for code in range(32, 127)} | {_UNKNOWN: 0}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # untyped in transformers
        tokenizer_object=tokenizer, unk_token=_UNKNOWN, eos_token=_UNKNOWN, pad_token=_UNKNOWN
    )
