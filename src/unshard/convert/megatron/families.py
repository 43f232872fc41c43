"""What Megatron-core calls the tensors of model families, and what they are on the hub: one table.

Sources: megatron-core 0.16.1, whose own files the tests have; slime's `megatron_to_hf` and the
bridges of Megatron-Bridge 0.3.1. Experts stay stacked here, as transformers has them in training;
`convert.names` splits them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class How(Enum):
    """What becomes of a tensor of one layer."""

    WHOLE = "one tensor, as it is"
    VOCABULARY = "its rows up to the size of the vocabulary: the others are padding"
    HALVES = "two tensors: the upper and the lower half of its rows"
    GROUPS = "three: of each group of heads its queries, then its key, then its value"


class Row(NamedTuple):
    """A tensor: where it goes on the hub, one name for each part."""

    hub: tuple[str, ...]
    how: How = How.WHOLE


_Table = Mapping[str, Row]


def _same(text: str) -> dict[str, Row]:
    """Return rows of a text with a line for each: Megatron's name, then that of the hub."""
    pairs = (line.split() for line in text.strip().splitlines())
    return {megatron: Row((hub,)) for megatron, hub in pairs}


TOP: _Table = {
    "embedding.word_embeddings.weight": Row(("model.embed_tokens.weight",), How.VOCABULARY),
    "output_layer.weight": Row(("lm_head.weight",), How.VOCABULARY),
    "decoder.final_layernorm.weight": Row(("model.norm.weight",)),
}
"""Tensors that are in no layer."""

_LAYER = _same(
    """
    input_layernorm.weight input_layernorm.weight
    pre_mlp_layernorm.weight post_attention_layernorm.weight
    mlp.linear_fc1.layer_norm_weight post_attention_layernorm.weight
    self_attention.linear_proj.weight self_attn.o_proj.weight
    mlp.linear_fc2.weight mlp.down_proj.weight
    """
) | {"mlp.linear_fc1.weight": Row(("mlp.gate_proj.weight", "mlp.up_proj.weight"), How.HALVES)}
_GROUPED = _same("self_attention.linear_qkv.layer_norm_weight input_layernorm.weight") | {
    f"self_attention.linear_qkv.{end}": Row(
        tuple(f"self_attn.{one}_proj.{end}" for one in "qkv"), How.GROUPS
    )
    for end in ("weight", "bias")
}
_QK_NORM = _same(
    """
    self_attention.q_layernorm.weight self_attn.q_norm.weight
    self_attention.k_layernorm.weight self_attn.k_norm.weight
    """
)
_LATENT = _same(
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
_EXPERTS = _same(
    """
    mlp.router.weight mlp.gate.weight
    mlp.experts.experts.linear_fc1.weight mlp.experts.gate_up_proj
    mlp.experts.experts.linear_fc2.weight mlp.experts.down_proj
    """
)
_SHARED = _same(
    """
    mlp.router.expert_bias mlp.gate.e_score_correction_bias
    mlp.shared_experts.linear_fc2.weight mlp.shared_experts.down_proj.weight
    """
) | {
    "mlp.shared_experts.linear_fc1.weight": Row(
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"), How.HALVES
    )
}
_MTP = _same(
    """
    enorm.weight enorm.weight
    hnorm.weight hnorm.weight
    eh_proj.weight eh_proj.weight
    final_layernorm.weight shared_head.norm.weight
    """
)


@dataclass(frozen=True, slots=True)
class Family:
    """What the layers of a model type have.

    Attributes:
        layers: tensors of a layer, by the ends of Megatron's names.
        mtp: tensors of a layer that predicts more tokens, next to those of the layer inside it;
            empty if the family has none.
    """

    layers: _Table
    mtp: _Table = field(default_factory=dict)


_DENSE = _LAYER | _GROUPED
_MOE = _DENSE | _EXPERTS

FAMILIES: Mapping[str, Family] = {
    "llama": Family(_DENSE),
    "mistral": Family(_DENSE),
    "qwen2": Family(_DENSE),
    "qwen3": Family(_DENSE | _QK_NORM),
    "mixtral": Family(_MOE),
    "qwen3_moe": Family(_MOE | _QK_NORM),
    "deepseek_v3": Family(_LAYER | _LATENT | _EXPERTS | _SHARED, _MTP),
    "glm4_moe": Family(_MOE | _QK_NORM | _SHARED, _MTP),
}
"""Model types, as config.json names them. Qwen2.5 is `qwen2`."""
