"""Scenarios of DCP directories without a model: every dtype and cut, nested cuts, strides."""

from collections import OrderedDict
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from oracle.writers.dcp_saving import save_dcp
from oracle.writers.tensor import DTYPES, random_values

__all__ = ["dcp_nested", "dcp_strides", "dcp_tensors"]

_State = OrderedDict[str, torch.Tensor]
_CUTS: dict[str, tuple[tuple[int, ...], Placement]] = {
    "rows": ((13, 5), Shard(0)),
    "columns": ((4, 11), Shard(1)),
    "middle": ((3, 10, 2), Shard(1)),
    "copies": ((3, 5), Replicate()),
    "scalar": ((), Replicate()),
    "empty": ((0, 4), Shard(0)),
    "empty_columns": ((4, 0), Shard(0)),
}
_NESTED: dict[str, tuple[tuple[int, ...], tuple[Placement, Placement]]] = {
    "twice": ((13, 3), (Shard(0), Shard(0))),
    "twice_columns": ((3, 7), (Shard(1), Shard(1))),
    "few": ((2, 3), (Shard(0), Shard(0))),
    "grid": ((7, 5), (Shard(0), Shard(1))),
    "grid_turned": ((7, 5), (Shard(1), Shard(0))),
    "middle_and_last": ((3, 5, 7), (Shard(2), Shard(1))),
    "copies_then_rows": ((7, 3), (Replicate(), Shard(0))),
    "columns_then_copies": ((3, 7), (Shard(1), Replicate())),
}


def dcp_tensors(rank: int, world: int, directory: Path) -> None:
    """Cut a tensor of every dtype in every way, and plain ones; any world size."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    truth, state = _State(), _State()
    for dtype in DTYPES:
        short = str(dtype).removeprefix("torch.")
        for cut, (shape, placement) in _CUTS.items():
            name = f"{short}.{cut}"
            truth[name] = random_values(dtype, shape)
            state[name] = distribute_tensor(truth[name], mesh, [placement], src_data_rank=None)
        truth[f"{short}.plain"] = state[f"{short}.plain"] = random_values(dtype, (2, 3))
    save_dcp((rank, world, directory), {"model": state}, truth, stored="model.{}".format)


def dcp_nested(rank: int, world: int, directory: Path) -> None:
    """Cut over a mesh of two dimensions, one or two of the tensor's; world size 4."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    truth, state = _State(), _State()
    for name, (shape, placements) in _NESTED.items():
        truth[name] = torch.randn(shape)
        state[name] = distribute_tensor(truth[name], mesh, placements, src_data_rank=None)
    save_dcp((rank, world, directory), {"model": state}, truth, stored="model.{}".format)


def dcp_strides(rank: int, world: int, directory: Path) -> None:
    """Save tensors whose elements are not in row-major order; any world size.

    `transposed` and `channels_last` are such themselves, `window` and `column` lie in a larger
    storage; `plain_*` are the same without DTensor. torch keeps strides, not surroundings.
    """
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    whole = _State(
        transposed=torch.randn(6, 13).t(),
        channels_last=torch.randn(7, 3, 2, 4).to(memory_format=torch.channels_last),
        window=torch.randn(15, 9)[2:13, 1:7],
        column=torch.randn(11, 4)[:, 2],
    )
    state, truth = _State(), _State()
    for name, tensor in whole.items():
        length = -(-len(tensor) // world)
        piece = tensor[rank * length : (rank + 1) * length]
        truth[name] = truth[f"plain_{name}"] = tensor
        state[f"plain_{name}"] = tensor
        state[name] = DTensor.from_local(
            piece, mesh, [Shard(0)], shape=tensor.shape, stride=tensor.stride()
        )
    save_dcp((rank, world, directory), {"model": state}, truth, stored="model.{}".format)
