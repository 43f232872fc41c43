"""The tensors of decoders by model type, as a table, and the conditions on a config in it. Pure.

A pattern is the end of a name. `{a,b}` means each of several words; the first `#` counts the layers
of the component, the second `#` their experts. The defaults of the conditions are those of
transformers' config classes; a test compares every family with them. Families whose config does not
determine the tensors are left out, and their names are not checked.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from unshard.read.model_config import Fields

Condition = Callable[[Fields, int], bool]
"""Decide whether a layer has a group, by its number and the config of its component.

Raises NotKnownError if the config leaves it open.
"""


class NotKnownError(Exception):
    """A config does not determine the tensors of its model; never reaches the user."""


class NameGroup(NamedTuple):
    """Patterns of names, separated by spaces, that a layer has if all conditions hold.

    An `optional` group may be missing in a checkpoint even then.
    """

    names: str
    conditions: tuple[Condition, ...] = ()
    optional: bool = False


Groups = tuple[str | NameGroup, ...]
"""All tensors of a component; plain patterns have no condition."""


def when(names: str, *conditions: Condition) -> NameGroup:
    """Return a group of names with conditions."""
    return NameGroup(names, conditions)


def is_not(condition: Condition) -> Condition:
    """Return the opposite of a condition."""
    return lambda config, layer: not condition(config, layer)


def flag(key: str, *, default: bool = False) -> Condition:
    """Return the condition that a key is true; the default is that of transformers."""

    def decide(config: Fields, _layer: int) -> bool:
        value = config.get(key, default)
        if not isinstance(value, bool):
            raise NotKnownError
        return value

    return decide


def _positive(key: str) -> Condition:
    """Return the condition that a size is above 0; a config without the key leaves it open."""

    def decide(config: Fields, _layer: int) -> bool:
        value = config.get(key, "")  # a missing key is as unclear as a string
        if value is not None and type(value) is not int:
            raise NotKnownError
        return bool(value)

    return decide


def integer(config: Fields, key: str, default: int | None = None) -> int:
    """Return a count in a config.

    Raises:
        NotKnownError: it is missing without a default, negative, or of another type.
    """
    value = config.get(key, default)
    if type(value) is not int or value < 0:
        raise NotKnownError
    return value


def _decide_qwen_sparse(config: Fields, layer: int) -> bool:
    """Decide whether a layer of Qwen has experts: every Nth layer, except listed dense layers."""
    dense = config.get("mlp_only_layers")
    step = integer(config, "decoder_sparse_step", 1)
    if not isinstance(dense, list | None) or not step:
        raise NotKnownError
    return layer not in (dense or ()) and (layer + 1) % step == 0


def _decide_deepseek_sparse(config: Fields, layer: int) -> bool:
    """Decide whether a layer has experts, as in DeepSeek: all but the first few layers do."""
    if config.get("moe_layer_freq", 1) != 1:
        raise NotKnownError
    return layer >= integer(config, "first_k_dense_replace")


def _decide_llama4_sparse(config: Fields, layer: int) -> bool:
    """Decide whether a layer of Llama 4 has experts."""
    layers = config.get("moe_layers")
    if layers is None:
        step = integer(config, "interleave_moe_layer_step")
        return step > 0 and (layer + 1) % step == 0
    if not isinstance(layers, list):
        raise NotKnownError
    return layer in layers


def _decide_linear_attention(config: Fields, layer: int) -> bool:
    """Decide whether a layer has linear attention instead of full attention."""
    types = config.get("layer_types")
    if types is None:
        interval = integer(config, "full_attention_interval", 4)
        if not interval:
            raise NotKnownError
        return (layer + 1) % interval != 0
    if not isinstance(types, list) or layer >= len(types):
        raise NotKnownError
    if types[layer] not in ("linear_attention", "full_attention"):
        raise NotKnownError
    return bool(types[layer] == "linear_attention")


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
_QWEN_DENSE = when(_MLP, is_not(_decide_qwen_sparse))
_QWEN_MOE = (when(_EACH, _decide_qwen_sparse), _QWEN_DENSE)
_HAS_SHARED = (_decide_deepseek_sparse, _positive("n_shared_experts"))
_ROUTED = (
    when(_EACH, _decide_deepseek_sparse),
    when("layers.#.mlp.shared_experts.{gate,up,down}_proj.weight", *_HAS_SHARED),
    when(_MLP, is_not(_decide_deepseek_sparse)),
)
# A buffer: transformers fills it with zeros if it is missing.
_CORRECTED = NameGroup(
    "layers.#.mlp.gate.e_score_correction_bias", (_decide_deepseek_sparse,), optional=True
)
_LATENT = (
    _EMBEDDED,
    _NORMS,
    when("layers.#.self_attn.q_proj.weight", is_not(_positive("q_lora_rank"))),
    when("layers.#.self_attn.{q_a_proj,q_a_layernorm,q_b_proj}.weight", _positive("q_lora_rank")),
    "layers.#.self_attn.{kv_a_proj_with_mqa,kv_a_layernorm,kv_b_proj,o_proj}.weight",
    when("layers.#.self_attn.q_a_proj.bias", _positive("q_lora_rank"), _BIAS),
    when("layers.#.self_attn.{kv_a_proj_with_mqa,o_proj}.bias", _BIAS),
)
_HYBRID = (
    _EMBEDDED,
    _NORMS,
    when(
        "layers.#.self_attn.{q_proj,k_proj,v_proj,o_proj,q_norm,k_norm}.weight",
        is_not(_decide_linear_attention),
    ),
    when(_ATTENTION_BIAS, is_not(_decide_linear_attention), _BIAS),
    when(_LINEAR, _decide_linear_attention),
)
_SPLIT_LINEAR = when("layers.#.linear_attn.in_proj_{qkv,z,b,a}.weight", _decide_linear_attention)

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
        when(_SHARED, _decide_qwen_sparse),
    ),
    "qwen3_moe": (*_BLOCK, _BIASED, _QK_NORM, *_QWEN_MOE),
    "qwen3_vl_moe_text": (
        *_BLOCK,
        _BIASED,
        _QK_NORM,
        when(_FUSED, _decide_qwen_sparse),
        _QWEN_DENSE,
    ),
    "mixtral": (
        *_BLOCK,
        "layers.#.block_sparse_moe.gate.weight layers.#.block_sparse_moe.experts.#.w{1,2,3}.weight",
    ),
    "olmoe": (*_BLOCK, _BIASED, _QK_NORM, _EACH),
    "deepseek_v2": (
        *_LATENT,
        *_ROUTED,
        when(_MLP_BIAS, is_not(_decide_deepseek_sparse), flag("mlp_bias")),
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
            _decide_llama4_sparse,
        ),
        when("layers.#.feed_forward.{gate,up,down}_proj.weight", is_not(_decide_llama4_sparse)),
    ),
    "qwen3_next": (
        *_HYBRID,
        when("layers.#.linear_attn.in_proj_{qkvz,ba}.weight", _decide_linear_attention),
        *_QWEN_MOE,
        when(_SHARED, _decide_qwen_sparse),
    ),
    "qwen3_5_text": (*_HYBRID, _SPLIT_LINEAR, _MLP),
    "qwen3_5_moe_text": (*_HYBRID, _SPLIT_LINEAR, _EACH, _SHARED),
}

DECODERS = {one: groups for types, groups in _TABLE.items() for one in types.split()}
"""The tensors of decoders by model type."""
