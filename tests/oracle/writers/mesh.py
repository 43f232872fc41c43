"""Scenarios of unusual meshes: experts, HSDP with TP, ranks out of order, lone strided shards."""

from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from oracle.writers.saving import copy_state, rank_file, save_rank, truth_file

__all__ = ["experts", "hsdp_tp", "lone_strided", "out_of_order", "out_of_order_uneven"]

Place = tuple[int, int, Path]


class Experts(nn.Module):
    """A mixture-of-experts block: a router, and stacked experts as lmms-engine shards them."""

    def __init__(self, experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, inner, hidden))
        self.down = nn.Parameter(torch.randn(experts, hidden, inner))
        self.norm = nn.Parameter(torch.randn(hidden))


def experts(rank: int, world: int, directory: Path) -> None:
    """Shard experts over an EP mesh, then everything over the other mesh dimension; world size 4.

    Experts become (Shard(1), Shard(0)) on the 2-D mesh; the router lies on a slice of the mesh, a
    different one on different ranks, each slice with a full copy.
    """
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard_mod_ep", "dp_shard_in_ep"))
    block = Experts(experts=6, hidden=8, inner=4)
    tail = nn.Linear(8, 5)
    model = nn.ModuleDict({"block": block, "tail": tail})
    truth = copy_state(model)
    for name in ("up", "down"):
        whole = getattr(block, name)
        part = distribute_tensor(whole.detach(), root["dp_shard_in_ep"], [Shard(0)])
        setattr(block, name, nn.Parameter(part))
    fully_shard(block, mesh=root["dp_shard_mod_ep"], shard_placement_fn=_second_dimension)
    fully_shard(tail, mesh=root._flatten("fsdp"))
    save_rank((rank, world, directory), model.state_dict(), truth)


def _second_dimension(parameter: nn.Parameter) -> Shard:
    return Shard(1 if parameter.ndim > 1 else 0)


def hsdp_tp(rank: int, world: int, directory: Path) -> None:
    """Replicate, shard and cut by TP on a 2 x 2 x 2 mesh, rows that do not divide; world size 8."""
    root = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model = nn.Sequential(
        OrderedDict(up=nn.Linear(7, 11), down=nn.Linear(11, 7), norm=nn.LayerNorm(7))
    )
    truth = copy_state(model)
    parallelize_module(model, root["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=root["replicate", "shard"])
    save_rank((rank, world, directory), model.state_dict(), truth)


def out_of_order(rank: int, world: int, directory: Path) -> None:
    """Shard over meshes whose ranks do not ascend, sizes that divide; world size 4.

    torch scatters and gathers by the sorted group: a rank holds the piece of its place there, not
    of its mesh coordinate.
    """
    line = DeviceMesh("cpu", [3, 1, 0, 2])
    grid = DeviceMesh("cpu", [[2, 3], [1, 0]])
    truth = OrderedDict(rows=torch.randn(16, 3), columns=torch.randn(3, 12), grid=torch.randn(6, 8))
    state = OrderedDict(
        rows=distribute_tensor(truth["rows"], line, [Shard(0)]),
        columns=distribute_tensor(truth["columns"], line, [Shard(1)]),
        grid=distribute_tensor(truth["grid"], grid, [Shard(0), Shard(1)]),
    )
    save_rank((rank, world, directory), state, truth)


def out_of_order_uneven(rank: int, world: int, directory: Path) -> None:
    """Shard over such a mesh where sizes do not divide; world size 4.

    torch takes the size of a piece from the coordinate and its content from the sorted group: rows
    are lost, and what lies in the file is no longer the tensor.
    """
    mesh = DeviceMesh("cpu", [3, 1, 0, 2])
    whole = torch.arange(13.0)
    state = {"rows": distribute_tensor(whole, mesh, [Shard(0)])}
    torch.save(state, rank_file(directory, world, rank))
    if rank == 0:
        torch.save({"rows": whole}, truth_file(directory))


def lone_strided(rank: int, world: int, directory: Path) -> None:
    """Shard with a `_StridedShard` that no later mesh dimension explains: disjoint segments."""
    mesh = init_device_mesh("cpu", (world,))
    placements: list[Placement] = [_StridedShard(0, split_factor=2)]
    truth = OrderedDict(even=torch.randn(4 * world, 3), copies=torch.randn(3))
    state = OrderedDict(
        even=distribute_tensor(truth["even"], mesh, placements, src_data_rank=None),
        copies=distribute_tensor(truth["copies"], mesh, [Replicate()]),
    )
    save_rank((rank, world, directory), state, truth)
