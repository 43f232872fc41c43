"""Tiny models and pipelines of diffusers: every family by name, and what each makes of its inputs.

diffusers is imported when the first is made: that takes seconds.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = [
    "TINY_DIFFUSERS",
    "TINY_PIPELINES",
    "TinyDiffusers",
    "diffusers_adapter",
    "diffusers_class",
    "diffusers_output",
    "load_pipeline",
    "pipeline_images",
    "tiny_diffusers",
    "tiny_pipeline",
]

Fields = Mapping[str, Any]


def _normal(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, int(torch.Size(shape).numel())).reshape(shape)


_TIME = torch.tensor([7.0, 3.0])


def _flux() -> Fields:
    return {
        "hidden_states": _normal(2, 4, 4),
        "encoder_hidden_states": _normal(2, 3, 8),
        "pooled_projections": _normal(2, 8),
        "timestep": _TIME,
        "guidance": torch.tensor([1.0, 2.0]),
        "img_ids": torch.tensor([[0, row, column] for row in range(2) for column in range(2)]),
        "txt_ids": torch.zeros(3, 3),
    }


def _sd3() -> Fields:
    return {
        "hidden_states": _normal(2, 4, 8, 8),
        "encoder_hidden_states": _normal(2, 3, 32),
        "pooled_projections": _normal(2, 32),
        "timestep": _TIME,
    }


def _wan() -> Fields:
    return {
        "hidden_states": _normal(2, 4, 1, 4, 4),
        "encoder_hidden_states": _normal(2, 3, 8),
        "timestep": _TIME,
    }


def _qwen_image() -> Fields:
    return {
        "hidden_states": _normal(2, 4, 16),
        "encoder_hidden_states": _normal(2, 3, 8),
        "encoder_hidden_states_mask": torch.ones(2, 3, dtype=torch.bool),
        "timestep": _TIME,
        "img_shapes": [[(1, 2, 2)]] * 2,
    }


def _ltx() -> Fields:
    return {
        "hidden_states": _normal(2, 4, 4),
        "encoder_hidden_states": _normal(2, 3, 8),
        "encoder_attention_mask": torch.ones(2, 3),
        "timestep": _TIME,
        "num_frames": 1,
        "height": 2,
        "width": 2,
    }


def _hunyuan_video() -> Fields:
    return {
        "hidden_states": _normal(2, 4, 1, 2, 2),
        "encoder_hidden_states": _normal(2, 3, 8),
        "encoder_attention_mask": torch.ones(2, 3),
        "pooled_projections": _normal(2, 8),
        "timestep": _TIME.long(),
        "guidance": torch.tensor([1.0, 2.0]),
    }


def _unet() -> Fields:
    return {
        "sample": _normal(2, 4, 8, 8),
        "encoder_hidden_states": _normal(2, 3, 8),
        "timestep": _TIME,
    }


def _ddpm() -> Fields:
    return {"sample": _normal(2, 3, 8, 8), "timestep": _TIME}


class TinyDiffusers(NamedTuple):
    """A family: the class of its models, the fields of their config, and inputs."""

    kind: str
    fields: Fields
    inputs: Callable[[], Fields]


TINY_DIFFUSERS: Mapping[str, TinyDiffusers] = {
    "flux": TinyDiffusers(
        "FluxTransformer2DModel",
        {
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 8,
            "pooled_projection_dim": 8,
            "axes_dims_rope": [4, 4, 8],
            "guidance_embeds": True,
        },
        _flux,
    ),
    "sd3": TinyDiffusers(
        "SD3Transformer2DModel",
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "caption_projection_dim": 16,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "out_channels": 4,
            "pos_embed_max_size": 8,
            "qk_norm": "rms_norm",
        },
        _sd3,
    ),
    "wan": TinyDiffusers(
        "WanTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 8,
            "freq_dim": 16,
            "ffn_dim": 16,
            "num_layers": 2,
            "rope_max_seq_len": 16,
        },
        _wan,
    ),
    "qwen_image": TinyDiffusers(
        "QwenImageTransformer2DModel",
        {
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 8,
            "axes_dims_rope": [8, 4, 4],
        },
        _qwen_image,
    ),
    "ltx": TinyDiffusers(
        "LTXVideoTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "cross_attention_dim": 16,
            "num_layers": 2,
            "caption_channels": 8,
        },
        _ltx,
    ),
    "hunyuan_video": TinyDiffusers(
        "HunyuanVideoTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 10,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "patch_size": 1,
            "text_embed_dim": 8,
            "pooled_projection_dim": 8,
            "rope_axes_dim": [2, 4, 4],
        },
        _hunyuan_video,
    ),
    "unet": TinyDiffusers(
        "UNet2DConditionModel",
        {
            "sample_size": 8,
            "block_out_channels": [8, 16],
            "layers_per_block": 1,
            "norm_num_groups": 4,
            "cross_attention_dim": 8,
            "attention_head_dim": 4,
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
            "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
        },
        _unet,
    ),
    "ddpm": TinyDiffusers(
        "UNet2DModel",
        {
            "sample_size": 8,
            "block_out_channels": [8, 16],
            "layers_per_block": 1,
            "norm_num_groups": 4,
            "attention_head_dim": 4,
            "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
            "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
        },
        _ddpm,
    ),
}


def diffusers_class(name: str) -> Any:
    """Return the class of a family's models."""
    return getattr(import_module("diffusers"), TINY_DIFFUSERS[name].kind)


