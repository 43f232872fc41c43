"""Trainings that save every step and keep one checkpoint: what is left of them for a follower.

Each checkpoint is copied as soon as it is complete, so that what became of it can be compared with
a merge by hand. Some wait until their output is there, as a longer training would: the others are
rotated away while the follower may be reading them.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from oracle.writers.accelerate import launched
from oracle.writers.trainer import Sentences, arguments
from tiny_models import tiny_model
from waiting import wait_until

__all__ = ["STEPS", "WAITED_FOR", "Copies", "lmms_engine_rotating", "trainer_rotating"]

STEPS = 20
WAITED_FOR = range(4, STEPS, 5)
"""The steps that stay until they are merged; the last one always does."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Where the copies of a run's checkpoints are, and where its outputs are made."""

    copies: Path
    outputs: Path

    def take(self, step_dir: Path, step: int) -> None:
        """Copy a checkpoint that is complete; every rank must call it."""
        dist.barrier()
        if dist.get_rank():
            return
        shutil.copytree(step_dir, self.copies / step_dir.name, dirs_exist_ok=True)
        if step in WAITED_FOR:
            reports = self.outputs.with_name(f"{self.outputs.name}.reports")
            told = f'"step": {step},'
            wait_until(lambda: told in reports.read_text(), f"{step_dir.name} is reported")


class _Copying(TrainerCallback):
    def __init__(self, copies: Copies) -> None:
        self.copies = copies

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        del control
        step = state.global_step
        self.copies.take(Path(str(args.output_dir), f"checkpoint-{step}"), step)


def trainer_rotating(rank: int, world: int, directory: Path, *, copies: Copies) -> None:
    """Train with transformers' Trainer and FSDP2; any world size."""
    with launched(rank, world):
        settings = arguments(directory, 2, "SHARDED_STATE_DICT", save_total_limit=1)
        settings.max_steps = STEPS
        Trainer(
            model=tiny_model(),
            args=settings,
            train_dataset=Sentences(),
            callbacks=[_Copying(copies)],
        ).train()


def lmms_engine_rotating(rank: int, world: int, directory: Path, *, copies: Copies) -> None:
    """Train with lmms-engine's trainer, which saves its last step twice; any world size."""
    from evaluation.lmms_training import Order, import_trainer, on_the_cpu, train

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # nobody connects to it
    trainer = import_trainer()
    on_the_cpu(world)
    vars(torch.cuda)["empty_cache"] = lambda: None
    train(Order(str(directory), {}, steps=STEPS, save_steps=1), trainer, copies.take)
