"""Scenarios of DCP directories in every form that torch's own options give them.

Meshes, writers, planners; the frameworks' nesting stands in `dcp`.
"""

from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed import barrier
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from oracle.writers.dcp import sharded_mixed
from oracle.writers.dcp_saving import (
    check_loads,
    check_pieces,
    dcp_writer,
    megatron_files,
    save_dcp,
)
from oracle.writers.model import Mixed, Parallel
from oracle.writers.saving import copy_state, leave_truth

__all__ = [
    "dcp_async",
    "dcp_corrupt",
    "dcp_hsdp",
    "dcp_many_files",
    "dcp_no_collectives",
    "dcp_not_flattened",
    "dcp_not_flattened_nested",
    "dcp_not_flattened_plain",
    "dcp_threads",
    "dcp_tp",
    "dcp_zstd",
    "megatron",
]


def dcp_hsdp(rank: int, world: int, directory: Path) -> None:
    """Shard and replicate on a 2 x 2 mesh; torch writes each shard once; world size 4."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
    model, truth = sharded_mixed(world, mesh)
    state = {"model": model.state_dict()}
    save_dcp((rank, world, directory), state, truth, stored="model.{}".format)


def dcp_tp(rank: int, world: int, directory: Path) -> None:
    """Shard with TP, then FSDP2, on a 2 x 2 mesh, sizes that divide; world size 4."""
    model = Parallel(hidden=8, inner=16, gates=4)
    truth = copy_state(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    state = {"model": model.state_dict()}
    save_dcp((rank, world, directory), state, truth, stored="model.{}".format)


def dcp_corrupt(rank: int, world: int, directory: Path) -> None:
    """Shard 7 rows over dp 3 x tp 2: torch itself writes what it cannot read; world size 6.

    It takes the place of a piece by cutting for dp first, although TP cut first: `.metadata`
    declares other shapes than the stored tensors have.
    """
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(OrderedDict(up=nn.Linear(4, 7), norm=nn.RMSNorm(7)))
    truth = copy_state(model)
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    state_dict_saver.save({"model": model.state_dict()}, storage_writer=dcp_writer(directory))
    leave_truth((rank, world, directory), truth)


def megatron(rank: int, world: int, directory: Path) -> None:
    """Save without flattening, with the files that Megatron writes next to it; any world size."""
    model, truth = sharded_mixed(world)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    save_dcp((rank, world, directory), dict(model.state_dict()), truth, planner=planner)
    if rank == 0:
        megatron_files(directory)


def dcp_many_files(rank: int, world: int, directory: Path) -> None:
    """Write a file per item; any world size."""
    _save_with((rank, world, directory), single_file_per_rank=False)


def dcp_threads(rank: int, world: int, directory: Path) -> None:
    """Write with more threads than some ranks have items: some files are empty; any world."""
    _save_with((rank, world, directory), thread_count=12)


def dcp_zstd(rank: int, world: int, directory: Path) -> None:
    """Compress every item; any world size."""
    _save_with((rank, world, directory), _extensions=[ZStandard()])


def dcp_async(rank: int, world: int, directory: Path) -> None:
    """Save in the background; any world size."""
    model, truth = sharded_mixed(world)
    state = {"model": model.state_dict()}
    pending = state_dict_saver.async_save(state, storage_writer=dcp_writer(directory))
    assert isinstance(pending, Future)
    pending.result()
    if rank == 0:
        check_loads(directory, truth, stored="model.{}".format)
    leave_truth((rank, world, directory), truth)


def dcp_no_collectives(rank: int, world: int, directory: Path) -> None:
    """Save without coordination: a metadata file per rank, each of its own chunks; any world."""
    model, truth = sharded_mixed(world)
    state = {"model": model.state_dict(), "step": 3}
    state_dict_saver.save(state, storage_writer=dcp_writer(directory), use_collectives=False)
    barrier()
    if rank == 0:
        check_pieces(directory, world, truth, stored="model.{}".format)
    leave_truth((rank, world, directory), truth)


def dcp_not_flattened(rank: int, world: int, directory: Path) -> None:
    """Save a flat state dict without flattening: tensors, but no paths; any world size."""
    model, truth = sharded_mixed(world)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    save_dcp((rank, world, directory), model.state_dict(), truth, planner=planner)


def dcp_not_flattened_nested(rank: int, world: int, directory: Path) -> None:
    """Save {"model": ...} without flattening: one pickle of one rank's shards; world 2 or more."""
    model, truth = sharded_mixed(world)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    state = {"model": model.state_dict()}
    state_dict_saver.save(state, storage_writer=dcp_writer(directory), planner=planner)
    leave_truth((rank, world, directory), truth)


def dcp_not_flattened_plain(rank: int, world: int, directory: Path) -> None:
    """Save {"model": ...} of plain tensors without flattening: one pickle of all; world size 1."""
    model = Mixed()
    planner = DefaultSavePlanner(flatten_state_dict=False)
    state = {"model": model.state_dict(), "step": 3}
    state_dict_saver.save(state, storage_writer=dcp_writer(directory), planner=planner)
    leave_truth((rank, world, directory), copy_state(model))


def _save_with(place: tuple[int, int, Path], **options: Any) -> None:
    """Save the model with a number and a string, through a writer with these options."""
    model, truth = sharded_mixed(place[1])
    state = {"model": model.state_dict(), "step": 3, "note": "text"}
    writer = dcp_writer(place[2], **options)
    save_dcp(place, state, truth, stored="model.{}".format, writer=writer)