def tiny_diffusers(name: str) -> Any:
    """Return a model with random values everywhere, in norms and biases too, always the same."""
    torch.manual_seed(0)
    model = diffusers_class(name)(**TINY_DIFFUSERS[name].fields).train(mode=False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def diffusers_adapter() -> Any:
    """Return the config of an adapter for a model's attention, whose scale is not 1."""
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=32, target_modules=["to_q", "to_v", "to_out.0"])


def diffusers_output(name: str, model: Any) -> torch.Tensor:
    """Return what a model makes of its family's inputs, with gradients, in one thread.

    Several threads add in another order.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        made: torch.Tensor = model(**TINY_DIFFUSERS[name].inputs(), return_dict=False)[0]
    finally:
        torch.set_num_threads(threads)
    return made


def _sd3_pipeline(transformer: Any) -> Any:
    diffusers, transformers = import_module("diffusers"), import_module("transformers")
    letters = [chr(code) for code in range(97, 123)]
    words = [*letters, *(f"{letter}</w>" for letter in letters)]
    words += ["<|startoftext|>", "<|endoftext|>"]
    tokenizer = transformers.CLIPTokenizer(
        {word: place for place, word in enumerate(words)}, [], model_max_length=8
    )
    config = transformers.CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8,
        projection_dim=16,
        bos_token_id=len(words) - 2,
        eos_token_id=len(words) - 1,
    )
    encoders = [transformers.CLIPTextModelWithProjection(config) for _ in range(2)]
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=diffusers.AutoencoderKL(
            block_out_channels=[8],
            layers_per_block=1,
            norm_num_groups=4,
            sample_size=8,
            shift_factor=0.1,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        text_encoder=encoders[0],
        tokenizer=tokenizer,
        text_encoder_2=encoders[1],
        tokenizer_2=tokenizer,
        text_encoder_3=_t5(transformers),
        tokenizer_3=transformers.T5Tokenizer(
            [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((one, -1.0) for one in letters)],
            extra_ids=0,
        ),
    )


def _t5(transformers: Any) -> Any:
    sizes = {"d_model": 32, "d_ff": 24, "d_kv": 8, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(vocab_size=32, dropout_rate=0.0, **sizes)
    return transformers.T5EncoderModel(config)


def _ddpm_pipeline(unet: Any) -> Any:
    diffusers = import_module("diffusers")
    return diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler(num_train_timesteps=10))


TINY_PIPELINES: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "sd3": ("transformer", _sd3_pipeline),
    "ddpm": ("unet", _ddpm_pipeline),
}
"""By the family of a component: its name, and what makes a complete pipeline with a model."""


def tiny_pipeline(name: str) -> Any:
    """Return a complete pipeline, as it was before the training of its component."""
    torch.manual_seed(0)
    return TINY_PIPELINES[name][1](tiny_diffusers(name))


def load_pipeline(place: Path) -> Any:
    """Return the complete pipeline in a folder, as diffusers loads it."""
    return import_module("diffusers").DiffusionPipeline.from_pretrained(place)


def pipeline_images(name: str, pipeline: Any) -> torch.Tensor:
    """Return what a complete pipeline makes of nothing, or of a few letters."""
    pipeline.set_progress_bar_config(disable=True)
    asked = {} if name == "ddpm" else {"prompt": "a b", "height": 8, "width": 8}
    asked |= {"generator": torch.Generator().manual_seed(0)}
    found = pipeline(num_inference_steps=2, output_type="np", **asked).images
    return torch.from_numpy(found)
