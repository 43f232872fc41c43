"""Training with FSDP2 that is saved as verl saves it, and that goes on from such files."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

__all__ = ["resume_dcp", "resume_grid", "resume_line", "save_dcp", "train_line"]

BATCH = 12
_Parts = tuple[nn.Module, AdamW, LambdaLR]


class Uneven(nn.Module):
    """A small model: rows that do not divide, a scalar parameter, a frozen one, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 13)
        self.second = nn.Linear(13, 5, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("steps", torch.tensor(7))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        found: torch.Tensor = self.second(hidden) * self.scale
        return found


def train_line(rank: int, world: int, directory: Path) -> None:
    """Train, save the files of this rank, and what the model is after one more step."""
    parts = _parts(seed=1, mesh=(world,), names=("fsdp",))
    for step in range(3):
        _train(parts, step)
    name = f"world_size_{world}_rank_{rank}.pt"
    model, optimizer, scheduler = parts
    place = directory / "global_step_3" / "actor"
    place.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), place / f"model_{name}")
    torch.save(optimizer.state_dict(), place / f"optim_{name}")
    extra = {"lr_scheduler": scheduler.state_dict(), "rng": {"cpu": torch.get_rng_state()}}
    torch.save(extra, place / f"extra_state_{name}")
    _save_whole(rank, parts, directory / "before.pt")
    _train(parts, 3)
    _save_whole(rank, parts, directory / "after.pt")


def resume_line(rank: int, world: int, directory: Path) -> None:
    """Go on from the files of this rank in `resharded-W`, on a mesh of one dimension."""
    _resume(rank, world, directory, _parts(seed=2, mesh=(world,), names=("fsdp",)))


def resume_grid(rank: int, world: int, directory: Path) -> None:
    """Go on from the files of this rank in `resharded-W`, with replicas on two halves."""
    _resume(rank, world, directory, _parts(seed=2, mesh=(2, world // 2), names=("ddp", "fsdp")))


def save_dcp(rank: int, world: int, directory: Path) -> None:
    """Save the run of `train_line` as DCP, each rank from its own files, into `dcp`."""
    parts = _parts(seed=2, mesh=(world,), names=("fsdp",))
    model, optimizer, scheduler = parts
    _load_ranks(parts, directory / "global_step_3" / "actor", f"world_size_{world}_rank_{rank}.pt")
    weights, moments = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": moments, "lr_scheduler": scheduler.state_dict()}
    state_dict_saver.save(saved, checkpoint_id=directory / "dcp")


def resume_dcp(rank: int, world: int, directory: Path) -> None:
    """Go on from the DCP directory `resharded-dcp`, as torch's documentation shows it."""
    parts = _parts(seed=2, mesh=(world,), names=("fsdp",))
    model, optimizer, scheduler = parts
    weights, moments = get_state_dict(model, optimizer)
    schedule = scheduler.state_dict()
    saved = {"model": weights, "optimizer": moments, "lr_scheduler": schedule}
    state_dict_loader.load(saved, checkpoint_id=directory / "resharded-dcp")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    scheduler.load_state_dict(schedule)
    _go_on(rank, world, directory, parts)


def _resume(rank: int, world: int, directory: Path, parts: _Parts) -> None:
    _load_ranks(parts, directory / f"resharded-{world}", f"world_size_{world}_rank_{rank}.pt")
    _go_on(rank, world, directory, parts)


def _load_ranks(parts: _Parts, place: Path, name: str) -> None:
    model, optimizer, scheduler = parts

    def loaded(kind: str) -> Any:
        return torch.load(place / f"{kind}_{name}", weights_only=False)

    model.load_state_dict(loaded("model"))
    optimizer.load_state_dict(loaded("optim"))
    extra = loaded("extra_state")
    scheduler.load_state_dict(extra["lr_scheduler"])
    if "rng" in extra:
        torch.set_rng_state(extra["rng"]["cpu"])


def _go_on(rank: int, world: int, directory: Path, parts: _Parts) -> None:
    _save_whole(rank, parts, directory / f"resumed-{world}.pt")
    _train(parts, 3)
    _save_whole(rank, parts, directory / f"trained-{world}.pt")


def _parts(*, seed: int, mesh: tuple[int, ...], names: tuple[str, ...]) -> _Parts:
    torch.manual_seed(seed)
    model = Uneven()
    grid = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    fully_shard(model.first, mesh=grid)
    fully_shard(model, mesh=grid)
    matrices = [one for one in model.parameters() if one.ndim > 1]
    others = [one for one in model.parameters() if one.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=0.05, amsgrad=True)
    return model, optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def _train(parts: _Parts, step: int) -> None:
    """Train on a batch that is the same on every rank."""
    model, optimizer, scheduler = parts
    generator = torch.Generator().manual_seed(100 + step)
    inputs = torch.randn(BATCH, 6, generator=generator)
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


def _save_whole(rank: int, parts: _Parts, path: Path) -> None:
    """Save what the ranks have together: model, moments, and the rest of the state."""
    model, optimizer, scheduler = parts
    state = optimizer.state_dict()
    whole = {
        "model": {name: _whole(one) for name, one in model.state_dict().items()},
        "state": {
            number: {key: _whole(one) for key, one in fields.items()}
            for number, fields in state["state"].items()
        },
        "groups": state["param_groups"],
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
    }
    if rank == 0:
        torch.save(whole, path)


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value
