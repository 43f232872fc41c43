"""A config.json made of the arguments that Megatron records, where they determine a model.

Megatron records how a model computes, not what the hub calls it. For the five types here the one
follows from the other: they are the models of transformers that compute just this. An argument that
is not known to leave the model as it is makes the result None: nothing is guessed.

Source: `megatron.training.arguments` and `TransformerConfig` of megatron-core 0.16.1.
"""

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
_NEUTRAL = {  # may be recorded, with these values or None
    "apply_layernorm_1p": False,
    "apply_residual_connection_post_layernorm": False,
    "attention_output_gate": False,
    "activation_func_clamp_value": None,
    "experimental_attention_variant": None,
    "glu_linear_offset": 0.0,
    "heterogeneous_layers_config_encoded_json": None,
    "heterogeneous_layers_config_path": None,
    "hybrid_override_pattern": None,
    "is_hybrid_model": False,
    "layernorm_zero_centered_gamma": False,
    "linear_attention_freq": None,
    "moe_latent_size": None,
    "mrope_section": None,
    "mtp_num_layers": 0,
    "multi_latent_attention": False,
    "no_rope_freq": None,
    "openai_gelu": False,
    "qk_l2_norm": False,
    "quick_geglu": False,
    "rotary_interleaved": False,
    "rotary_percent": 1.0,
    "rotary_seq_len_interpolation_factor": None,
    "softmax_type": "vanilla",
    "spec": None,
    "squared_relu": False,
    "use_rope_scaling": False,
    "window_attn_skip_freq": None,
    "window_size": None,
}
_NEUTRAL_EXPERTS = {
    "moe_layer_freq": 1,
    "moe_router_enable_expert_bias": False,
    "moe_router_group_topk": None,
    "moe_router_num_groups": None,
    "moe_router_pre_softmax": False,
    "moe_router_score_function": "softmax",
    "moe_router_topk_scaling_factor": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_apply_probs_on_input": False,
}


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
    for key, value in (_NEUTRAL | (_NEUTRAL_EXPERTS if has_experts else {})).items():
        if arguments.get(key) is not None and arguments[key] != value:
            yield f"{key} is {arguments[key]!r}"
    for key, value in _STATED.items():
        if arguments.get(key) != value:
            yield f"{key} is {arguments.get(key)!r}, not {value!r}"


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and value > 0
