"""Scenarios that load: a checkpoint of `Parallel` into a model that real ranks hold sharded."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import unshard
from oracle.writers.model import Parallel
from oracle.writers.saving import truth_file

__all__ = ["LOADS"]


def into_fsdp2(rank: int, world: int, directory: Path) -> None:
    """Load into a model of FSDP2 on one mesh dimension."""
    del rank
    model = _model(directory)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    _load(model, directory)


def into_hsdp(rank: int, world: int, directory: Path) -> None:
    """Load into a model of FSDP2 whose shards are replicated."""
    del rank
    model = _model(directory)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("r", "s")))
    _load(model, directory)


def into_fsdp2_tp(rank: int, world: int, directory: Path) -> None:
    """Load into a model of FSDP2 over TP, whose shards are strided."""
    del rank
    root = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    model = _model(directory)
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, root["tp"], plan)
    fully_shard(model, mesh=root["dp"])
    _load(model, directory)


def from_meta(rank: int, world: int, directory: Path) -> None:
    """Load into a model that was made on the meta device, then sharded, then given memory."""
    del rank
    with torch.device("meta"):
        model = _model(directory)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    model.to_empty(device="cpu")
    _load(model, directory)


def _model(directory: Path) -> nn.Module:
    truth = torch.load(truth_file(directory))
    inner, hidden = truth["up.weight"].shape
    return Parallel(hidden=hidden, inner=inner, gates=truth["gate.weight"].shape[0])


def _load(model: nn.Module, directory: Path) -> None:
    loaded = unshard.load_into(model, directory)
    assert loaded == unshard.Loaded(missing=(), unexpected=(), on_meta=())
    truth = torch.load(truth_file(directory))
    state = model.state_dict()
    assert state.keys() == truth.keys()
    for name, tensor in state.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(whole, truth[name]), name


LOADS: dict[str, Callable[[int, int, Path], None]] = {
    "FSDP2": into_fsdp2,
    "HSDP": into_hsdp,
    "FSDP2 and TP": into_fsdp2_tp,
    "from meta": from_meta,
}
