"""Trainings that save every step and keep one checkpoint: what is left of them for a follower.

Each checkpoint is copied as soon as it is complete, so that what became of it can be compared with
a merge by hand. Some wait until their output is there, as a longer training would: the others are
rotated away while the follower may be reading them.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    Qwen2ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from oracle.writers.accelerate import launched
from oracle.writers.hub_models import full_state
from oracle.writers.trainer import Sentences, arguments
from tiny_models import logits, tiny_model
from unshard.integrations import lmms_engine
from waiting import wait_until

__all__ = [
    "KEPT",
    "STEPS",
    "WAITED_FOR",
    "Copies",
    "lmms_engine_rotating",
    "lmms_engine_syncing",
    "trainer_rotating",
]

STEPS = 20
KEPT = 2
"""How many policy syncs stay."""
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
    train_with_lmms_engine(
        rank, world, directory, lambda _, step_dir, step: copies.take(step_dir, step)
    )


def lmms_engine_syncing(rank: int, world: int, directory: Path) -> None:
    """Sync the policy after each step as lmms-engine's `RLTrainRunner` does; any world size.

    What the trained model makes of a few tokens, and what the one that an engine would load, is
    left in `syncs.pt` next to the run: (step, logits, logits) of every sync.
    """
    root, syncs = directory / "policy-sync", list[tuple[int, torch.Tensor, torch.Tensor]]()

    def sync(trainer: Any, saved: Path, step: int) -> None:
        if saved.parent == root:
            return
        version = root / f"weight_v{step:06d}"
        shards = version.with_name(f"{version.name}-fsdp")
        trainer.save_checkpoints(str(shards), step, total_limit=None)
        dist.barrier()
        state = full_state(trainer.fsdp2_model)
        if rank == 0:
            from lmms_engine.merger.fsdp2 import FSDP2Merger

            shutil.rmtree(version, ignore_errors=True)
            FSDP2Merger().merge(shards, output_path=version, model_general_type=None)
            (version / ".lmms_weight_sync_ready").write_text(f"version_id={step}\n")
            trained = Qwen2ForCausalLM(trainer.model.config).bfloat16()
            trained.load_state_dict(state)
            loaded = AutoModelForCausalLM.from_pretrained(version, dtype=torch.bfloat16)
            syncs.append((step, logits(trained), logits(loaded)))
            for stale in sorted(root.glob("weight_v*-fsdp"))[:-KEPT]:
                shutil.rmtree(stale)
                shutil.rmtree(stale.with_name(stale.name.removesuffix("-fsdp")))
        dist.barrier()

    lmms_engine.install()
    train_with_lmms_engine(rank, world, directory, sync)
    if rank == 0:
        torch.save(syncs, directory.with_name("syncs.pt"))


def train_with_lmms_engine(
    rank: int, world: int, directory: Path, saved: Callable[[Any, Path, int], object]
) -> None:
    """Train with lmms-engine's trainer, on the CPU."""
    from evaluation.lmms_training import Order, import_trainer, on_the_cpu, train

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # nobody connects to it
    trainer = import_trainer()
    on_the_cpu(world)
    vars(torch.cuda)["empty_cache"] = lambda: None
    train(Order(str(directory), {}, steps=STEPS, save_steps=1), trainer, saved)
