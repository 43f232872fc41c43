"""A real Trainer of Lightning with FSDP2 on the CPU; the truth is the model after step 2."""

import os
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from oracle.writers.hub_models import full_state, leave_logits
from oracle.writers.saving import leave_truth
from oracle.writers.trainer import Sentences
from tiny_models import tiny_model, with_adapter

__all__ = ["lightning_fsdp2", "lightning_lora", "lightning_runs"]


class _Tuned(LightningModule):
    """A model of transformers under the name `model`, as tutorials have it."""

    def __init__(self, *, model_name_or_path: str, lora: bool) -> None:  # noqa: ARG002 (saved)
        super().__init__()
        self.save_hyperparameters()  # into hparams.yaml
        self.model: Any = None
        self.lora = lora

    def configure_model(self) -> None:
        if self.model is None:
            model = with_adapter(tiny_model()) if self.lora else tiny_model()
            assert self.device_mesh is not None
            mesh = self.device_mesh["data_parallel"]
            for layer in next(
                one for one in model.modules() if isinstance(one, torch.nn.ModuleList)
            ):
                fully_shard(layer, mesh=mesh)
            self.model = fully_shard(model, mesh=mesh)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        del batch_idx
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained: Iterator[torch.nn.Parameter] = filter(
            lambda one: one.requires_grad, self.parameters()
        )
        return torch.optim.AdamW(trained, lr=0.01)


def lightning_fsdp2(rank: int, world: int, directory: Path) -> None:
    """Train, and leave the tree of the default logger and `ModelCheckpoint`; any world size."""
    _train((rank, world, directory), lora=False)


def lightning_lora(rank: int, world: int, directory: Path) -> None:
    """The same with an adapter of peft; any world size."""
    _train((rank, world, directory), lora=True)


def lightning_runs(rank: int, world: int, directory: Path, *, code: str) -> None:
    """Train by a page's code in a directory; any world size."""
    with chdir(directory):
        _train((rank, world, directory), lora=False, code=code)


def _train(
    place: tuple[int, int, Path], *, lora: bool, code: str = "trainer.fit(module, loader)"
) -> None:
    rank, world, directory = place
    os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    trainer = Trainer(
        max_steps=2,
        accelerator="cpu",
        devices=world,
        strategy=ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1),
        default_root_dir=directory,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = _Tuned(model_name_or_path="base", lora=lora)
    loader = torch.utils.data.DataLoader(Sentences(), batch_size=2)
    exec(code, {"trainer": trainer, "module": module, "loader": loader})  # noqa: S102
    leave_logits(place, module.model)
    leave_truth(place, full_state(module.model))
