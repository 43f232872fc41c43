"""Arguments and types of model that load nothing else and run no code of a checkpoint. Pure.

Source: lm_eval 0.4.13 and lmms_eval 0.7.3. A server allows others by `allowed_model_args` and
`allowed_models` of a profile.
"""

from collections.abc import Mapping

MODEL_ARGUMENTS = frozenset(
    # precision, attention, memory
    "dtype softmax_dtype mixed_precision_dtype attn_implementation use_flash_attention_2 use_cache "
    "logits_cache parallelize tensor_parallel_size data_parallel_size gpu_memory_utilization "
    "max_num_seqs max_num_batched_tokens max_batch_size enforce_eager swap_space seed "
    # text
    "max_length max_model_len max_new_tokens max_gen_toks truncation truncation_side add_bos_token "
    "prefix_token_id enable_thinking think_end_token system_prompt reasoning_prompt "
    # images, video, sound
    "max_pixels min_pixels total_pixels min_image_pixels max_image_size max_images min_patches "
    "max_patches do_image_splitting image_first interleave_visuals fps video_fps nframes "
    "num_frames max_num_frames max_frame_num max_frames max_frames_num video_max_frames "
    "use_custom_video_loader language task".split()
)
"""Model arguments that are plain values in every model class of both evaluators."""

GENERATION_ARGUMENTS = frozenset(
    "temperature top_p top_k min_p typical_p do_sample num_beams early_stopping length_penalty "
    "repetition_penalty presence_penalty frequency_penalty no_repeat_ngram_size max_new_tokens "
    "min_new_tokens max_gen_toks max_tokens max_length until stop seed use_cache".split()
)
"""`penalty_alpha` and `num_beam_groups` are not here: transformers fetches code for them."""

METADATA = frozenset({"max_seq_lengths"})
"""What tasks may be given: lengths, which RULER and BABILong build their questions for.

Not `tokenizer`, `pretrained` and `model`, which they load with trust_remote_code=True, and not
`version`, which would take the place of the task's own in the results.
"""

MODEL_TYPES = tuple(
    "async_hf_model audio_flamingo_3 fuyu glm4v huggingface idefics2 instructblip internvl_hf "
    "llama4_scout llama_vision llava_hf nanovlm qwen2_5_vl qwen2_audio qwen2_vl qwen3_omni "
    "video_llava whisper".split()
)
"""Types of lmms-eval that load the checkpoint through transformers, without trust_remote_code.

`qwen3_vl` and `qwen3_5` are missing because they read its config with trust_remote_code=True;
`vllm` and `sglang`, because that is their default.
"""

GUARDED_TYPES = ("qwen_vl", "vllm")
"""Types of lmms-eval in which the argument `trust_remote_code` alone decides.

Its default is True; the server sets it to False. lmms-engine documents the first type, and has the
second as its default.
"""

CHECKPOINT_KEYS: Mapping[str, str] = {
    "fastvideo": "model",
    "longvila": "model",
    "phi3v": "model_id_name",
    "sglang": "model",
    "vllm": "model",
    "vllm_generate": "model",
}
"""The argument for the checkpoint, for types of lmms-eval that do not call it `pretrained`."""
