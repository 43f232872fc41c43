"""The tensors of whole models, as a table: decoders, vision towers, what joins them, the head."""

from dataclasses import dataclass

from unshard.convert.expected.conditions import flag
from unshard.convert.expected.decoders import DECODERS, Group, Part

__all__ = ["MODELS", "PARTS", "Model", "Place"]


@dataclass(frozen=True, slots=True)
class Place:
    """A part in a model.

    Attributes:
        prefix: of its tensors' names.
        config: the key of its own config; "" for the model's. A model's config that has no such
            key may hold the fields itself, if `flat`.
        of: the model type whose part it is; "": what its own config names.
    """

    prefix: str
    config: str = ""
    of: str = ""
    flat: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """A model with the head of a language model.

    Attributes:
        types: model types of config.json.
        places: its parts. groups: its other tensors.
        head: the name of the head's weight, which may be tied.
    """

    types: str
    places: tuple[Place, ...]
    groups: tuple[Group, ...] = ()
    head: str = "lm_head.weight"


# what sees

_QWEN_VISUAL = Group(
    "blocks.#.{norm1,norm2,attn.qkv,attn.proj}.weight blocks.#.attn.{qkv,proj}.bias"
)
_QWEN3_VISUAL = (
    _QWEN_VISUAL,
    Group("patch_embed.proj.{weight,bias} pos_embed.weight blocks.#.norm{1,2}.bias"),
    Group("blocks.#.mlp.linear_fc{1,2}.{weight,bias}"),
    Group("merger.{norm,linear_fc1,linear_fc2}.{weight,bias}"),
)
_TOWER = Group(
    "embeddings.{patch_embedding,position_embedding}.weight post_layernorm.{weight,bias} "
    "encoder.layers.#.self_attn.{q_proj,k_proj,v_proj,out_proj}.{weight,bias} "
    "encoder.layers.#.{layer_norm1,layer_norm2,mlp.fc1,mlp.fc2}.{weight,bias}"
)

_TOWERS = (
    Part(
        "qwen2_vl",
        (
            _QWEN_VISUAL,
            Group(
                "patch_embed.proj.weight blocks.#.norm{1,2}.bias blocks.#.mlp.fc{1,2}.{weight,bias}"
            ),
            Group("merger.ln_q.{weight,bias} merger.mlp.{0,2}.{weight,bias}"),
        ),
        layers="depth",
    ),
    Part(
        "qwen2_5_vl",
        (
            _QWEN_VISUAL,
            Group("patch_embed.proj.weight blocks.#.mlp.{gate,up,down}_proj.{weight,bias}"),
            Group("merger.ln_q.weight merger.mlp.{0,2}.{weight,bias}"),
        ),
        layers="depth",
    ),
    Part("qwen3_vl qwen3_5", _QWEN3_VISUAL, layers="depth"),
    Part(
        "qwen3_vl_deepstack",
        (Group("deepstack_merger_list.#.{norm,linear_fc1,linear_fc2}.{weight,bias}"),),
        layers="deepstack_visual_indexes",
    ),
    Part(
        "clip_vision_model",
        (_TOWER, Group("embeddings.class_embedding pre_layrnorm.{weight,bias}")),
    ),
    Part(
        "siglip_vision_model",
        (
            _TOWER,
            Group("embeddings.patch_embedding.bias"),
            Group(
                "head.probe head.attention.in_proj_{weight,bias} "
                "head.{attention.out_proj,layernorm,mlp.fc1,mlp.fc2}.{weight,bias}",
                flag("vision_use_head", default=True),
            ),
        ),
    ),
    Part(
        "internvl_vision",
        (
            Group("embeddings.cls_token embeddings.patch_embeddings.projection.{weight,bias}"),
            Group(
                "embeddings.position_embeddings",
                flag("use_absolute_position_embeddings", default=True),
            ),
            Group("embeddings.mask_token", flag("use_mask_token", default=False)),
            Group("encoder.layer.#.lambda_{1,2} encoder.layer.#.attention.{q,k,v}_proj.weight"),
            Group(
                "encoder.layer.#.attention.{q,k,v}_proj.bias", flag("attention_bias", default=False)
            ),
            Group(
                "encoder.layer.#.attention.{q,k}_norm.weight", flag("use_qk_norm", default=False)
            ),
            Group(
                "encoder.layer.#.{attention.projection_layer,mlp.fc1,mlp.fc2,layernorm_before,"
                "layernorm_after}.{weight,bias}"
            ),
            Group("layernorm.{weight,bias}", flag("use_mean_pooling", default=True, wanted=False)),
        ),
    ),
)

