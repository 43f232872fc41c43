"""Makes a config.json from the arguments that Megatron records, if they determine a model.

Megatron records how a model computes, but not its type on the hub. The five types here follow from
the arguments: they are the models of transformers that compute exactly this. Any argument that may
change the model makes the result None: nothing is guessed.

Source: `megatron.training.arguments` and `TransformerConfig` of megatron-core 0.16.1.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from unshard.fronts import Text
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
_REQUIRED = {  # must be recorded, with these values
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
}
# May be recorded, but not be set: each changes the computation, or the meaning of rows.
_UNSET = """
    apply_layernorm_1p apply_residual_connection_post_layernorm attention_output_gate
    activation_func_clamp_value experimental_attention_variant glu_linear_offset
    heterogeneous_layers_config_encoded_json heterogeneous_layers_config_path
    hybrid_override_pattern is_hybrid_model layernorm_zero_centered_gamma linear_attention_freq
    mrope_section mtp_num_layers multi_latent_attention no_rope_freq openai_gelu qk_l2_norm
    quick_geglu rotary_interleaved spec squared_relu use_rope_scaling window_attn_skip_freq
    window_size moe_apply_probs_on_input moe_latent_size moe_mlp_glu_interleave_size
    moe_router_enable_expert_bias moe_router_pre_softmax moe_router_topk_limited_devices
    moe_shared_expert_gate moe_shared_expert_intermediate_size
