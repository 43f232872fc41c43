"""The names of model families in training (transformers 5) and on the hub, in one table.

Transformers 5 keeps the experts of a layer in one tensor and nests language models, and reverses
both when it saves. A test compares the table with transformers.
Shapes are in elements: E experts, H hidden size, I size of an expert.
"""

from enum import Enum
from typing import NamedTuple


class Rename(NamedTuple):
    """A part of a name in training, and the hub's text in its place; both plain text.

    A leading "^" anchors the part at the start of the name; otherwise it may be anywhere.
    """

    training: str
    hub: str


class ExpertLayout(Enum):
    """How the files of the hub store a family's experts."""

    EACH = "a tensor for every expert: [I, H] and [H, I]"
    FUSED = "one tensor for all, as in training, or [E, H, 2I] and [E, I, H] from transformers 4"


_GATED = (("gate_proj", "gate_proj"), ("up_proj", "up_proj"), ("down_proj", "down_proj"))
_NUMBERED = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
_UNGATED = (("up_proj", "up_proj"), ("down_proj", "down_proj"))


class Experts(NamedTuple):
    """Experts that training keeps in a few tensors.

    Training has `<at>.gate_up_proj` [E, 2I, H] and `<at>.down_proj` [E, H, I], or, without gates,
    `up_proj` [E, I, H]. lmms-engine and VeOmni stack `gate_proj` and `up_proj`, [E, I, H] each. The
    hub has `<at>.{i}.<part>.weight`.

    Attributes:
        at: the end of the module's path, in training.
        parts: the matrices of an expert: names in training and on the hub.
        width: keys of config.json that may contain I.
        layout: the layout of the hub's files.
    """

    at: str = "mlp.experts"
    parts: tuple[tuple[str, str], ...] = _GATED
    width: tuple[str, ...] = ("moe_intermediate_size",)
    layout: ExpertLayout = ExpertLayout.EACH


class Family(NamedTuple):
    """Model types with the same names: `model_type` of config.json or of a nested config."""

    model_types: str
    renames: tuple[Rename, ...] = ()
    experts: tuple[Experts, ...] = ()


class Advice(NamedTuple):
    """A note for models with `present` in a name and `absent` in none: hub files may differ."""

    model_types: str
    present: str
    absent: str
    text: str


_WHOLE_WIDTH = ("intermediate_size",)

_MIXTRAL = (
    Rename(".mlp.experts.", ".block_sparse_moe.experts."),
    Rename(".mlp.gate.", ".block_sparse_moe.gate."),
)

_LANGUAGE_MODEL = (
    Rename("^lm_head.", "language_model.lm_head."),
    Rename("^model.language_model.", "language_model.model."),
    Rename("^model.multi_modal_projector.", "multi_modal_projector."),
)

_VISION = (Rename("^model.language_model.", "model."), Rename("^model.visual.", "visual."))

_LLAVA = (*_LANGUAGE_MODEL, Rename("^model.vision_tower.", "vision_tower."))

