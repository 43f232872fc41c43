"""The tensors of decoders, as a table: which there are, by the keys of config.json.

A pattern is the end of a name. `{a,b}` stands for each of several words, `#` for every number: the
first for the layers of the part, the second for its experts. Conditions look at the part's config
and at the number of a layer; the defaults are those of transformers' config classes, with which a
test compares every family here. What is not certain is left out: then names are not checked.
"""

from dataclasses import dataclass

from unshard.convert.expected.conditions import (
    Condition,
    always,
    both,
    flag,
    given,
    interleaved,
    is_not,
    later,
    linear,
    stepped,
)

__all__ = ["DECODERS", "Group", "Part"]


@dataclass(frozen=True, slots=True)
class Group:
    """Patterns of names, apart by spaces, that are there together.

    Attributes:
        names: the patterns. optional: they may be missing.
        when: whether they are there.
    """

    names: str
    when: Condition = always
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """A decoder or a vision tower.

    Attributes:
        types: model types of its config.
        groups: its tensors, without the prefix of its place in a model.
        layers: the key that counts its layers, a number or a list. experts: keys that may count
            its experts.
        more_layers: checkpoints may have layers above the last: they predict further tokens, and
            transformers ignores them.
    """

    types: str
    groups: tuple[Group, ...]
    layers: str = "num_hidden_layers"
    experts: tuple[str, ...] = ("num_experts", "num_local_experts", "n_routed_experts")
    more_layers: bool = False


# decoders

_EMBEDDED = Group("embed_tokens.weight norm.weight")
_NORMS = Group("layers.#.{input,post_attention}_layernorm.weight")
_MORE_NORMS = Group("layers.#.{pre,post}_feedforward_layernorm.weight")
_POST_NORMS = Group("layers.#.post_{attention,feedforward}_layernorm.weight")
_ATTENTION = Group("layers.#.self_attn.{q,k,v,o}_proj.weight")
_BIASED = Group("layers.#.self_attn.{q,k,v,o}_proj.bias", flag("attention_bias", default=False))
_QKV_BIAS = "layers.#.self_attn.{q,k,v}_proj.bias"
_QK_NORM = Group("layers.#.self_attn.{q,k}_norm.weight")
_MLP = Group("layers.#.mlp.{gate,up,down}_proj.weight")
_MLP_BIASED = Group("layers.#.mlp.{gate,up,down}_proj.bias", flag("mlp_bias", default=False))
_BLOCK = (_EMBEDDED, _NORMS, _ATTENTION)
_LLAMA = (*_BLOCK, _MLP)
_ROUTER = "layers.#.mlp.gate.weight"
_EACH = "layers.#.mlp.experts.#.{gate,up,down}_proj.weight"
_FUSED = "layers.#.mlp.experts.{gate_up,down}_proj"
_CORRECTION = "layers.#.mlp.gate.e_score_correction_bias"
_DENSE = "layers.#.mlp.{gate,up,down}_proj.weight"
_SHARED = (
    "layers.#.mlp.shared_expert.{gate,up,down}_proj.weight layers.#.mlp.shared_expert_gate.weight"
)
_QWEN_MOE = (Group(f"{_ROUTER} {_EACH}", stepped), Group(_DENSE, is_not(stepped)))
_ROUTED = (
    Group(f"{_ROUTER} {_EACH}", later),
    Group(
        "layers.#.mlp.shared_experts.{gate,up,down}_proj.weight",
        both(later, given("n_shared_experts")),
    ),
    Group(_DENSE, is_not(later)),
)
_CORRECTED = Group(_CORRECTION, later, optional=True)  # a buffer of zeros where it is missing
_LATENT = (
    _EMBEDDED,
    _NORMS,
    Group("layers.#.self_attn.q_proj.weight", given("q_lora_rank", wanted=False)),
    Group(
        "layers.#.self_attn.{q_a_proj,q_a_layernorm,q_b_proj}.weight",
        given("q_lora_rank"),
    ),
    Group("layers.#.self_attn.{kv_a_proj_with_mqa,kv_a_layernorm,kv_b_proj,o_proj}.weight"),
    Group(
        "layers.#.self_attn.q_a_proj.bias",
        both(given("q_lora_rank"), flag("attention_bias", default=False)),
    ),
    Group(
        "layers.#.self_attn.{kv_a_proj_with_mqa,o_proj}.bias",
        flag("attention_bias", default=False),
    ),
)
_HYBRID = (
    _EMBEDDED,
    _NORMS,
    Group(
        "layers.#.self_attn.{q_proj,k_proj,v_proj,o_proj,q_norm,k_norm}.weight",
        is_not(linear),
    ),
    Group(
        "layers.#.self_attn.{q,k,v,o}_proj.bias",
        both(is_not(linear), flag("attention_bias", default=False)),
    ),
    Group("layers.#.linear_attn.{dt_bias,A_log,conv1d.weight,norm.weight,out_proj.weight}", linear),
)
_SPLIT_LINEAR = Group("layers.#.linear_attn.in_proj_{qkv,z,b,a}.weight", linear)
_GLM_BIASED = Group(_QKV_BIAS, flag("attention_bias", default=True))

