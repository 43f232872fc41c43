"""Checkpoints that the code of lmms-engine's FSDP2 trainer saves and loads.

The trainer's module imports all its models and datasets, with what these need. Its methods for
checkpoints need only torch, so these are taken out of the installed file, and run as they are.
"""

import ast
import logging
import os
import random
from importlib.util import find_spec
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from oracle.writers.resuming import Parts, Run, parts_of, save_whole, train_step

__all__ = ["resume_with_lmms_engine", "train_with_lmms_engine"]

_METHODS = ("save_checkpoints", "load_checkpoints", "get_rng_state", "load_rng_state")
_TOKENS = 1234


class _Counter(SimpleNamespace):
    """What has a state: a dataloader, and the like."""

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def _trainer(parts: Parts, directory: Path, batches: int) -> Any:
    """Return an object with the trainer's methods, and what they use."""
    package = find_spec("lmms_engine")
    assert package is not None
    assert package.submodule_search_locations is not None
    path = Path(package.submodule_search_locations[0], "train", "fsdp2", "fsdp2_trainer.py")
    (trainer,) = (
        one
        for one in ast.parse(path.read_text()).body
        if isinstance(one, ast.ClassDef) and one.name == "FSDP2SFTTrainer"
    )
    body = [one for one in trainer.body if getattr(one, "name", "") in _METHODS]
    names: dict[str, Any] = {"os": os, "torch": torch, "dist": dist, "np": np, "random": random}
    names["logger"] = logging.getLogger(__name__)
    exec(compile(ast.Module(body, []), path, "exec"), names)  # noqa: S102
    model, optimizer, scheduler = parts
    made = SimpleNamespace(
        fsdp2_model=model,
        model=SimpleNamespace(config=SimpleNamespace(save_pretrained=lambda _: None)),
        optimizer=optimizer,
        scheduler=scheduler,
        ema=SimpleNamespace(is_enabled=lambda: False),
        processing_class=SimpleNamespace(save_pretrained=lambda _: None),
        compute_tracker=_Counter(total_flops=2.5),
        train_dataloader=_Counter(_num_yielded=batches, _snapshot={"rng": torch.arange(3)}),
        args=SimpleNamespace(output_dir=str(directory), save_total_limit=3),
        remove_old_checkpoints=lambda *_args, **_kwargs: None,
        total_tokens=_TOKENS,
        accumulated_grad_steps=1,
    )
    for name in _METHODS:
        function = names[name]
        made.__dict__[name] = MethodType(function, made)
    return made


def train_with_lmms_engine(rank: int, world: int, directory: Path) -> None:
    """Train, save by lmms-engine, and train once more."""
    parts = parts_of(Run("uneven", (world,), ("fsdp",)), seed=1)
    for step in range(2):
        train_step(parts, step)
    random.seed(rank)
    np.random.seed(rank)  # noqa: NPY002 (the state that the trainer saves)
    torch.manual_seed(rank)
    trainer = _trainer(parts, directory, batches=7 + rank)
    trainer.save_checkpoints(str(directory / "checkpoint-2"), 2)
    _go_on(parts, rank, directory, "train")


def resume_with_lmms_engine(rank: int, world: int, directory: Path) -> None:
    """Load by lmms-engine what was resharded, and train once."""
    parts = parts_of(Run("uneven", (world,), ("fsdp",)), seed=2)
    trainer = _trainer(parts, directory, batches=0)
    trainer.total_tokens = 0
    trainer.load_checkpoints(str(directory / "checkpoint-9"), 2)
    assert trainer.total_tokens == _TOKENS
    assert trainer.train_dataloader._num_yielded == 7 + rank  # of the rank with this number
    _go_on(parts, rank, directory, "resume")


def _go_on(parts: Parts, rank: int, directory: Path, action: str) -> None:
    drawn = [torch.rand(()).item(), float(np.random.rand()), random.random()]  # noqa: NPY002
    torch.save(drawn, directory / f"{action}-draws-{rank}.pt")
    save_whole(rank, parts, directory / f"{action}-before.pt")
    train_step(parts, 2)
    save_whole(rank, parts, directory / f"{action}-after.pt")
