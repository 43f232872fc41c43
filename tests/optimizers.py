"""Write the state of an optimizer as verl saves it, with real torch, in one process."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh

from ranks import Tensors, as_rank, shard

__all__ = ["KEYS", "like", "save_optimizer"]

KEYS = ("exp_avg", "exp_avg_sq")


def like(tensors: Tensors, seed: int) -> dict[str, torch.Tensor]:
    """Return moments for some tensors."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(one.shape, generator=generator) for name, one in tensors.items()}


def save_optimizer(
    directory: Path,
    moments: Mapping[str, Tensors],
    world: int,
    *,
    group: Mapping[str, object] | None = None,
    extra: Mapping[str, object] | None = None,
) -> None:
    """Save what AdamW saves after 7 steps, for tensors by key; `extra` is in every state."""
    names = list(next(iter(moments.values())))
    for rank in range(world):
        with as_rank(rank, world):
            mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
            state = {
                number: {
                    "step": torch.tensor(7.0),
                    **{key: shard(own[name], mesh, None) for key, own in moments.items()},
                    **(extra or {}),
                }
                for number, name in enumerate(names)
            }
            groups = [{"lr": 0.1, **(group or {}), "params": list(range(len(names)))}]
            saved = {"state": state, "param_groups": groups}
            torch.save(saved, directory / f"optim_world_size_{world}_rank_{rank}.pt")
