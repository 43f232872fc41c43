"""Experts that every group of ranks saved under the same names, as verl's VeOmni engine does.

The files are real: in each expert group the local experts are a DTensor on a mesh of that group's
ranks, whose shape says nothing of the other groups.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ranks import as_rank, rank_path, shard, some_tensors

__all__ = ["BLOCKS", "EXPERTS", "INTERLEAVED", "Groups", "save_experts", "truth"]

INTERLEAVED = ((0, 2), (1, 3))
BLOCKS = ((0, 1), (2, 3))
EXPERTS = ("layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj")
Groups = Sequence[Sequence[int]]


def save_experts(
    directory: Path,
    experts: dict[str, torch.Tensor],
    groups: Groups,
    *,
    whole: bool = False,
    replicas: int = 1,
) -> Path:
    """Save tensors of 4 ranks: `experts` in equal parts of dimension 0 by group, others by all.

    Within a group, a part is a DTensor of its own shape, sharded along dimension 1 on the mesh of
    the group. `whole`: every group holds all of a tensor, which is an honest copy. `replicas`: of
    the other tensors (HSDP).
    """
    directory.mkdir(parents=True)
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = init_device_mesh(
                "cpu", (replicas, 4 // replicas), mesh_dim_names=("ddp", "fsdp")
            )
            number = next(n for n, ranks in enumerate(groups) if rank in ranks)
            inner = DeviceMesh(
                "cpu", list(groups[number]), mesh_dim_names=("ep_fsdp",), _init_backend=False
            )
            state = {name: shard(value, mesh, None) for name, value in some_tensors().items()}
            for name, value in experts.items():
                part = value if whole else value.chunk(len(groups))[number]
                state[name] = on_submesh(part, inner, groups[number].index(rank))
            torch.save(state, rank_path(directory, 4, rank))
    return directory


def on_submesh(value: torch.Tensor, mesh: DeviceMesh, at: int) -> DTensor:
    """Return the DTensor that FSDP makes of a part along dimension 1, here at place `at`."""
    pieces = list(value.chunk(mesh.size(), dim=1))
    pieces += [value[:, :0]] * (mesh.size() - len(pieces))
    return DTensor.from_local(
        pieces[at].contiguous().clone(),
        mesh,
        [Shard(1)],
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def truth(seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        EXPERTS[0]: torch.randn(4, 6, 5, generator=generator),
        EXPERTS[1]: torch.randn(4, 5, 3, generator=generator).bfloat16(),
    }
