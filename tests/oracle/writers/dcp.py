"""Scenarios of DCP directories with a model, nested and named as the frameworks do it.

The truth is what the model held before it was sharded or, where an optimizer stepped, what torch
gathers from it.
"""

import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from oracle.writers.dcp_saving import dcp_writer, save_dcp
from oracle.writers.model import Mixed
from oracle.writers.saving import copy_state, gather

__all__ = [
    "dcp_accelerate",
    "dcp_app",
    "dcp_composer",
    "dcp_fabric",
    "dcp_flat",
    "dcp_lightning",
    "dcp_lightning_fsdp",
    "dcp_model",
    "dcp_model_optimizer",
    "dcp_wrapped",
    "sharded_mixed",
]

_Tensors = OrderedDict[str, torch.Tensor]

_TRAINER = {
    "epoch": 1,
    "global_step": 10,
    "pytorch-lightning_version": "2.5.0",
    "loops": {},
    "lr_schedulers": [],
    "callbacks": {},
    "hparams_name": "kwargs",
    "hyper_parameters": {"lr": 0.1},
}


class AppState(Stateful):
    """Model and optimizer as one object, as in PyTorch's recipe for DCP."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optim": moments}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


def dcp_model(rank: int, world: int, directory: Path) -> None:
    """Save {"model": ...} alone; any world size."""
    model, truth = sharded_mixed(world)
    state = {"model": model.state_dict()}
    save_dcp((rank, world, directory), state, truth, stored="model.{}".format)


def dcp_model_optimizer(rank: int, world: int, directory: Path) -> None:
    """Save model, optimizer, scheduler and objects next to each other; any world size."""
    model, optimizer, truth = _trained(world)
    weights, moments = get_state_dict(model, optimizer)
    state = {
        "model": weights,
        "optimizer": moments,
        "lr_scheduler": StepLR(optimizer, 2).state_dict(),
        "step": 1,
        "best": np.float64(0.25),
        "note": b"octets",
        "history": [{"loss": 2.5}, {"loss": torch.tensor(2.25)}],
    }
    save_dcp((rank, world, directory), state, truth, stored="model.{}".format)


def dcp_flat(rank: int, world: int, directory: Path) -> None:
    """Save the model's tensors at the top level, as torchtitan does; any world size."""
    model, optimizer, truth = _trained(world)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {
        **get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=flat),
        "lr_scheduler": StepLR(optimizer, 2).state_dict(),
        "train_state": {"step": torch.tensor(1, dtype=torch.int32), "losses": torch.rand(3)},
        "dataloader": {"dp_rank_0": b"octets", "world_size": world},
    }
    save_dcp((rank, world, directory), state, truth)


def dcp_app(rank: int, world: int, directory: Path) -> None:
    """Save one stateful object that holds model and optimizer; any world size."""
    model, optimizer, truth = _trained(world)
    state = {"app": AppState(model, optimizer)}
    save_dcp((rank, world, directory), state, truth, stored="app.model.{}".format)


def dcp_accelerate(rank: int, world: int, directory: Path) -> None:
    """Save model and optimizer in directories of their own, as accelerate does; any world size."""
    model, optimizer, truth = _trained(world)
    weights, moments = get_state_dict(model, optimizer)
    state_dict_saver.save(
        {"optimizer": moments}, storage_writer=dcp_writer(directory / "optimizer_0")
    )
    save_dcp(
        (rank, world, directory),
        {"model": weights},
        truth,
        stored="model.{}".format,
        into="pytorch_model_fsdp_0",
    )


def dcp_composer(rank: int, world: int, directory: Path) -> None:
    """Save as Composer does, whose module holds the model as `model`; any world size."""
    model, optimizer, truth = _trained(world)
    weights, moments = get_state_dict(model, optimizer)
    state = {
        "state": {
            "model": _of_attribute(weights),
            "optimizers": {"AdamW": moments},
            "schedulers": {"StepLR": StepLR(optimizer, 2).state_dict()},
            "timestamp": {"Timestamp": {"epoch": 1, "batch": 10, "batches_per_rank": [4, 6]}},
            "integrations": {"huggingface": {"model": {"config": {"content": {"layers": 1}}}}},
            "run_name": "a-run",
        },
        "rng": [{"python": random.getstate(), "torch": torch.get_rng_state()}],
    }
    save_dcp((rank, world, directory), state, truth, stored="state.model.model.{}".format)


def dcp_lightning(rank: int, world: int, directory: Path) -> None:
    """Save as Lightning's ModelParallelStrategy does; any world size."""
    model, optimizer, truth = _trained(world)
    weights, moments = get_state_dict(model, optimizer)
    state = {"state_dict": _of_attribute(weights), "optimizer_0": moments}
    save_dcp((rank, world, directory), state, truth, stored="state_dict.model.{}".format)
    _save_meta(rank, directory, _TRAINER)


def dcp_lightning_fsdp(rank: int, world: int, directory: Path) -> None:
    """Save as Lightning's FSDPStrategy does, which names the container otherwise; any world."""
    model, optimizer, truth = _trained(world)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": _of_attribute(weights), "optimizer_0": moments}
    save_dcp((rank, world, directory), state, truth, stored="model.model.{}".format)
    _save_meta(rank, directory, _TRAINER)


def dcp_fabric(rank: int, world: int, directory: Path) -> None:
    """Save as Lightning Fabric does: all but modules and optimizers goes elsewhere; any world."""
    model, truth = sharded_mixed(world)
    state = {"model": model.state_dict()}
    save_dcp((rank, world, directory), state, truth, stored="model.{}".format)
    _save_meta(rank, directory, {"step": 3})


def dcp_wrapped(rank: int, world: int, directory: Path) -> None:
    """Save names in which wrappers show: DDP, torch.compile, checkpointing, FSDP; any world."""
    model, truth = sharded_mixed(world)
    state = {"model": {_wrapped(name): value for name, value in model.state_dict().items()}}
    save_dcp((rank, world, directory), state, truth, stored=lambda name: f"model.{_wrapped(name)}")


def sharded_mixed(world: int, mesh: DeviceMesh | None = None) -> tuple[Mixed, _Tensors]:
    """Return `Mixed` under FSDP2, and what it held before."""
    mesh = mesh or init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    model = Mixed()
    truth = copy_state(model)
    for unit in (model.block, model.bfloat16_layer, model.float16_layer, model):
        fully_shard(unit, mesh=mesh)
    return model, truth


def _trained(world: int) -> tuple[Mixed, AdamW, _Tensors]:
    """Return `Mixed` after one step of its optimizer, and what torch gathers from it."""
    model, _ = sharded_mixed(world)
    optimizer = AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    truth = _Tensors(
        (name, gather(value) if isinstance(value, DTensor) else value.clone())
        for name, value in model.state_dict().items()
    )
    return model, optimizer, truth


def _of_attribute(weights: dict[str, Any]) -> dict[str, Any]:
    """Return the weights as those of a module that holds the model as `model`."""
    return {f"model.{name}": value for name, value in weights.items()}


def _wrapped(name: str) -> str:
    inside = name.replace("block.", "block._checkpoint_wrapped_module._fsdp_wrapped_module.")
    return f"module._orig_mod.{inside}"


def _save_meta(rank: int, directory: Path, values: dict[str, Any]) -> None:
    if rank == 0:
        torch.save(values, directory / "meta.pt")
