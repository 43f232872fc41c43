"""Scenarios with models: FSDP2 on one and two mesh dimensions, FSDP2 with TP, FSDP1 on a mesh.

The truth is always what the model held before it was sharded.
"""

from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from oracle.writers.saving import copy_state, save_rank

__all__ = ["fsdp1_mesh", "fsdp2", "fsdp2_hsdp", "fsdp2_tp", "fsdp2_tp_uneven"]


class Block(nn.Module):
    """A linear layer and a norm, none of whose sizes divides by a common world size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 13)
        self.norm = nn.RMSNorm(13)


class Mixed(nn.Module):
    """A model with everything that a flat list of float32 matrices would not show.

    A tensor of one element, one shorter than most worlds, three dtypes, tied weights, and buffers,
    one of which sorts before all other names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5]))
        self.narrow = nn.Parameter(torch.randn(2, 5))
        self.embed = nn.Embedding(37, 10)
        self.block = Block()
        self.bfloat16_layer = nn.Linear(10, 6, dtype=torch.bfloat16)
        self.float16_layer = nn.Linear(9, 5, dtype=torch.float16)
        self.head = nn.Linear(10, 37, bias=False)
        self.head.weight = self.embed.weight
        _add_buffers(self)


class Parallel(nn.Module):
    """Layers for a TP plan (`gate`, `up`, `down`) and others outside it (`embed`, `norm`)."""

    def __init__(self, hidden: int, inner: int, gates: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(21, hidden)
        self.norm = nn.RMSNorm(hidden)
        self.gate = nn.Linear(hidden, gates)
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)
        _add_buffers(self)


def fsdp2(rank: int, world: int, directory: Path) -> None:
    """Shard `Mixed` with FSDP2 on a mesh of one dimension; any world size."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    _save_mixed((rank, world, directory), mesh)


def fsdp2_hsdp(rank: int, world: int, directory: Path) -> None:
    """Shard `Mixed` with FSDP2 and replicate the shards (HSDP) on a 2 x 2 mesh; world size 4."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
    _save_mixed((rank, world, directory), mesh)


def fsdp2_tp(rank: int, world: int, directory: Path) -> None:
    """Shard `Parallel` with TP, then FSDP2, on a 2 x 2 mesh, sizes that divide; world size 4."""
    _save_parallel((rank, world, directory), Parallel(hidden=8, inner=16, gates=4))


def fsdp2_tp_uneven(rank: int, world: int, directory: Path) -> None:
    """Shard as `fsdp2_tp`, sizes that do not divide, one rank left without rows; world size 4."""
    _save_parallel((rank, world, directory), Parallel(hidden=7, inner=11, gates=3))


def fsdp1_mesh(rank: int, world: int, directory: Path) -> None:
    """Shard with FSDP1 on a mesh: DTensors, but plain tensors with an attribute at world size 1."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    wrap = partial(
        FullyShardedDataParallel,
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    model = nn.Module()
    model.embed = nn.Embedding(37, 10)
    model.block = Block()
    _add_buffers(model)
    truth = copy_state(model)
    model.block = wrap(model.block)
    wrapped = wrap(model)
    FullyShardedDataParallel.set_state_dict_type(
        wrapped, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()
    )
    save_rank((rank, world, directory), wrapped.state_dict(), truth)


def _add_buffers(module: nn.Module) -> None:
    module.register_buffer("a_buffer", torch.linspace(-1, 1, 7))
    module.register_buffer("inverse_frequency", torch.logspace(0, -4, 5))
    module.register_buffer("counter", torch.tensor(2**40 + 1))
    module.register_buffer("mask", torch.tensor([[True, False, True], [False, False, True]]))
    module.register_buffer("nothing", torch.empty(0, 3))


def _save_mixed(place: tuple[int, int, Path], mesh: DeviceMesh) -> None:
    model = Mixed()
    truth = copy_state(model)
    for unit in (
        model.block,
        model.bfloat16_layer,
        model.float16_layer,
        model,
    ):  # a unit has one dtype
        fully_shard(unit, mesh=mesh)
    save_rank(place, model.state_dict(), truth)


def _save_parallel(place: tuple[int, int, Path], model: Parallel) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    truth = copy_state(model)
    styles: dict[str, ParallelStyle] = {
        "gate": ColwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    parallelize_module(model, mesh["tp"], styles)
    fully_shard(model, mesh=mesh["dp"])
    save_rank(place, model.state_dict(), truth)
