"""Checkpoints that the code of lmms-engine's FSDP2 trainer saves and loads.

The trainer's module imports all its models and datasets, with what these need. Its methods for
checkpoints need only torch, so these are taken out of the installed file, and run as they are.
"""

import ast
import logging
import os
import random
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from oracle.writers.hub_models import full_state, leave_logits
from oracle.writers.resuming import Parts, Run, parts_of, save_whole, train_step
from oracle.writers.saving import leave_truth
from tiny_models import tiny_model, tiny_tokenizer, with_adapter

__all__ = [
    "lmms_engine_lora",
    "lmms_engine_qwen2",
    "resume_with_lmms_engine",
    "train_with_lmms_engine",
]

_METHODS = ("save_checkpoints", "load_checkpoints", "get_rng_state", "load_rng_state")
_TOKENS = 1234


class _Counter(SimpleNamespace):
    """What has a state: a dataloader, and the like."""

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def _installed(path: str) -> Path:
    package = find_spec("lmms_engine")
    assert package is not None
    assert package.submodule_search_locations is not None
    return Path(package.submodule_search_locations[0], path)


def _trainer(parts: Parts, directory: Path, batches: int) -> Any:
    """Return an object with the trainer's methods, and what they use."""
    path = _installed("train/fsdp2/fsdp2_trainer.py")
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


def lmms_engine_qwen2(rank: int, world: int, directory: Path) -> None:
    """Train a model of transformers and save it into `checkpoint-2`; any world size.

    The truth and the logits of its EMA weights are those of `ema`, next to the run.
    """
    _save_model((rank, world, directory), tiny_model())


def lmms_engine_lora(rank: int, world: int, directory: Path) -> None:
    """The same with an adapter of peft; any world size."""
    _save_model((rank, world, directory), with_adapter(tiny_model()))


def _save_model(place: tuple[int, int, Path], model: Any) -> None:
    rank, world, directory = place
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    for layer in next(one for one in model.modules() if isinstance(one, torch.nn.ModuleList)):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)
    ema = vars(_module("utils/ema_utils.py"))["EMAHelper"](
        SimpleNamespace(ema_enabled=True, ema_decay=0.5)
    )
    ema.maybe_init(model, None)
    ids = torch.arange(16).reshape(2, 8)
    for step in (1, 2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update(step)
    parts = model, optimizer, LambdaLR(optimizer, lambda _: 1.0)
    trainer = _trainer(parts, directory, batches=1)
    vars(trainer).update(model=model, processing_class=tiny_tokenizer(), ema=ema)
    trainer.save_checkpoints(str(directory / "checkpoint-2"), 2)
    _leave(place, model)
    ema.copy_to_model()
    _leave((rank, world, directory.with_name("ema")), model)


def _leave(place: tuple[int, int, Path], model: Any) -> None:
    leave_logits(place, model)
    leave_truth(place, full_state(model))


def _module(path: str) -> ModuleType:
    """Import a file without its package, which imports all models."""
    spec = spec_from_file_location(Path(path).stem, _installed(path))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _go_on(parts: Parts, rank: int, directory: Path, action: str) -> None:
    drawn = [torch.rand(()).item(), float(np.random.rand()), random.random()]  # noqa: NPY002
    torch.save(drawn, directory / f"{action}-draws-{rank}.pt")
    save_whole(rank, parts, directory / f"{action}-before.pt")
    train_step(parts, 2)
    save_whole(rank, parts, directory / f"{action}-after.pt")
