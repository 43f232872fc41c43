"""A config.json made of the arguments that Megatron records, where they determine a model.

Megatron records how a model computes, not what the hub calls it. For the five types here the one
follows from the other: they are the models of transformers that compute just this. An argument that
is not known to leave the model as it is makes the result None: nothing is guessed.

Source: `megatron.training.arguments` and `TransformerConfig` of megatron-core 0.16.1.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from unshard.read.model_config import Fields, ModelConfig

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_SIZES = {  # and their names in config.json
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "kv_channels": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
}
_KINDS: Mapping[str, tuple[type, ...]] = {
    "norm_epsilon": (int, float),
    "rotary_base": (int, float),
    "untie_embeddings_and_output_weights": (bool,),
}
_STATED = {  # must be recorded, with these values
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
}
# May be recorded, but not be set: each changes what a model computes, or what its rows mean.
_UNSET = """
    apply_layernorm_1p apply_residual_connection_post_layernorm attention_output_gate
    activation_func_clamp_value experimental_attention_variant glu_linear_offset
    heterogeneous_layers_config_encoded_json heterogeneous_layers_config_path
    hybrid_override_pattern is_hybrid_model layernorm_zero_centered_gamma linear_attention_freq
    mrope_section mtp_num_layers multi_latent_attention no_rope_freq openai_gelu qk_l2_norm
    quick_geglu rotary_interleaved rotary_seq_len_interpolation_factor spec squared_relu
    use_rope_scaling window_attn_skip_freq window_size moe_apply_probs_on_input moe_latent_size
    moe_mlp_glu_interleave_size moe_router_enable_expert_bias moe_router_group_topk
    moe_router_num_groups moe_router_pre_softmax moe_router_topk_limited_devices
    moe_router_topk_scaling_factor moe_shared_expert_gate moe_shared_expert_intermediate_size