FAMILIES = (
    # Mixtures of experts. The first row covers most of them.
    Family(
        "qwen2_moe qwen3_moe qwen3_next qwen3_omni_moe_text qwen3_omni_moe_talker_text "
        "qwen3_5_moe qwen3_5_moe_text deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe glm4_moe_lite "
        "glm_moe_dsa glm4v_moe dots1 afmoe solar_open mellum hunyuan_v1_moe",
        experts=(Experts(),),
    ),
    Family("olmoe flex_olmo cohere2_moe", experts=(Experts(width=_WHOLE_WIDTH),)),
    Family(
        "ernie4_5_moe",
        (Rename(".mlp.gate.moe_statics.", ".mlp.moe_statics."),),
        (Experts(),),
    ),
    Family(
        "exaone_moe",
        (Rename(".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),),
        (Experts(),),
    ),
    Family(
        "mimo_v2_flash",
        (Rename(".self_attn.sinks", ".self_attn.attention_sink_bias"),),
        (Experts(),),
    ),
    Family(
        "hy_v3",
        (
            Rename(".mlp.gate.weight", ".mlp.router.gate.weight"),
            Rename(".mlp.e_score_correction_bias", ".mlp.expert_bias"),
            Rename(".mlp.shared_experts.", ".mlp.shared_mlp."),
        ),
        (Experts(),),
    ),
    Family("mixtral minimax", _MIXTRAL, (Experts(parts=_NUMBERED, width=_WHOLE_WIDTH),)),
    Family(
        "minimax_m2",
        (
            *_MIXTRAL,
            Rename(".mlp.e_score_correction_bias", ".block_sparse_moe.e_score_correction_bias"),
        ),
        (Experts(parts=_NUMBERED, width=_WHOLE_WIDTH),),
    ),
    Family(
        "phimoe",
        (_MIXTRAL[0], Rename(".mlp.router.weight", ".block_sparse_moe.gate.weight")),
        (Experts(parts=_NUMBERED, width=_WHOLE_WIDTH),),
    ),
    Family("lfm2_moe", experts=(Experts("feed_forward.experts", _NUMBERED),)),
    Family("jamba", experts=(Experts("feed_forward.experts", width=_WHOLE_WIDTH),)),
    Family(
        "nemotron_h",
        (Rename("^model.", "backbone."),),
        (Experts("mixer.experts", _UNGATED),),
    ),
    Family(
        "granitemoe granitemoeshared granitemoehybrid",
        (
            Rename(".experts.gate_up_proj", ".input_linear.weight"),
            Rename(".experts.down_proj", ".output_linear.weight"),
            Rename(".block_sparse_moe.router.weight", ".block_sparse_moe.router.layer.weight"),
        ),
    ),
    Family("qwen3_vl_moe qwen3_vl_moe_text", experts=(Experts(layout=ExpertLayout.FUSED),)),
    Family("gpt_neox", (Rename("^lm_head.", "embed_out."),)),
    # Vision and audio around a language model.
    Family(
        "llava paligemma aya_vision got_ocr2 gemma3 internvl vipllava mistral3 pp_chart2table",
        _LLAVA,
    ),
    Family(
        "aria",
        (
            *_LLAVA,
            Rename(".mlp.experts.gate_up_proj", ".mlp.experts.fc1.weight"),
            Rename(".mlp.experts.down_proj", ".mlp.experts.fc2.weight"),
        ),
    ),
    Family(
        "llava_next llava_next_video llava_onevision",
        (*_LLAVA, Rename("^model.image_newline", "image_newline")),
    ),
    Family(
        "video_llava",
        (
            *_LANGUAGE_MODEL,
            Rename("^model.image_tower.", "image_tower."),
            Rename("^model.video_tower.", "video_tower."),
        ),
    ),
    Family("mllama", (*_LANGUAGE_MODEL, Rename("^model.vision_model.", "vision_model."))),
    Family(
        "qwen2_audio voxtral voxtral_realtime audioflamingo3 glmasr musicflamingo",
        (*_LANGUAGE_MODEL, Rename("^model.audio_tower.", "audio_tower.")),
    ),
    Family("qwen2_vl qwen2_5_vl", _VISION),
    Family("paddleocr_vl", (*_VISION, Rename("^model.projector.", "mlp_AR."))),
    Family(
        "qwen2_5_omni_thinker qwen3_omni_moe_thinker",
        (*_VISION, Rename("^model.audio_tower.", "audio_tower.")),
    ),
    Family(
        "qwen2_5_omni qwen3_omni_moe",
        (
            Rename("^thinker.model.language_model.", "thinker.model."),
            Rename("^thinker.model.visual.", "thinker.visual."),
            Rename("^thinker.model.audio_tower.", "thinker.audio_tower."),
        ),
    ),
    # The same in training and on the hub.
    Family(
        "apertus arcee bamba bart bert bitnet blip blip-2 bloom chameleon cohere cohere2 "
        "cohere2_vision ctrl cwm dbrx deepseek_vl diffllama ernie4_5 exaone4 falcon falcon_h1 "
        "falcon_mamba florence2 gemma gemma2 gemma3_text gemma3n gemma4 gemma4_text glm glm4 "
        "glm46v glm4v glm_ocr gpt2 gpt_bigcode gpt_neo gpt_oss gptj granite helium "
        "hunyuan_v1_dense idefics idefics2 idefics3 instructblip internlm3 janus kosmos-2 lfm2 "
        "lfm2_vl lighton_ocr llama llama4 llama4_text mamba mamba2 mbart minicpm3 minicpmv4_6 "
        "ministral ministral3 mistral modernbert-decoder mpt nanochat nemotron olmo olmo2 olmo3 "
        "opt ovis2 perception_lm persimmon phi phi3 phi4_multimodal qwen2 qwen3 qwen3_5 "
        "qwen3_5_text qwen3_vl recurrent_gemma roberta rwkv seed_oss smollm3 smolvlm stablelm "
        "starcoder2 vaultgemma video_llama_3 whisper xglm xlm-roberta xlstm zamba zamba2"
    ),
)

VARIANTS = (
    # Towers of CLIP and SigLIP until transformers 4, and in the files of most models.
    Rename("vision_tower.", "vision_tower.vision_model."),
    Rename("image_tower.", "image_tower.vision_model."),
    Rename("video_tower.", "video_tower.vision_model."),
    # A language model taken from a vision-language model.
    Rename("^model.", "model.language_model."),
    # A model without its head; the language model of a model with speech output.
    Rename("^", "model."),
    Rename("^", "thinker."),
)
"""Other names of the same tensors; tried in both directions when matching a base model."""

ADVICE = (
    Advice(
        "clip_vision_model siglip_vision_model siglip2_vision_model",
        present="_tower.",
        absent=".vision_model.",
        text="the vision tower has the names of transformers 5; most files on the hub have "
        "vision_tower.vision_model. instead of vision_tower.; for those names: ⟦+--base MODEL⟧",
    ),
    Advice(
        "qwen3_5_moe qwen3_5_moe_text",
        present=".mlp.experts.0.",
        absent=".experts.gate_up_proj",
        text="each expert is written as a tensor, as transformers saves them; models on the hub "
        "have all experts in one tensor; for that layout: ⟦+--base MODEL⟧",
    ),
    Advice(
        "qwen3_vl_moe qwen3_vl_moe_text",
        present=".experts.gate_up_proj",
        absent=".experts.0.",
        text="the experts' matrices are kept as trained: [E, 2I, H] in transformers 5, [E, H, 2I] "
        "in version 4 and in models on the hub; for the layout of the hub: ⟦+--base MODEL⟧",
    ),
)