PARTS = {one: part for part in (*DECODERS, *_TOWERS) for one in part.types.split()}
"""The parts of models by model type."""

# whole models

_TEXT = (Place("model."),)
_PROJECTOR = (
    Group("multi_modal_projector.linear_{1,2}.weight"),
    Group(
        "multi_modal_projector.linear_{1,2}.bias", flag("multimodal_projector_bias", default=True)
    ),
)
_NEWLINE = Group("image_newline")
_LLAVA = (
    Place("language_model.model.", "text_config"),
    Place("vision_tower.", "vision_config"),
)
_INNER_HEAD = "language_model.lm_head.weight"


def _qwen3(text: str, *visual: str) -> tuple[Place, ...]:
    return (
        Place("model.language_model.", "text_config", text),
        *(Place("model.visual.", "vision_config", one) for one in visual),
    )


_MODELS = (
    Model(
        "llama granite mistral ministral3 qwen2 qwen3 gemma gemma2 gemma3_text smollm3 seed_oss "
        "arcee ernie4_5 phi3 glm glm4 olmo olmo2 olmo3 starcoder2 qwen2_moe qwen3_moe mixtral "
        "olmoe deepseek_v2 deepseek_v3 glm4_moe dots1 gpt_oss llama4_text qwen3_next "
        "qwen3_5_text qwen3_5_moe_text",
        _TEXT,
    ),
    Model("gpt2", (Place("transformer."),)),
    Model(
        "qwen2_vl",
        (
            Place("model.", "text_config", "qwen2", flat=True),
            Place("visual.", "vision_config", "qwen2_vl"),
        ),
    ),
    Model(
        "qwen2_5_vl",
        (
            Place("model.", "text_config", "qwen2", flat=True),
            Place("visual.", "vision_config", "qwen2_5_vl"),
        ),
    ),
    Model("qwen3_vl", _qwen3("qwen3", "qwen3_vl", "qwen3_vl_deepstack")),
    Model("qwen3_vl_moe", _qwen3("qwen3_vl_moe_text", "qwen3_vl", "qwen3_vl_deepstack")),
    Model("qwen3_5", _qwen3("qwen3_5_text", "qwen3_5")),
    Model("qwen3_5_moe", _qwen3("qwen3_5_moe_text", "qwen3_5")),
    Model(
        "gemma3",
        (
            Place("language_model.model.", "text_config", "gemma3_text"),
            Place("vision_tower.", "vision_config"),
        ),
        (
            Group(
                "multi_modal_projector.mm_input_projection_weight "
                "multi_modal_projector.mm_soft_emb_norm.weight"
            ),
        ),
        head=_INNER_HEAD,
    ),
    Model("llava", _LLAVA, _PROJECTOR, head=_INNER_HEAD),
    Model("llava_next llava_onevision", _LLAVA, (*_PROJECTOR, _NEWLINE), head=_INNER_HEAD),
    Model(
        "internvl",
        (
            Place("language_model.model.", "text_config"),
            Place("vision_tower.", "vision_config", "internvl_vision"),
        ),
        (Group("multi_modal_projector.{layer_norm,linear_1,linear_2}.{weight,bias}"),),
        head=_INNER_HEAD,
    ),
)

MODELS = {one: model for model in _MODELS for one in model.types.split()}
"""Whole models by the model type of config.json."""