"""
_NEUTRAL: Fields = {  # may be recorded, with these values or None
    **dict.fromkeys(_UNSET.split(), False),
    "rotary_percent": 1.0,
    "softmax_type": "vanilla",
    "moe_layer_freq": 1,
    "moe_router_score_function": "softmax",
}
# What is not compared with a config.json: what the tensors show, and what may be set where the
# config has such a routing, scaled positions, or a window.
_SHOWN = r"spec|mtp_num_layers|moe_(layer_freq|router_enable_expert_bias|shared_expert_\w+size)"
_ROUTING = r"|moe_router_(group_topk|num_groups|pre_softmax|topk_\w+)"
_SCALING = r"|position_embedding_type|rotary_seq_len_interpolation_factor|use_rope_scaling"
_WINDOW = r"|window_\w+"
# Names that fields of a model have, but for those on which no output depends, or that are compared.
_OF_MODEL = re.compile(
    r"(?!attention_(backend|dropout|softmax_in_fp32)$|activation_func_fp8|layernorm_epsilon"
    r"|mlp_chunks|norm_epsilon|qk_(clip|head_dim|layernorm|pos_emb)|rope_(scaling_factor|type)$"
    r"|rotary_(base|scaling_factor)$|moe_(aux_loss|deepep|enable_(deepep|routing_replay)|ffn|flex"
    r"|expert_capacity|extended_tp|grouped_gemm|hybridep|input_jitter|layer_recompute|pad_|per_layer"
    r"|permute_fusion|router_(bias_update|dtype|force|fusion|load_bal|padding|topk$)|token_|upcycl"
    r"|shared_expert_overlap|use_legacy|use_upcycling|z_loss))"
    r"(activation_func|attention|glu|layernorm|mla|mlp|moe|norm|qk|rope|rotary|softmax|window)_"
)


def config_of(arguments: Fields, path: Path) -> ModelConfig | None:
    """Return the config of the model that these arguments describe; None if they leave it open.

    `path` is the file that records them.
    """
    if any(_open(arguments)):
        return None
    has_experts = arguments.get("num_experts") is not None
    is_normed = arguments.get("qk_layernorm") is True
    has_bias = arguments.get("add_qkv_bias") is True
    names = {(False, False): "llama", (False, True): "qwen2", (True, False): "qwen3"}
    if has_experts:
        names = {(False, False): "mixtral", (True, False): "qwen3_moe"}
    model_type = names.get((is_normed, has_bias))
    if model_type is None:
        return None
    heads = arguments["num_attention_heads"]
    is_grouped = arguments.get("group_query_attention") is True
    fields: dict[str, object] = {
        "architectures": [_CLASSES[model_type]],
        "model_type": model_type,
        **{ours: arguments[theirs] for theirs, ours in _SIZES.items()},
        "num_key_value_heads": arguments["num_query_groups"] if is_grouped else heads,
        "intermediate_size": arguments["ffn_hidden_size"],
        "rms_norm_eps": arguments["norm_epsilon"],
        "rope_theta": arguments["rotary_base"],
        "tie_word_embeddings": arguments["untie_embeddings_and_output_weights"] is False,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if has_experts:
        fields |= _experts(model_type, arguments)
    return ModelConfig(fields, path)


def why_no_config(arguments: Fields) -> str:
    """Return what in the arguments leaves the model open; "" if nothing is recorded."""
    if not arguments:
        return ""
    return next(_open(arguments), "heads with a norm and a bias, or experts and a bias")


def doubts(arguments: Fields) -> Iterator[str]:
    """Yield, for the user, what of the config that is made of these arguments may be otherwise.

    Megatron's own NullTokenizer counts one token more than `vocab_size`, the end of a document; a
    trainer that only needs some tokenizer (slime) records the whole vocabulary with it. The stored
    rows do not tell, because they are padded, so nothing is refused.
    """
    if arguments.get("tokenizer_type") == "NullTokenizer":
        size = arguments["vocab_size"]
        yield (
            f"the training had NullTokenizer, which may count a token more than vocab_size {size}: "
            "if it did, that token's row is left out; give --config with a vocab_size that is "
            "larger by 1"
        )


def contradictions(arguments: Fields, config: ModelConfig) -> Iterator[str]:
    """Yield the arguments that the training of a model of this config cannot have had."""
    fields, kind = config.fields, config.types[0]
    found = fields.get("rope_parameters") or fields.get("rope_scaling")
    rope = found if isinstance(found, dict) else {}
    part = rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor")
    is_glm, is_latent = kind == "glm4_moe", kind == "deepseek_v3"
    is_scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    has_window = fields.get("sliding_window") and fields.get("use_sliding_window") is not False
    skipped = _SHOWN + (_ROUTING if is_glm or is_latent else "")
    skipped += (_SCALING if is_scaled else "") + (_WINDOW if has_window else "")
    expected = _STATED | {
        **_NEUTRAL,
        "moe_router_pre_softmax": fields.get("norm_topk_prob") is False,
        "moe_router_score_function": "sigmoid" if is_glm or is_latent else "softmax",
        "multi_latent_attention": is_latent,
        "qk_layernorm": is_latent or "qwen3" in kind or fields.get("use_qk_norm") is True,
        "rotary_percent": part or (0.5 if is_glm else 1.0),
    }
    for key in _others(arguments, expected):
        if re.fullmatch(skipped, key) is None:
            yield f"{key} {arguments[key]!r}"


def unknown(arguments: Fields) -> Iterator[str]:
    """Yield, for the user, what a version of Megatron that is not known here may have added."""
    for key, value in arguments.items():
        if _OF_MODEL.match(key) and key not in _NEUTRAL and value not in (None, False, ""):
            yield (
                f"the training had {key} {value!r}, an argument that is not known here: if it "
                "changes what the model computes, or what rows mean, the output is not that model"
            )


def _experts(model_type: str, arguments: Fields) -> dict[str, object]:
    width, topk = arguments["moe_ffn_hidden_size"], arguments["moe_router_topk"]
    count = arguments["num_experts"]
    if model_type == "mixtral":
        sizes: dict[str, object] = {"num_local_experts": count, "intermediate_size": width}
    else:
        sizes = {
            "num_experts": count,
            "moe_intermediate_size": width,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }
    return {**sizes, "num_experts_per_tok": topk}


def _open(arguments: Fields) -> Iterator[str]:
    """Yield what leaves the model open: arguments that are missing, or have other values."""
    has_experts = arguments.get("num_experts") is not None
    needed = [*_SIZES, "ffn_hidden_size"]
    needed += ["num_query_groups"] if arguments.get("group_query_attention") is True else []
    needed += ["num_experts", "moe_ffn_hidden_size", "moe_router_topk"] if has_experts else []
    kinds = {**dict.fromkeys(needed, (int,)), **_KINDS}
    for key, types in kinds.items():
        value = arguments.get(key)
        if type(value) not in types or (bool not in types and not _is_positive(value)):
            yield f"{key} is {value!r}"
    yield from (f"{key} is {arguments[key]!r}" for key in _others(arguments, _NEUTRAL))
    for key, value in _STATED.items():
        if arguments.get(key) != value:
            yield f"{key} is {arguments.get(key)!r}, not {value!r}"


def _others(arguments: Fields, expected: Fields) -> Iterator[str]:
    """Yield what is recorded with another value, unless it is of experts and there are none."""
    is_dense = arguments.get("num_experts") is None
    for key, value in expected.items():
        if arguments.get(key) not in (None, value) and not (is_dense and key.startswith("moe_")):
            yield key


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and value > 0
