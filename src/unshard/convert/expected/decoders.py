"""The tensors of decoders by model type, as a table.

A pattern is the end of a name. `{a,b}` means each of several words; the first `#` counts the layers
of the component, the second one their experts. The defaults of the conditions are those of
transformers' config classes, with which a test compares every family here. A family whose config
does not decide which tensors there are is not listed: then names are not checked.
"""

from collections.abc import Mapping

from unshard.convert.expected.conditions import (
    Group,
    Groups,
    deepseek_sparse,
    flag,
    given,
    is_not,
    linear_attention,
    llama4_sparse,
    qwen_sparse,
    when,
)

__all__ = ["DECODERS"]

_EMBEDDED = "embed_tokens.weight norm.weight"
_NORMS = "layers.#.{input,post_attention}_layernorm.weight"
_MORE_NORMS = "layers.#.{pre,post}_feedforward_layernorm.weight"
_POST_NORMS = "layers.#.post_{attention,feedforward}_layernorm.weight"
_ATTENTION = "layers.#.self_attn.{q,k,v,o}_proj.weight"
_ATTENTION_BIAS = "layers.#.self_attn.{q,k,v,o}_proj.bias"
_QKV_BIAS = "layers.#.self_attn.{q,k,v}_proj.bias"
_QK_NORM = "layers.#.self_attn.{q,k}_norm.weight"
_MLP = "layers.#.mlp.{gate,up,down}_proj.weight"
_MLP_BIAS = "layers.#.mlp.{gate,up,down}_proj.bias"
_FUSED_MLP = "layers.#.mlp.{gate_up,down}_proj.weight"
_ROUTER = "layers.#.mlp.gate.weight"
_EACH = f"{_ROUTER} layers.#.mlp.experts.#.{{gate,up,down}}_proj.weight"
_FUSED = f"{_ROUTER} layers.#.mlp.experts.{{gate_up,down}}_proj"
_SHARED = (
    "layers.#.mlp.shared_expert.{gate,up,down}_proj.weight layers.#.mlp.shared_expert_gate.weight"
)
_LINEAR = "layers.#.linear_attn.{dt_bias,A_log,conv1d.weight,norm.weight,out_proj.weight}"

_BIAS = flag("attention_bias")
_BIASED = when(_ATTENTION_BIAS, _BIAS)
_MLP_BIASED = when(_MLP_BIAS, flag("mlp_bias"))
_GLM_BIASED = when(_QKV_BIAS, flag("attention_bias", default=True))
_BLOCK = (_EMBEDDED, _NORMS, _ATTENTION)
_LLAMA = (*_BLOCK, _MLP)
_QWEN_DENSE = when(_MLP, is_not(qwen_sparse))
_QWEN_MOE = (when(_EACH, qwen_sparse), _QWEN_DENSE)
_HAS_SHARED = (deepseek_sparse, given("n_shared_experts"))
_ROUTED = (
    when(_EACH, deepseek_sparse),
    when("layers.#.mlp.shared_experts.{gate,up,down}_proj.weight", *_HAS_SHARED),
    when(_MLP, is_not(deepseek_sparse)),
)
# A buffer: transformers fills it with zeros where it is missing.
_CORRECTED = Group("layers.#.mlp.gate.e_score_correction_bias", (deepseek_sparse,), optional=True)
_LATENT = (
    _EMBEDDED,
    _NORMS,
    when("layers.#.self_attn.q_proj.weight", is_not(given("q_lora_rank"))),
    when("layers.#.self_attn.{q_a_proj,q_a_layernorm,q_b_proj}.weight", given("q_lora_rank")),
    "layers.#.self_attn.{kv_a_proj_with_mqa,kv_a_layernorm,kv_b_proj,o_proj}.weight",
    when("layers.#.self_attn.q_a_proj.bias", given("q_lora_rank"), _BIAS),
    when("layers.#.self_attn.{kv_a_proj_with_mqa,o_proj}.bias", _BIAS),
)
_HYBRID = (
    _EMBEDDED,
    _NORMS,
    when(
        "layers.#.self_attn.{q_proj,k_proj,v_proj,o_proj,q_norm,k_norm}.weight",
        is_not(linear_attention),
    ),
    when(_ATTENTION_BIAS, is_not(linear_attention), _BIAS),
    when(_LINEAR, linear_attention),
)
_SPLIT_LINEAR = when("layers.#.linear_attn.in_proj_{qkv,z,b,a}.weight", linear_attention)

