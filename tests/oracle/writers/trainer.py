"""Scenarios of a real `Trainer` with FSDP on the CPU; the truth is the model after step 2."""

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from oracle.writers.accelerate import launched
from oracle.writers.hub_models import full_state, shards_state
from oracle.writers.saving import leave_truth
from tiny_models import tiny_model

__all__ = [
    "trainer_fsdp1",
    "trainer_fsdp2",
    "trainer_full",
]

_Place = tuple[int, int, Path]


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same in every process."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(37, (8,), generator=generator)
        return {"input_ids": ids, "labels": ids}


def trainer_fsdp2(rank: int, world: int, directory: Path) -> None:
    """Train with FSDP2 and save shards at steps 1 and 2; any world size."""
    _train((rank, world, directory), version=2, kind="SHARDED_STATE_DICT")


def trainer_fsdp1(rank: int, world: int, directory: Path) -> None:
    """Train with FSDP1 and save shards at steps 1 and 2; any world size."""
    _train((rank, world, directory), version=1, kind="SHARDED_STATE_DICT")


def trainer_full(rank: int, world: int, directory: Path) -> None:
    """Train with FSDP2 and save whole models, as a Trainer does by default; any world size."""
    _train((rank, world, directory), version=2, kind="FULL_STATE_DICT")


def _train(place: _Place, *, version: int, kind: str) -> None:
    rank, world, directory = place
    with launched(rank, world):
        trainer = Trainer(
            model=tiny_model(),
            args=_arguments(directory, version, kind),
            train_dataset=Sentences(),
        )
        trainer.train()
        model = trainer.model_wrapped
        leave_truth(place, full_state(model) if version == 2 else shards_state(model))


def _arguments(directory: Path, version: int, kind: str) -> TrainingArguments:
    fsdp: dict[str, Any] = {
        "version": version,
        "state_dict_type": kind,
        "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"],
    }
    if version == 1:
        fsdp["sync_module_states"] = "false"  # looks for an accelerator
    return TrainingArguments(
        str(directory),
        use_cpu=True,
        accelerator_config={"use_configured_state": True},  # that of `launched`
        fsdp=True,  # type: ignore[arg-type]  # a string is deprecated
        fsdp_config=fsdp,
        max_steps=2,
        save_steps=1,
        learning_rate=0.01,
        per_device_train_batch_size=2,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
