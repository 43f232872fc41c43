"""Models of transformers that start, sharded by FSDP2, from the files that were made of a model."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from oracle.writers.hub_models import full_state
from tiny_models import tiny_model

__all__ = ["start_dcp", "start_ranks"]


def start_ranks(rank: int, world: int, directory: Path) -> None:
    """Load the file of this rank in `resharded`, as verl does, and leave the whole model."""

    def load(model: nn.Module) -> None:
        path = directory / "resharded" / f"model_world_size_{world}_rank_{rank}.pt"
        model.load_state_dict(torch.load(path, weights_only=False))

    _start(rank, world, directory, load)


def start_dcp(rank: int, world: int, directory: Path) -> None:
    """Load the DCP directory `resharded`, and leave the whole model."""

    def load(model: nn.Module) -> None:
        weights = get_model_state_dict(model)
        state_dict_loader.load({"model": weights}, checkpoint_id=directory / "resharded")
        set_model_state_dict(model, weights)

    _start(rank, world, directory, load)


def _start(rank: int, world: int, directory: Path, load: Callable[[nn.Module], None]) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    model: nn.Module = tiny_model("llama", tie_word_embeddings=True)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    load(model)
    whole = full_state(model)
    if rank == 0:
        torch.save(whole, directory / "started.pt")
