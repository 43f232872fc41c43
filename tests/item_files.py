"""Write what torch_checkpointing 0.1.1 writes: a file per item and rank, and `metadata.pkl`.

Its own files are in `tests/data`; these are for models that are not there.
"""

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from ranks import as_rank, shard

__all__ = ["save_item", "save_item_files", "stated_metadata"]


def save_item(
    directory: Path, state: Mapping[str, object], rank: int, *, suffix: str = ".pt"
) -> None:
    """Save this rank's file of the item `model`, and on rank 0 the metadata."""
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    path = directory / f"model_{rank}{suffix}"
    if suffix == ".pt":
        torch.save(state, path)
    else:
        save_file({name: local(tensor) for name, tensor in tensors.items()}, path)
    if rank == 0:
        metadata = stated_metadata(tensors, dist.get_world_size(), suffix)
        (directory / "metadata.pkl").write_bytes(pickle.dumps(metadata))


def save_item_files(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    world: int,
    *,
    suffix: str = ".pt",
    mesh_shape: Sequence[int] | None = None,
    placements: Sequence[Placement] | None = None,
) -> None:
    """Save `tensors`, sharded, as all ranks do, with the items `optimizer` and `train_state`."""
    directory.mkdir(parents=True, exist_ok=True)
    for rank in range(world):
        with as_rank(rank, world):
            shape = tuple(mesh_shape or (world,))
            names = tuple(f"dim_{number}" for number in range(len(shape)))
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            state = {name: shard(one, mesh, placements) for name, one in tensors.items()}
            save_item(directory, state, rank, suffix=suffix)
        moments = {number: {"exp_avg": torch.ones(3)} for number in range(len(tensors))}
        torch.save({"state": moments}, directory / f"optimizer_{rank}.pt")
        torch.save({"step": 5}, directory / f"train_state_{rank}.pt")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a rank stores of a tensor."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach().clone().contiguous()


def stated_metadata(
    tensors: Mapping[str, torch.Tensor], world: int, suffix: str = ".pt"
) -> dict[str, Any]:
    """Return the metadata of the item `model`, as rank 0 sees its tensors."""
    layouts = {
        rank: {
            "file_path": f"model_{rank}{suffix}",
            "serialization_format": {"type": "SafetensorsSerialization"},
        }
        for rank in range(world)
    }
    stated = {json.dumps([name]): [_group(one, world)] for name, one in tensors.items()}
    item = {
        "nested_path_to_metadata": stated,
        "rank_to_layout_info": layouts if suffix != ".pt" else dict.fromkeys(range(world)),
    }
    return {"metadata": {"model": item}, "world_size": world, "version": "2.0"}


def _group(tensor: torch.Tensor, world: int) -> dict[str, Any]:
    mesh_shape: tuple[int, ...] = (world,)
    ranks, names = tuple(range(world)), None
    placements = [{"type": "Replicate"}]
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        mesh_shape, ranks = tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist())
        names = mesh.mesh_dim_names
        placements = [_placement(one) for one in tensor.placements]
    data = {
        "global_shape": list(tensor.shape),
        "dtype": str(tensor.dtype),
        "stride": list(tensor.stride()),
        "mesh_spec": {
            "device_type": "cpu",
            "mesh_shape": mesh_shape,
            "mesh_data": ranks,
            "mesh_dim_names": names,
        },
        "placements": placements,
    }
    sharding = {"type": "DTensorShardingMetadata", "data": data}
    return {"sharding_metadata": sharding, "ranks": ranks}


def _placement(placement: Placement) -> dict[str, Any]:
    dim = getattr(placement, "dim", None)
    return {"type": "Replicate"} if dim is None else {"type": "Shard", "dim": dim}
