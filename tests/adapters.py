"""A small model with a LoRA adapter, as rank files and as recipes."""

import json
from pathlib import Path

import torch

from ranks import save_ranks, some_tensors

HEAD = "lm_head"


def adapted(directory: Path, alpha: float | None = 8.0, **more: object) -> dict[str, torch.Tensor]:
    """A model whose head has an adapter of rank 2, in verl's layout; return the adapter."""
    tensors = {f"base_model.model.{name}": one for name, one in some_tensors().items()}
    base = tensors.pop(f"base_model.model.{HEAD}.weight")
    generator = torch.Generator().manual_seed(5)
    adapter = {
        "lora_A.default.weight": torch.randn(2, 6, generator=generator),
        "lora_B.default.weight": torch.randn(13, 2, generator=generator),
    }
    named = {f"base_model.model.{HEAD}.{name}": one for name, one in adapter.items()}
    tensors |= {f"base_model.model.{HEAD}.base_layer.weight": base, **named}
    save_ranks(directory, tensors, 2)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", **more}))
    (directory / "tokenizer.json").write_text("{}")
    if alpha is not None:
        meta = {"r": 2, "lora_alpha": alpha, "task_type": "CAUSAL_LM"}
        (directory / "lora_train_meta.json").write_text(json.dumps(meta))
    return adapter
