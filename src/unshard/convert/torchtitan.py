"""Rename the tensors of torchtitan and of Meta to the hub's names, like torchtitan's adapters.

Source: `state_dict_adapter.py` of torchtitan 0.2 and 0.3, for Llama 3, Qwen3 and DeepSeek-V3. The
names of both versions may be mixed. Llama's rotary embedding rotates neighbouring rows of a head,
the hub's rotates its halves, so the rows of queries and keys are reordered; no value changes.
Experts stay stacked, as in transformers' training; `names` splits them.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from unshard.convert.recipes import Concat, Recipe, Take, shape_of, take
from unshard.errors import ConversionError
from unshard.read.model_config import Fields, ModelConfig
from unshard.tensors.boxes import Box

_LAYER = re.compile(r"(mtp_)?layers\.(\d+)\.(.+)")
_TOP = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "lm_head.weight": "lm_head.weight",
}
_BLOCK = {
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_ATTENTION = {
    f"attention.{inner}w{one}": f"self_attn.{one}_proj"
    for inner in ("", "qkv_linear.")
    for one in "qkv"
}
_QK_NORM = {f"attention.{one}_norm": f"self_attn.{one}_norm" for one in "qk"}
_LATENT = {
    "attention.wq": "self_attn.q_proj",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "moe.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "moe.shared_experts.w2": "mlp.shared_experts.down_proj",
    "moe.shared_experts.w3": "mlp.shared_experts.up_proj",
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "eh_proj",
    "mtp_norm": "shared_head.norm",
}
_MOE = {"moe.router.gate": "mlp.gate"}
_STACKED = {
    "moe.experts.w1": "mlp.experts.gate_proj",
    "moe.experts.w2": "mlp.experts.down_proj",
    "moe.experts.w3": "mlp.experts.up_proj",
    "moe.routed_experts.inner_experts.w1_EFD": "mlp.experts.gate_proj",
    "moe.routed_experts.inner_experts.w2_EDF": "mlp.experts.down_proj",
    "moe.routed_experts.inner_experts.w3_EFD": "mlp.experts.up_proj",
}
_BIASES = {f"moe.expert_bias{end}": "mlp.gate.e_score_correction_bias" for end in ("", "_E")}
_BUFFERS = re.compile(r"(^|\.)(freqs_cis|rope_cache|rope\.cache|inv_freq|tokens_per_expert(_E)?)$")


class _NativeNames(NamedTuple):
    """torchtitan's names in the layers of a model type.

    Attributes:
        weights: modules with one tensor, `.weight`.
        tensors: whole ends of names.
        without: ends of names that torchtitan's adapter leaves out.
        reordered: modules whose rows are reordered, and the config key that counts their heads.
    """

    weights: Mapping[str, str]
    tensors: Mapping[str, str]
    without: tuple[str, ...] = ()
    reordered: Mapping[str, str] = MappingProxyType({})


_QWEN3 = _NativeNames({**_BLOCK, **_ATTENTION, **_QK_NORM, **_MOE}, _STACKED, tuple(_BIASES))
_FAMILIES: Mapping[str, _NativeNames] = {
    "llama": _NativeNames(
        {**_BLOCK, **_ATTENTION},
        {},
        reordered={
            "self_attn.q_proj": "num_attention_heads",
            "self_attn.k_proj": "num_key_value_heads",
        },
    ),
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN3,
    "deepseek_v3": _NativeNames({**_BLOCK, **_LATENT, **_MOE}, {**_STACKED, **_BIASES}),
}


def without_native_names(
    tensors: Mapping[str, Recipe], config: ModelConfig | None
) -> Mapping[str, Recipe]:
    """Rename tensors from torchtitan's names to those of transformers; unknown names stay.

    Raises:
        ConversionError: rows do not fit the config's heads, or are computed.
    """
    family = None if config is None else _FAMILIES.get(config.types[0])
    if config is None or family is None or "tok_embeddings.weight" not in tensors:
        return tensors
    renamed: dict[str, Recipe] = {}
    for name, recipe in tensors.items():
        new = _renamed(name, family, config.fields)
        if new is None:
            continue
        if new in renamed:
            raise ConversionError(f"tensor {name} would be named {new}, like another tensor")
        renamed[new] = recipe
        key = family.reordered.get(".".join(new.split(".")[3:5]))
        if key is not None:
            default = config.fields.get("num_attention_heads")
            why = "reorder torchtitan's queries and keys"
            renamed[new] = _halved(name, recipe, _count(config.fields, key, why, default))
    return renamed


def _renamed(name: str, family: _NativeNames, config: Fields) -> str | None:
    """Return a tensor's name in transformers; unknown names unchanged, None to leave it out."""
    if _BUFFERS.search(name):
        return None
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return _TOP.get(name, name)
    mtp, number, end = layer.groups()
    if end in family.without:
        return None
    new = family.tensors.get(end)
    if new is None and end.endswith(".weight"):
        module = family.weights.get(end.removesuffix(".weight"))
        new = None if module is None else f"{module}.weight"
    if new is None:
        return name
    # The hub numbers MTP layers after all others.
    before = _count(config, "num_hidden_layers", "name the MTP layers") if mtp else 0
    return f"model.layers.{int(number) + before}.{new}"


def _count(config: Fields, key: str, why: str, default: object = None) -> int:
    count = config.get(key, default)
    if type(count) is not int or count < 1:
        raise ConversionError(f"config.json: {key} is needed to {why}", found=repr(count))
    return count


def _halved(name: str, recipe: Recipe, heads: int) -> Recipe:
    """Return a projection with its even rows first, then its odd ones, head by head."""
    shape = shape_of(recipe)
    if not isinstance(recipe, Take) or recipe != take(recipe.entry):
        raise ConversionError(
            f"tensor {name}: its values are computed, so its rows cannot be reordered",
            hint="write the adapter by itself: ⟦+--lora adapter⟧",
        )
    half = shape[0] // heads // 2 if shape else 0
    if len(shape) != 2 or shape[0] != 2 * half * heads:
        raise ConversionError(
            f"tensor {name} does not have the rows of {heads} heads, each of two halves",
            found=str(list(shape)),
            hint="check that this is the config of the model that was trained",
        )
    starts = (head * 2 * half + odd for head in range(heads) for odd in (0, 1))
    boxes = (Box((start, 0), (half, shape[1])) for start in starts)
    return Concat(0, tuple(Take(recipe.entry, box, steps=(2, 1)) for box in boxes))
