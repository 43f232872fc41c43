"""LoRA adapters that peft trains for two steps under FSDP2, saved as verl saves them.

The truth, beside the checkpoint, is what peft makes of the same tensors in one process.
"""

import json
import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from oracle.writers.saving import rank_file, truth_file
from tiny_models import tiny_model

__all__ = ["IDS", "LoraCase", "Truth", "load_truth"]

IDS = torch.arange(16).reshape(2, 8)
"""What logits are compared for."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class LoraCase:
    """A scenario: which model, which adapter, and what is saved of it.

    Attributes:
        model: a key of `tiny_models.TINY_FAMILIES`.
        lora: arguments of peft's LoraConfig.
        dtype: of the model and the adapter.
        lora_only: save as verl does with `save_lora_only`.
        peft_file: write peft's adapter_config.json, not verl's lora_train_meta.json.
    """

    model: str
    lora: Mapping[str, Any] = field(hash=False)
    dtype: str = "float32"
    lora_only: bool = False
    peft_file: bool = False

    def __call__(self, rank: int, world: int, directory: Path) -> None:
        """Train and save `global_step_2/actor`; leave `base` and the truth next to `directory`."""
        from peft import get_peft_model_state_dict

        base = base_model(self.model, self.dtype)
        if rank == 0:
            base.save_pretrained(directory.parent / "base")
        model = self._adapted(base)
        _train(model, world)
        actor = directory / "global_step_2" / "actor"
        actor.mkdir(parents=True, exist_ok=True)
        state = model.state_dict()
        whole = {name: _whole(tensor) for name, tensor in state.items()}
        kept = {name: one for name, one in state.items() if not self.lora_only or "lora_" in name}
        torch.save(OrderedDict(kept), rank_file(actor, world, rank))
        if rank == 0:
            self._write_companions(base, model, actor)
            alone = self._adapted(base_model(self.model, self.dtype))
            alone.load_state_dict(whole)
            adapter = {name: _whole(one) for name, one in get_peft_model_state_dict(alone).items()}
            alone.eval()
            logits = alone(input_ids=IDS).logits.detach()
            merged = alone.merge_and_unload().state_dict()
            truth = {"state": whole, "merged": merged, "adapter": adapter, "logits": logits}
            torch.save(truth, truth_file(directory))

    def _adapted(self, base: nn.Module) -> Any:
        from peft import LoraConfig, get_peft_model

        # FSDP2 wants one dtype in a unit: the adapter keeps the model's
        config = LoraConfig(**self.lora)
        return get_peft_model(base, config, autocast_adapter_dtype=False)

    def _write_companions(self, base: Any, model: Any, actor: Path) -> None:
        base.config.save_pretrained(actor / "huggingface")
        config = model.peft_config["default"]
        if self.peft_file:
            config.save_pretrained(actor / "lora_adapter")
        else:
            meta = {"r": config.r, "lora_alpha": config.lora_alpha, "task_type": config.task_type}
            (actor / "lora_train_meta.json").write_text(json.dumps(meta))


@dataclass(frozen=True)
class Truth:
    """What peft makes of the trained tensors.

    Attributes:
        state: the trained model's whole tensors, by peft's names.
        merged: those of `merge_and_unload()`.
        adapter: what peft would save.
        logits: of the model with its adapter beside it.
    """

    state: dict[str, torch.Tensor]
    merged: dict[str, torch.Tensor]
    adapter: dict[str, torch.Tensor]
    logits: torch.Tensor


def load_truth(directory: Path) -> Truth:
    """Return what a case left next to its directory."""
    return Truth(**torch.load(truth_file(directory)))


def base_model(family: str, dtype: str) -> Any:
    """Return a model to train an adapter for."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return tiny_model(family).to(_DTYPES[dtype])


def _train(model: Any, world: int) -> None:
    """Shard a model, a unit per layer, and take two steps; an adapter's B is 0 before."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05)
    for _ in range(2):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()