_TABLE: Mapping[str, Groups] = {
    "llama granite smollm3": (*_LLAMA, _BIASED, _MLP_BIASED),
    "mistral ministral3": _LLAMA,
    "qwen2 qwen2_vl_text qwen2_5_vl_text": (*_LLAMA, _QKV_BIAS),
    "qwen3 qwen3_vl_text": (*_LLAMA, _BIASED, _QK_NORM),
    "gemma": (*_LLAMA, _BIASED),
    "gemma2": (*_LLAMA, _BIASED, _MORE_NORMS),
    "gemma3_text": (*_LLAMA, _BIASED, _MORE_NORMS, _QK_NORM),
    "seed_oss": (
        *_LLAMA,
        _GLM_BIASED,
        _MLP_BIASED,
        when("layers.#.self_attn.o_proj.bias", flag("attention_out_bias")),
    ),
    "arcee": (
        *_BLOCK,
        "layers.#.mlp.{up,down}_proj.weight",
        _BIASED,
        when("layers.#.mlp.{up,down}_proj.bias", flag("mlp_bias")),
    ),
    "ernie4_5": (*_LLAMA, when(f"{_ATTENTION_BIAS} {_MLP_BIAS}", flag("use_bias"))),
    "phi3": (_EMBEDDED, _NORMS, "layers.#.self_attn.{qkv,o}_proj.weight", _FUSED_MLP),
    "glm": (*_BLOCK, _GLM_BIASED, _FUSED_MLP),
    "glm4": (
        *_BLOCK,
        _GLM_BIASED,
        _FUSED_MLP,
        "layers.#.post_{self_attn,mlp}_layernorm.weight",
    ),
    "olmo": ("embed_tokens.weight", _ATTENTION, _BIASED, _MLP),
    "olmo2 olmo3": (_EMBEDDED, _POST_NORMS, _ATTENTION, _BIASED, _QK_NORM, _MLP),
    "starcoder2": (
        *_BLOCK,
        "norm.bias layers.#.{input,post_attention}_layernorm.bias",
        "layers.#.mlp.{c_fc,c_proj}.weight",
        when(
            f"{_ATTENTION_BIAS} layers.#.mlp.{{c_fc,c_proj}}.bias", flag("use_bias", default=True)
        ),
    ),
    "gpt2": (
        "{wte,wpe}.weight ln_f.{weight,bias} h.#.ln_{1,2}.{weight,bias}",
        "h.#.attn.{c_attn,c_proj}.{weight,bias} h.#.mlp.{c_fc,c_proj}.{weight,bias}",
        when(
            "h.#.crossattention.{c_attn,q_attn,c_proj}.{weight,bias} "
            "h.#.ln_cross_attn.{weight,bias}",
            flag("add_cross_attention"),
        ),
    ),
    "qwen2_moe": (
        *_BLOCK,
        when(_QKV_BIAS, flag("qkv_bias", default=True)),
        *_QWEN_MOE,
        when(_SHARED, qwen_sparse),
    ),
    "qwen3_moe": (*_BLOCK, _BIASED, _QK_NORM, *_QWEN_MOE),
    "qwen3_vl_moe_text": (*_BLOCK, _BIASED, _QK_NORM, when(_FUSED, qwen_sparse), _QWEN_DENSE),
    "mixtral": (
        *_BLOCK,
        "layers.#.block_sparse_moe.gate.weight layers.#.block_sparse_moe.experts.#.w{1,2,3}.weight",
    ),
    "olmoe": (*_BLOCK, _BIASED, _QK_NORM, _EACH),
    "deepseek_v2": (
        *_LATENT,
        *_ROUTED,
        when(_MLP_BIAS, is_not(deepseek_sparse), flag("mlp_bias")),
        when(
            "layers.#.mlp.shared_experts.{gate,up,down}_proj.bias", *_HAS_SHARED, flag("mlp_bias")
        ),
    ),
    "deepseek_v3": (*_LATENT, *_ROUTED, _CORRECTED),
    "glm4_moe": (
        *_BLOCK,
        when(_QKV_BIAS, _BIAS),
        when(_QK_NORM, flag("use_qk_norm")),
        *_ROUTED,
        _CORRECTED,
    ),
    "dots1": (*_BLOCK, _BIASED, _QK_NORM, *_ROUTED, _CORRECTED),
    "gpt_oss": (
        *_BLOCK,
        when(_ATTENTION_BIAS, flag("attention_bias", default=True)),
        "layers.#.self_attn.sinks layers.#.mlp.router.{weight,bias}",
        "layers.#.mlp.experts.{gate_up,down}_proj{,_bias}",
    ),
    "llama4_text": (
        *_BLOCK,
        _BIASED,
        when(
            "layers.#.feed_forward.experts.{gate_up,down}_proj "
            "layers.#.feed_forward.router.weight "
            "layers.#.feed_forward.shared_expert.{gate,up,down}_proj.weight",
            llama4_sparse,
        ),
        when("layers.#.feed_forward.{gate,up,down}_proj.weight", is_not(llama4_sparse)),
    ),
    "qwen3_next": (
        *_HYBRID,
        when("layers.#.linear_attn.in_proj_{qkvz,ba}.weight", linear_attention),
        *_QWEN_MOE,
        when(_SHARED, qwen_sparse),
    ),
    "qwen3_5_text": (*_HYBRID, _SPLIT_LINEAR, _MLP),
    "qwen3_5_moe_text": (*_HYBRID, _SPLIT_LINEAR, _EACH, _SHARED),
}

DECODERS = {one: groups for types, groups in _TABLE.items() for one in types.split()}
"""The tensors of decoders by model type."""
