"""Megatron-core's names of tensors and those of the hub, by model family, in one table.

Sources: megatron-core 0.16.1, which wrote files for the tests; slime's `megatron_to_hf` and the
bridges of Megatron-Bridge 0.3.1. Experts stay stacked, as in transformers' training;
`convert.names` splits them.
"""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple


class How(Enum):
    """How a tensor is divided into tensors of the hub."""

    WHOLE = "one tensor, unchanged"
    VOCABULARY = "the rows of the vocabulary, without padding"
    HALVES = "the upper and the lower half of the rows"
    GROUPS = "queries, keys and values, which alternate by groups of heads"


class HubNames(NamedTuple):
    """The names on the hub for the parts of a tensor."""

    names: tuple[str, ...]
    how: How = How.WHOLE


_Table = Mapping[str, HubNames]


def _unchanged(text: str) -> dict[str, HubNames]:
    """Return the table of a text whose lines are Megatron's name and the hub's name."""
    pairs = (line.split() for line in text.strip().splitlines())
    return {megatron: HubNames((hub,)) for megatron, hub in pairs}


TOP: _Table = {
    "embedding.word_embeddings.weight": HubNames(("model.embed_tokens.weight",), How.VOCABULARY),
    "output_layer.weight": HubNames(("lm_head.weight",), How.VOCABULARY),
    "decoder.final_layernorm.weight": HubNames(("model.norm.weight",)),
}
"""Tensors outside of layers."""

_LAYER = _unchanged(
    """
    input_layernorm.weight input_layernorm.weight
    pre_mlp_layernorm.weight post_attention_layernorm.weight
    mlp.linear_fc1.layer_norm_weight post_attention_layernorm.weight
    self_attention.linear_proj.weight self_attn.o_proj.weight
    mlp.linear_fc2.weight mlp.down_proj.weight
    """
) | {"mlp.linear_fc1.weight": HubNames(("mlp.gate_proj.weight", "mlp.up_proj.weight"), How.HALVES)}
_GROUPED = _unchanged("self_attention.linear_qkv.layer_norm_weight input_layernorm.weight") | {
    f"self_attention.linear_qkv.{end}": HubNames(
        tuple(f"self_attn.{part}_proj.{end}" for part in "qkv"), How.GROUPS
    )
    for end in ("weight", "bias")
}
_QK_NORM = _unchanged(
    """
    self_attention.q_layernorm.weight self_attn.q_norm.weight
    self_attention.k_layernorm.weight self_attn.k_norm.weight
    """
)
_LATENT = _unchanged(
    """
    self_attention.linear_q_proj.weight self_attn.q_proj.weight
    self_attention.linear_q_down_proj.weight self_attn.q_a_proj.weight
    self_attention.linear_q_up_proj.layer_norm_weight self_attn.q_a_layernorm.weight
    self_attention.q_layernorm.weight self_attn.q_a_layernorm.weight
    self_attention.linear_q_up_proj.weight self_attn.q_b_proj.weight
    self_attention.linear_kv_down_proj.weight self_attn.kv_a_proj_with_mqa.weight
    self_attention.linear_kv_up_proj.layer_norm_weight self_attn.kv_a_layernorm.weight
    self_attention.kv_layernorm.weight self_attn.kv_a_layernorm.weight
    self_attention.linear_kv_up_proj.weight self_attn.kv_b_proj.weight
    """
)
_EXPERTS = _unchanged(
    """
    mlp.router.weight mlp.gate.weight
    mlp.experts.experts.linear_fc1.weight mlp.experts.gate_up_proj
    mlp.experts.experts.linear_fc2.weight mlp.experts.down_proj
    """
)
_SHARED = _unchanged(
    """
    mlp.router.expert_bias mlp.gate.e_score_correction_bias
    mlp.shared_experts.linear_fc2.weight mlp.shared_experts.down_proj.weight
    """
) | {
    "mlp.shared_experts.linear_fc1.weight": HubNames(
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"), How.HALVES
    )
}
_MTP = _unchanged(
    """
    enorm.weight enorm.weight
    hnorm.weight hnorm.weight
    eh_proj.weight eh_proj.weight
    final_layernorm.weight shared_head.norm.weight
    """
)


class LayerNames(NamedTuple):
    """The tensors in the layers of a model type.

    Attributes:
        layers: tensors of a layer, by the ends of Megatron's names.
        mtp: tensors of an MTP layer, without those of the layer inside it; empty if the family has
            no MTP layers.
    """

    layers: _Table
    mtp: _Table = MappingProxyType({})


_DENSE = _LAYER | _GROUPED
_MOE = _DENSE | _EXPERTS

FAMILIES: Mapping[str, LayerNames] = {
    "llama": LayerNames(_DENSE),
    "mistral": LayerNames(_DENSE),
    "qwen2": LayerNames(_DENSE),
    "qwen3": LayerNames(_DENSE | _QK_NORM),
    "mixtral": LayerNames(_MOE),
    "qwen3_moe": LayerNames(_MOE | _QK_NORM),
    "deepseek_v3": LayerNames(_LAYER | _LATENT | _EXPERTS | _SHARED, _MTP),
    "glm4_moe": LayerNames(_MOE | _QK_NORM | _SHARED, _MTP),
}
"""By the model types of config.json. Qwen2.5 is `qwen2`."""
