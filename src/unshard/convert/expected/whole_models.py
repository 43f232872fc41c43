"""The tensors of whole models, as a table: decoders, vision towers, projectors, heads."""

from collections.abc import Mapping
from typing import NamedTuple

from unshard.convert.expected.decoders import DECODERS, Groups, flag, is_not, when


class Component(NamedTuple):
    """A decoder, vision tower or projector in a model.

    Attributes:
        prefix: the start of its tensors' names.
        config: the key of its nested config; "" for the model's config.
        type: its model type; "" for the `model_type` of its config.
        flat: whether a model's config without that key may have the fields itself.
    """

    prefix: str
    config: str = ""
    type: str = ""
    flat: bool = False


class WholeModel(NamedTuple):
    """A model with the head of a language model.

    Attributes:
        components: its decoder, towers and projectors.
        head: the name of the head's weight, which may be tied.
    """

    components: tuple[Component, ...]
    head: str = "lm_head.weight"


# vision towers and projectors

_QWEN_VISUAL = "blocks.#.{norm1,norm2,attn.qkv,attn.proj}.weight blocks.#.attn.{qkv,proj}.bias"
_QWEN3_VISUAL = (
    _QWEN_VISUAL,
    "patch_embed.proj.{weight,bias} pos_embed.weight blocks.#.norm{1,2}.bias",
    "blocks.#.mlp.linear_fc{1,2}.{weight,bias}",
    "merger.{norm,linear_fc1,linear_fc2}.{weight,bias}",
)
_PROJECTOR = (
    "multi_modal_projector.linear_{1,2}.weight",
    when(
        "multi_modal_projector.linear_{1,2}.bias", flag("multimodal_projector_bias", default=True)
    ),
)
_TOWER = (
    "embeddings.{patch_embedding,position_embedding}.weight post_layernorm.{weight,bias}",
    "encoder.layers.#.self_attn.{q_proj,k_proj,v_proj,out_proj}.{weight,bias}",
    "encoder.layers.#.{layer_norm1,layer_norm2,mlp.fc1,mlp.fc2}.{weight,bias}",
)
_OTHERS: Mapping[str, Groups] = {
    "qwen2_vl": (
        _QWEN_VISUAL,
        "patch_embed.proj.weight blocks.#.norm{1,2}.bias blocks.#.mlp.fc{1,2}.{weight,bias}",
        "merger.ln_q.{weight,bias} merger.mlp.{0,2}.{weight,bias}",
    ),
    "qwen2_5_vl": (
        _QWEN_VISUAL,
        "patch_embed.proj.weight blocks.#.mlp.{gate,up,down}_proj.{weight,bias}",
        "merger.ln_q.weight merger.mlp.{0,2}.{weight,bias}",
    ),
    "qwen3_vl": _QWEN3_VISUAL,
    "qwen3_5": _QWEN3_VISUAL,
    "qwen3_vl_deepstack": ("deepstack_merger_list.#.{norm,linear_fc1,linear_fc2}.{weight,bias}",),
    "clip_vision_model": (*_TOWER, "embeddings.class_embedding pre_layrnorm.{weight,bias}"),
    "siglip_vision_model": (
        *_TOWER,
        "embeddings.patch_embedding.bias",
        when(
            "head.probe head.attention.in_proj_{weight,bias} "
            "head.{attention.out_proj,layernorm,mlp.fc1,mlp.fc2}.{weight,bias}",
            flag("vision_use_head", default=True),
        ),
    ),
    "internvl_vision": (
        "embeddings.cls_token embeddings.patch_embeddings.projection.{weight,bias}",
        when(
            "embeddings.position_embeddings", flag("use_absolute_position_embeddings", default=True)
        ),
        when("embeddings.mask_token", flag("use_mask_token")),
        "encoder.layer.#.lambda_{1,2} encoder.layer.#.attention.{q,k,v}_proj.weight",
        when("encoder.layer.#.attention.{q,k,v}_proj.bias", flag("attention_bias")),
        when("encoder.layer.#.attention.{q,k}_norm.weight", flag("use_qk_norm")),
        "encoder.layer.#.{attention.projection_layer,mlp.fc1,mlp.fc2}.{weight,bias}",
        "encoder.layer.#.layernorm_{before,after}.{weight,bias}",
        when("layernorm.{weight,bias}", is_not(flag("use_mean_pooling", default=True))),
    ),
    "gemma3": ("multi_modal_projector.mm_{input_projection_weight,soft_emb_norm.weight}",),
    "llava": _PROJECTOR,
    "llava_next": (*_PROJECTOR, "image_newline"),
    "llava_onevision": (*_PROJECTOR, "image_newline"),
    "internvl": ("multi_modal_projector.{layer_norm,linear_1,linear_2}.{weight,bias}",),
}

COMPONENTS = {**DECODERS, **_OTHERS}
"""The tensors of decoders, towers and projectors, by model type."""

LAYER_COUNTS = {
    "gpt2": "n_layer",
    "qwen2_vl": "depth",
    "qwen2_5_vl": "depth",
    "qwen3_vl": "depth",
    "qwen3_5": "depth",
    "qwen3_vl_deepstack": "deepstack_visual_indexes",
}
"""The key that counts the layers, a number or a list, if it is not `num_hidden_layers`."""

MTP_DECODERS = frozenset({"deepseek_v3", "glm4_moe"})
"""Decoders with MTP layers after the last layer; transformers ignores them."""

# whole models


def _llava(text: str = "", vision: str = "") -> WholeModel:
    return WholeModel(
        (
            Component("language_model.model.", "text_config", text),
            Component("vision_tower.", "vision_config", vision),
            Component(""),
        ),
        head="language_model.lm_head.weight",
    )


def _qwen2(visual: str) -> WholeModel:
    text = Component("model.", "text_config", "qwen2_vl_text", flat=True)
    return WholeModel((text, Component("visual.", "vision_config", visual)))


def _qwen3(text: str, *visual: str) -> WholeModel:
    towers = (Component("model.visual.", "vision_config", tower) for tower in visual)
    return WholeModel((Component("model.language_model.", "text_config", text), *towers))


_MODELS = {
    "llama granite mistral ministral3 qwen2 qwen3 gemma gemma2 gemma3_text smollm3 seed_oss arcee "
    "ernie4_5 phi3 glm glm4 olmo olmo2 olmo3 starcoder2 qwen2_moe qwen3_moe mixtral olmoe "
    "deepseek_v2 deepseek_v3 glm4_moe dots1 gpt_oss llama4_text qwen3_next qwen3_5_text "
    "qwen3_5_moe_text": WholeModel((Component("model."),)),
    "gpt2": WholeModel((Component("transformer."),)),
    "qwen2_vl": _qwen2("qwen2_vl"),
    "qwen2_5_vl": _qwen2("qwen2_5_vl"),
    "qwen3_vl": _qwen3("qwen3", "qwen3_vl", "qwen3_vl_deepstack"),
    "qwen3_vl_moe": _qwen3("qwen3_vl_moe_text", "qwen3_vl", "qwen3_vl_deepstack"),
    "qwen3_5": _qwen3("qwen3_5_text", "qwen3_5"),
    "qwen3_5_moe": _qwen3("qwen3_5_moe_text", "qwen3_5"),
    "gemma3": _llava("gemma3_text"),
    "llava llava_next llava_onevision": _llava(),
    "internvl": _llava(vision="internvl_vision"),
}

MODELS = {one: model for types, model in _MODELS.items() for one in types.split()}
"""Whole models by the model type of config.json."""