DECODERS = (
    Part("llama granite", (*_LLAMA, _BIASED, _MLP_BIASED)),
    Part("mistral ministral3", _LLAMA),
    Part("qwen2 qwen2_vl_text qwen2_5_vl_text", (*_LLAMA, Group(_QKV_BIAS))),
    Part("qwen3 qwen3_vl_text", (*_LLAMA, _BIASED, _QK_NORM)),
    Part("gemma", (*_LLAMA, _BIASED)),
    Part("gemma2", (*_LLAMA, _BIASED, _MORE_NORMS)),
    Part("gemma3_text", (*_LLAMA, _BIASED, _MORE_NORMS, _QK_NORM)),
    Part("smollm3", (*_LLAMA, _BIASED, _MLP_BIASED)),
    Part(
        "seed_oss",
        (
            *_LLAMA,
            _GLM_BIASED,
            _MLP_BIASED,
            Group("layers.#.self_attn.o_proj.bias", flag("attention_out_bias", default=False)),
        ),
    ),
    Part(
        "arcee",
        (
            *_BLOCK,
            Group("layers.#.mlp.{up,down}_proj.weight"),
            _BIASED,
            Group("layers.#.mlp.{up,down}_proj.bias", flag("mlp_bias", default=False)),
        ),
    ),
    Part(
        "ernie4_5",
        (
            *_LLAMA,
            Group(
                "layers.#.self_attn.{q,k,v,o}_proj.bias layers.#.mlp.{gate,up,down}_proj.bias",
                flag("use_bias", default=False),
            ),
        ),
    ),
    Part(
        "phi3",
        (
            _EMBEDDED,
            _NORMS,
            Group("layers.#.self_attn.{qkv,o}_proj.weight layers.#.mlp.{gate_up,down}_proj.weight"),
        ),
    ),
    Part("glm", (*_BLOCK, _GLM_BIASED, Group("layers.#.mlp.{gate_up,down}_proj.weight"))),
    Part(
        "glm4",
        (
            *_BLOCK,
            _GLM_BIASED,
            Group("layers.#.mlp.{gate_up,down}_proj.weight"),
            Group("layers.#.post_{self_attn,mlp}_layernorm.weight"),
        ),
    ),
    Part("olmo", (Group("embed_tokens.weight"), _ATTENTION, _BIASED, _MLP)),
    Part("olmo2 olmo3", (_EMBEDDED, _POST_NORMS, _ATTENTION, _BIASED, _QK_NORM, _MLP)),
    Part(
        "starcoder2",
        (
            *_BLOCK,
            Group("norm.bias layers.#.{input,post_attention}_layernorm.bias"),
            Group("layers.#.mlp.{c_fc,c_proj}.weight"),
            Group(
                "layers.#.self_attn.{q,k,v,o}_proj.bias layers.#.mlp.{c_fc,c_proj}.bias",
                flag("use_bias", default=True),
            ),
        ),
    ),
    Part(
        "gpt2",
        (
            Group("{wte,wpe}.weight ln_f.{weight,bias} h.#.ln_{1,2}.{weight,bias}"),
            Group("h.#.attn.{c_attn,c_proj}.{weight,bias} h.#.mlp.{c_fc,c_proj}.{weight,bias}"),
            Group(
                "h.#.crossattention.{c_attn,q_attn,c_proj}.{weight,bias} "
                "h.#.ln_cross_attn.{weight,bias}",
                flag("add_cross_attention", default=False),
            ),
        ),
        layers="n_layer",
    ),
    Part(
        "qwen2_moe",
        (
            *_BLOCK,
            Group(_QKV_BIAS, flag("qkv_bias", default=True)),
            *_QWEN_MOE,
            Group(_SHARED, stepped),
        ),
    ),
    Part("qwen3_moe", (*_BLOCK, _BIASED, _QK_NORM, *_QWEN_MOE)),
    Part(
        "qwen3_vl_moe_text",
        (
            *_BLOCK,
            _BIASED,
            _QK_NORM,
            Group(f"{_ROUTER} {_FUSED}", stepped),
            Group(_DENSE, is_not(stepped)),
        ),
    ),
    Part(
        "mixtral",
        (
            *_BLOCK,
            Group(
                "layers.#.block_sparse_moe.gate.weight "
                "layers.#.block_sparse_moe.experts.#.w{1,2,3}.weight"
            ),
        ),
    ),
    Part("olmoe", (*_BLOCK, _BIASED, _QK_NORM, Group(f"{_ROUTER} {_EACH}"))),
    Part(
        "deepseek_v2",
        (
            *_LATENT,
            *_ROUTED,
            Group(
                "layers.#.mlp.{gate,up,down}_proj.bias",
                both(is_not(later), flag("mlp_bias", default=False)),
            ),
            Group(
                "layers.#.mlp.shared_experts.{gate,up,down}_proj.bias",
                both(both(later, given("n_shared_experts")), flag("mlp_bias", default=False)),
            ),
        ),
    ),
    Part("deepseek_v3", (*_LATENT, *_ROUTED, _CORRECTED), more_layers=True),
    Part(
        "glm4_moe",
        (
            *_BLOCK,
            Group(_QKV_BIAS, flag("attention_bias", default=False)),
            Group(_QK_NORM.names, flag("use_qk_norm", default=False)),
            *_ROUTED,
            _CORRECTED,
        ),
        more_layers=True,
    ),
    Part("dots1", (*_BLOCK, _BIASED, _QK_NORM, *_ROUTED, _CORRECTED)),
    Part(
        "gpt_oss",
        (
            *_BLOCK,
            Group("layers.#.self_attn.{q,k,v,o}_proj.bias", flag("attention_bias", default=True)),
            Group("layers.#.self_attn.sinks layers.#.mlp.router.{weight,bias}"),
            Group("layers.#.mlp.experts.{gate_up,down}_proj{,_bias}"),
        ),
    ),
    Part(
        "llama4_text",
        (
            *_BLOCK,
            _BIASED,
            Group(
                "layers.#.feed_forward.experts.{gate_up,down}_proj "
                "layers.#.feed_forward.router.weight "
                "layers.#.feed_forward.shared_expert.{gate,up,down}_proj.weight",
                interleaved,
            ),
            Group("layers.#.feed_forward.{gate,up,down}_proj.weight", is_not(interleaved)),
        ),
    ),
    Part(
        "qwen3_next",
        (
            *_HYBRID,
            Group("layers.#.linear_attn.in_proj_{qkvz,ba}.weight", linear),
            *_QWEN_MOE,
            Group(_SHARED, stepped),
        ),
    ),
    Part("qwen3_5_text", (*_HYBRID, _SPLIT_LINEAR, _MLP)),
    Part("qwen3_5_moe_text", (*_HYBRID, _SPLIT_LINEAR, Group(f"{_ROUTER} {_EACH} {_SHARED}"))),
)