"""
_NEUTRAL: Fields = {  # may be recorded, with these values or None
    **dict.fromkeys(_UNSET.split(), False),
    "rotary_percent": 1.0,
    "rotary_seq_len_interpolation_factor": 1,
    "softmax_type": "vanilla",
    "moe_layer_freq": 1,
    "moe_router_group_topk": 1,
    "moe_router_num_groups": 1,
    "moe_router_score_function": "softmax",
    "moe_router_topk_scaling_factor": 1,
}
# Arguments that are not compared with a config.json here: the tensors show them, `_scaling` checks
# them, or they may be set because the config has such a routing, or a window.
_SKIPPED = r"spec|mtp_num_layers|moe_(layer_freq|router_enable_expert_bias|shared_expert_\w+size)"
_SKIPPED += r"|rotary_seq_len_interpolation_factor|use_rope_scaling"
_ROUTING = r"|moe_router_(group_topk|num_groups|pre_softmax|topk_\w+)"
_WINDOW = r"|window_\w+"
_SCALED_BY = {  # types of scaled positions in config.json, and Megatron's argument for each
    "llama3": "use_rope_scaling",
    "linear": "rotary_seq_len_interpolation_factor",
    "yarn": "rotary_scaling_factor",
}
# Words in names of arguments about the model; and names with such a word that do not affect the
# output, or are compared elsewhere. Other names with such a word come from an unknown version.
_OF_MODEL = re.compile(
    r"(^|_)(activation_func|attention|attn|glu|gate|hyper|layernorm|logits?|mla|mlp|moe"
    r"|mscale|mup|multiplier|norms?|parallel_residual|qk|query|residual|rope|rotary|scale_embeddings|sinks?"
    r"|softcap\w*|softmax|window)(_|$)"
)
_KNOWN = frozenset(
    """
    apply_query_key_layer_scaling apply_rope_fusion apply_wd_to_qk_layernorm attention_backend
    attention_dropout attention_softmax_in_fp32 biencoder_shared_query_context_model
    cache_mla_latents create_attention_mask_in_dataloader dino_norm_last_layer
    ep_overlap_early_attn_memory_release fp32_residual_connection group_query_attention
    hybrid_attention_ratio hybrid_mlp_ratio kitchen_attention_backend layernorm_epsilon
    log_max_attention_logit log_params_norm loss_scale_window masked_softmax_fusion
    mlp_chunks_for_prefill moe_aux_loss_coeff moe_deepep_num_sms moe_enable_deepep
    moe_enable_routing_replay moe_expert_capacity_factor moe_extended_tp moe_ffn_hidden_size
    moe_flex_dispatcher_backend moe_grouped_gemm moe_hybridep_num_sms moe_input_jitter_eps
    moe_layer_recompute moe_pad_expert_input_to_capacity moe_pad_experts_for_cuda_graph_inference
    moe_per_layer_logging moe_permute_fusion moe_router_bias_update_rate moe_router_dtype
    moe_router_force_load_balancing moe_router_fusion moe_router_load_balancing_type
    moe_router_padding_for_fp8 moe_router_padding_for_quantization moe_router_topk
    moe_shared_expert_overlap moe_token_dispatcher_type moe_token_drop_policy
    moe_upcycling_granularity moe_use_legacy_grouped_gemm moe_use_upcycling moe_z_loss_coeff mscale
    mscale_all_dim multi_latent_attention no_persist_layer_norm norm_epsilon num_attention_heads
    num_moe_experts num_query_groups overlap_moe_expert_parallel_comm qk_clip qk_clip_alpha
    qk_clip_threshold qk_head_dim qk_layernorm qk_pos_emb_head_dim query_in_block_prob
    relative_attention_max_distance relative_attention_num_buckets reset_attention_mask
    rope_scaling_factor rope_type rotary_base rotary_scaling_factor use_flash_attn
    use_kitchen_attention use_rotary_position_embeddings use_te_activation_func
    """.split()
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
    """Return why the arguments do not determine a model; "" if none are recorded."""
    if not arguments:
        return ""
    return next(_open(arguments), "heads with a norm and a bias, or experts and a bias")


def doubts(arguments: Fields) -> Iterator[str]:
    """Yield doubts, for the user, about the config that is made of these arguments.

    Megatron's own NullTokenizer counts one token more than `vocab_size`, the end of a document; a
    trainer that only needs some tokenizer (slime) records the whole vocabulary with it. The stored
    rows are padded and do not show which, so nothing is refused.
    """
    if arguments.get("tokenizer_type") == "NullTokenizer":
        size = arguments["vocab_size"]
        yield Text(
            f"the training had NullTokenizer, which may count a token more than vocab_size {size}: "
            "if it did, that token's row is left out; pass ⟦--config⟧ with a vocab_size that is "
            "larger by 1"
        )


def contradictions(arguments: Fields, config: ModelConfig) -> Iterator[str]:
    """Yield arguments that contradict a model's config."""
    fields, kind = config.fields, config.types[0]
    rope = fields.get("rope_parameters") or fields.get("rope_scaling")
    rope = rope if isinstance(rope, dict) else {}
    part = rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor")
    is_glm, is_latent = kind == "glm4_moe", kind == "deepseek_v3"
    window = fields.get("use_sliding_window") is not False and fields.get("sliding_window")
    activation = fields.get("hidden_act") or fields.get("hidden_activation")
    skipped = _SKIPPED + (_ROUTING if is_glm or is_latent else "") + (_WINDOW if window else "")
    expected = _REQUIRED | {
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
    if isinstance(window, int) and _window(arguments) not in (None, window, window - 1):
        yield f"window_size {arguments['window_size']!r}, not the sliding_window {window}"
    if arguments.get("swiglu") is True and activation not in (None, "silu", "swish"):
        yield f"swiglu True, not the hidden_act {activation}"
    yield from _scaling(arguments, rope)


def _window(arguments: Fields) -> object:
    """Return the number of earlier tokens that a token sees; None for all, or if unknown."""
    size = arguments.get("window_size")
    return size[0] if isinstance(size, tuple) and size[:1] != (-1,) else None


def _scaling(arguments: Fields, rope: Fields) -> Iterator[str]:
    """Yield the scaling of positions in training, if the config has another."""
    configured = str(rope.get("rope_type") or rope.get("type") or "default")
    factors = {"llama3": arguments.get("rope_scaling_factor")}
    factors |= {kind: arguments.get(key) for kind, key in _SCALED_BY.items() if kind != "llama3"}
    is_on = {kind: factors[kind] not in (None, 1) for kind in ("linear", "yarn")}
    is_on["llama3"] = arguments.get("use_rope_scaling") is True
    is_on["yarn"] &= arguments.get("multi_latent_attention") is True
    is_on["yarn"] &= arguments.get("rope_type") in (None, "yarn")
    trained = next((kind for kind, value in is_on.items() if value), "default")
    recorded = _SCALED_BY.get(configured if trained == "default" else trained)
    if recorded is None or arguments.get(recorded) is None:
        return  # both are unscaled, or the scaling is not recorded
    factor = rope.get("factor")
    if trained != configured:
        was = f"positions scaled by {trained}" if trained in _SCALED_BY else "plain positions"
        yield f"{was} ({recorded} {arguments[recorded]!r}), not those of rope_type {configured}"
    elif None not in (factor, factors[configured]) and factor != factors[configured]:
        yield f"positions scaled by {factors[configured]!r}, not by {factor!r}"
    for key in ("mscale", "mscale_all_dim") if trained == configured == "yarn" else ():
        if None not in (values := (arguments.get(key), rope.get(key))) and values[0] != values[1]:
            yield f"{key} {values[0]!r}, not {values[1]!r}"


def unknown(arguments: Fields) -> Iterator[str]:
    """Yield a note about arguments that an unknown version of Megatron may have added."""
    known = {*_KNOWN, *_NEUTRAL, *_REQUIRED}
    named = [
        f"{key} {value!r}"
        for key, value in arguments.items()
        if _OF_MODEL.search(key) and key not in known and value not in (None, False, "")
    ]
    if named:
        yield (
            f"the training had {', '.join(named)}, which is not known here: if it changes the "
            "model's computation, or the meaning of rows, the output is not that model"
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
    """Yield arguments that leave the model open: they are missing, or have other values."""
    has_experts = arguments.get("num_experts") is not None
    needed = [*_SIZES, "ffn_hidden_size"]
    needed += ["num_query_groups"] if arguments.get("group_query_attention") is True else []
    needed += ["num_experts", "moe_ffn_hidden_size", "moe_router_topk"] if has_experts else []
    kinds = {**dict.fromkeys(needed, (int,)), **_KINDS}
    for key, types in kinds.items():
        value = arguments.get(key)
        is_positive = isinstance(value, int | float) and value > 0
        if type(value) not in types or (bool not in types and not is_positive):
            yield f"{key} is {value!r}"
    yield from (f"{key} is {arguments[key]!r}" for key in _others(arguments, _NEUTRAL))
    for key, value in _REQUIRED.items():
        if arguments.get(key) != value:
            yield f"{key} is {arguments.get(key)!r}, not {value!r}"


def _others(arguments: Fields, expected: Fields) -> Iterator[str]:
    """Yield arguments with other values; those of experts or windows only if there are some."""
    parts = {"moe_": arguments.get("num_experts"), "window_": _window(arguments)}
    absent = tuple(start for start, value in parts.items() if value is None)
    for key, value in expected.items():
        neutral = (None, value, False) if key in _NEUTRAL and not value else (None, value)
        if arguments.get(key) not in neutral and not key.startswith(absent):
            yield key
