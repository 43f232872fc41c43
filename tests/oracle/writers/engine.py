"""Scenarios that train a tiny Qwen2 with FSDP2 and save as verl and lmms-engine do.

Two runs of two steps each, of one model: what their trainers write, in their places. Sources:
verl 0.9.1's FSDPCheckpointManager, lmms-engine 0.1.4's FSDP2Trainer. The truth of every step lies
beside, in `truth-N.pt` and, of the EMA weights, `truth-ema-N.pt`.
"""

import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerFast, get_linear_schedule_with_warmup

from oracle.writers.hub_models import full_state, hub_mesh
from tiny_models import tiny_model

__all__ = ["EMA_SHARE", "STEPS", "TRAINING_STEPS", "lmms_run", "verl_run"]

_Place = tuple[int, int, Path]
_Saver = Callable[["_Run", _Place, int], None]
STEPS = (10, 20)
TRAINING_STEPS = 100
EMA_SHARE = 0.25
_RATE = 0.01


def lmms_run(rank: int, world: int, directory: Path) -> None:
    """Save `checkpoint-10` and `checkpoint-20` of lmms-engine, with EMA weights; any world size."""
    _train((rank, world, directory), _save_lmms)


def verl_run(rank: int, world: int, directory: Path) -> None:
    """Save `global_step_10/actor` and `global_step_20/actor` of verl; any world size."""
    _train((rank, world, directory), _save_verl)


class _Run:
    """What a trainer holds."""

    def __init__(self, world: int) -> None:
        from torch.distributed.fsdp import fully_shard

        model = tiny_model()
        mesh = hub_mesh(world)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.model: nn.Module = model
        self.config = model.config
        self.optimizer = AdamW(model.parameters(), lr=_RATE)
        # transformers declares no types for what is ignored here and below
        self.scheduler: LambdaLR = get_linear_schedule_with_warmup(  # type: ignore[no-untyped-call]
            self.optimizer, 5, TRAINING_STEPS
        )

    def step(self) -> None:
        ids = torch.randint(37, (2, 8))
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def ema(self) -> OrderedDict[str, torch.Tensor]:
        """The state dict with other values for what is tracked, as lmms-engine saves its EMA."""
        state = OrderedDict(self.model.state_dict())
        for name, tensor in state.items():
            if isinstance(tensor, DTensor):
                state[name] = tensor.detach() * EMA_SHARE
        return state


def _train(place: _Place, save: _Saver) -> None:
    rank, world, directory = place
    torch.manual_seed(rank)
    np.random.seed(rank)  # noqa: NPY002 (what trainers save is the legacy state)
    random.seed(rank)
    run = _Run(world)
    for step in range(1, max(STEPS) + 1):
        run.step()
        if step in STEPS:
            save(run, place, step)
            truth = full_state(run.model)
            if rank == 0:
                torch.save(dict(truth), directory / f"truth-{step}.pt")
                scaled = {name: tensor * EMA_SHARE for name, tensor in truth.items()}
                torch.save(scaled, directory / f"truth-ema-{step}.pt")


def _rng(rank: int) -> dict[str, object]:
    """Random states as both save them; the device's own is made up, there is no device."""
    return {
        "cpu": torch.get_rng_state(),
        "numpy": np.random.get_state(),  # noqa: NPY002 (as trainers do)
        "random": random.getstate(),
        "cuda": torch.full((16,), rank, dtype=torch.uint8),
    }


def _save_lmms(run: _Run, place: _Place, step: int) -> None:
    rank, world, directory = place
    folder = directory / f"checkpoint-{step}"
    name = f"world_size_{world}_rank_{rank}.pt"
    for part in ("pytorch_model_fsdp_0", "pytorch_ema_model_fsdp_0", "optimizer", "extra_state"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    torch.save(run.model.state_dict(), folder / "pytorch_model_fsdp_0" / f"model_{name}")
    torch.save(run.ema(), folder / "pytorch_ema_model_fsdp_0" / f"model_{name}")
    torch.save(run.optimizer.state_dict(), folder / "optimizer" / f"optimizer_{name}")
    rng = _rng(rank)
    del rng["cuda"]
    extra = {
        "lr_scheduler_state": run.scheduler.state_dict(),
        "rng": rng,
        "total_tokens": 16 * step,
        "accumulated_grad_steps": 0,
    }
    torch.save(extra, folder / "extra_state" / f"extra_state_{name}")
    if rank == 0:
        run.config.save_pretrained(folder)
        _tokenizer().save_pretrained(folder)


def _save_verl(run: _Run, place: _Place, step: int) -> None:
    rank, world, directory = place
    folder = directory / f"global_step_{step}" / "actor"
    folder.mkdir(parents=True, exist_ok=True)
    name = f"world_size_{world}_rank_{rank}.pt"
    torch.save(run.model.state_dict(), folder / f"model_{name}")
    torch.save(run.optimizer.state_dict(), folder / f"optim_{name}")
    extra = {"lr_scheduler": run.scheduler.state_dict(), "rng": _rng(rank)}
    torch.save(extra, folder / f"extra_state_{name}")
    if rank == 0:
        (folder / "fsdp_config.json").write_text(f'{{"FSDP_version": 2, "world_size": {world}}}')
        run.config.save_pretrained(folder / "huggingface")
        _tokenizer().save_pretrained(folder / "huggingface")
        (directory / "latest_checkpointed_iteration.txt").write_text(str(step))


def _tokenizer() -> PreTrainedTokenizerFast:
    unknown = "<unk>"
    words = {word: number for number, word in enumerate([unknown, *"abcdefghij"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, unk_token=unknown
    )
