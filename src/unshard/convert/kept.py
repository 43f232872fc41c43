"""The tensors that transformers and diffusers keep in their dtype when they load 16-bit models."""

import re
from collections.abc import Mapping
from itertools import chain

from unshard.read.model_config import ModelConfig
from unshard.tensors.dtypes import DType


def _by_type(table: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Turn a table from parts of names to model types around."""
    return {name: tuple(parts.split()) for parts, types in table.items() for name in types.split()}


# Parts of names that stay float32 under a cast to 16 bits, by model type, which includes the types
# of nested models (`inkling` for `inkling_text`). Source: `_keep_in_fp32_modules_strict` of
# transformers 5.23; a test compares.
KEPT_IN_16_BITS = _by_type(
    {
        "e_score_correction_bias": "axk1 axk2 deepseek_v3 deepseek_v32 dots1 dots3_note exaone_moe "
        "glm4_moe glm4v_moe glm_moe_dsa hy_v3 kolibri1 mimo_v2_flash nemotron_h solar_open",
        "A_log conv1d dt_bias e_score_correction_bias": "bailing_hybrid",
        "A_log conv1d dt_bias e_score_correction_bias attn_hc.base attn_hc.scale ffn_hc.base "
        "ffn_hc.scale": "glm5_next",
        "attn_hc ffn_hc hc_head sinks position_bias e_score_correction_bias q_a_norm kv_norm norm "
        "input_layernorm post_attention_layernorm": "deepseek_v4",
        "attn_sconv mlp_sconv k_sconv v_sconv e_score_correction_bias gate.global_scale": "inkling",
        "e_score_correction_bias mlp.gate.weight post_attention_convolution post_mlp_convolution "
        "k_sconv.conv1d v_sconv.conv1d attention_input mlp_input final_input": "inkling2",
        "e_score_correction_bias mlp.gate.weight post_attention_residual_gate "
        "post_feedforward_residual_gate": "muse_spark",
        "e_score_correction_bias fn scale base hc_fn hc_scale hc_base weights_proj k_norm sinks "
        "lm_head": "hy_v4",
        "e_score_correction_bias mlp.gate.weight": "beam",
        "gate.weight moe_statics": "ernie4_5_moe ernie4_5_vl_moe",
        "gate.weight sinks": "flint",
        "sinks": "openai_privacy_filter",
        "conv.norm": "granite_speech5",
        "codec_model": "kyutai_speech_to_text",
        "audio_tower multi_modal_projector": "nemo_speechlm",
        "rotary_emb mlp.gate.weight": "mistral_large4",
        "embed_positions": "voxtral",
        "latent_mean latent_std freqs": "gradium_phonon_tts pocket_tts",
        "structure_attention_cell structure_generator": "slanext",
        "fourier norm.weight norm.bias norm_mix norm_start norm_single boundaries "
        "distogram_head": "esmfold2",
    }
)
# The same for casts to float16 only: `_keep_in_fp32_modules`.
KEPT_IN_FLOAT16 = _by_type(
    {
        "indexer.weights_proj": "axk2 deepseek_v32 glm_moe_dsa mistral_large4",
        "self_attn.compressor.kv_proj self_attn.compressor.gate_proj "
        "self_attn.compressor.indexer.kv_proj self_attn.compressor.indexer.gate_proj "
        "self_attn.compressor.indexer.scorer.weights_proj": "deepseek_v4",
        "query_tokens qformer": "blip-2",
        "input_layernorm post_attention_layernorm norm": "gpt_oss",
        "input_layernorm post_attention_layernorm pre_mlp_layernorm post_mlp_layernorm q_norm "
        "k_norm norm expert_bias": "afmoe",
        "query_tokens": "instructblip instructblipvideo",
        "classifier.weight": "longcat_flash",
        "wo": "mt5 pop2piano t5 udop umt5",
        "time_decay time_first": "rwkv",
    }
)
# The same in diffusers 0.42, by the class that its configs name: `_keep_in_fp32_modules`.
_CLASSES = {
    "AnyFlowFARTransformer3DModel": "time_embedder scale_shift_table norm1 norm2 norm3",
    "AnyFlowTransformer3DModel": "time_embedder scale_shift_table norm1 norm2 norm3",
    "AutoencoderKLMiniMaxH3": "encoder quant_conv norm1 norm2 norm_out scale1 scale2",
    "AutoencoderKLMiniMaxH3Audio": "encoder decoder pre_block dec_in_proj mean_proj logs_proj",
    "ChronoEditTransformer3DModel": "time_embedder scale_shift_table norm1 norm2 norm3",
    "Cosmos3OmniTransformer": "time_embedder",
    "CosmosControlNetModel": "learnable_pos_embed",
    "CosmosTransformer3DModel": "learnable_pos_embed",
    "Flux3Transformer2DModel": "norm_q norm_k",
    "HeliosTransformer3DModel": "time_embedder scale_shift_table norm1 norm2 norm3 "
    "history_key_scale",
    "JoyImageEditPlusTransformer3DModel": "time_embedder norm1 norm2 norm_out",
    "JoyImageEditTransformer3DModel": "time_embedder norm1 norm2 norm_out",
    "Kandinsky5Transformer3DModel": "time_embeddings modulation visual_modulation text_modulation",
    "Kandinsky6SRTransformer3DModel": "time_embeddings pooled_bias modulation",
    "Kandinsky6Transformer3DModel": "time_embeddings modulation",
    "Krea2Transformer2DModel": "norm norm1 norm2 norm_q norm_k",
    "MiniMaxH3Transformer3DModel": "proj_in audio_proj_in time_embedder proj_out audio_proj_out "
    "rope",
    "RFD4ProteinaAutoencoder": "latent_decoder_mean_n_log_scale norm",
    "RFD4ProteinaTransformer": "cond_factory norm ln_out",
    "SkyReelsV2Transformer3DModel": "rope time_embedder scale_shift_table norm1 norm2 norm3",
    "WanAnimate2Transformer3DModel": "time_embedding time_projection scale_shift_table norm1 norm2 "
    "norm3 modulation",
    "WanAnimateTransformer3DModel": "time_embedder scale_shift_table norm1 norm2 norm3 "
    "motion_synthesis_weight rope",
    "WanTransformer3DModel": "rope time_embedder scale_shift_table norm1 norm2 norm3",
    "WanVACETransformer3DModel": "rope time_embedder scale_shift_table norm1 norm2 norm3",
}
KEPT_BY_CLASS = {name: tuple(parts.split()) for name, parts in _CLASSES.items()}
# The same for every model: tensors that Mamba, NemotronH and other recurrences raise to powers in
# float32, and the scales of activations and of the cache. The 8-bit values of the latter exist only
# while a model runs, so no stored tensor reveals them.
_KEPT_ANYWHERE = (
    r"(?:^|\.)(?:(?:A_logs?|Ds?|dt_bias)(?:\.\d+)?|(?:\w+_)?(?:[qkv]|kv|prob|input|output)_scale)$"
)


def kept_names(config: ModelConfig | None, target: DType) -> list[str]:
    """Return regular expressions of the names that keep their dtype in a cast to 16 bits."""
    if config is None:
        return [_KEPT_ANYWHERE]
    tables = (KEPT_IN_16_BITS, *([KEPT_IN_FLOAT16] if target.name == "float16" else []))
    parts = [
        part
        for model_type, own in chain.from_iterable(table.items() for table in tables)
        if any(f"{one}_".startswith(f"{model_type}_") for one in config.types)
        for part in own
    ]
    parts += KEPT_BY_CLASS.get(str(config.fields.get("_class_name")), ())
    return [*(rf"(?:^|\.){re.escape(part)}(?:$|\.)" for part in parts), _KEPT_ANYWHERE]
