"""Training with FSDP2 that is saved as verl saves it, and that goes on from such files."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

__all__ = [
    "MODELS",
    "Parts",
    "Run",
    "parts_of",
    "resume",
    "resume_dcp",
    "save_dcp",
    "save_whole",
    "train",
    "train_step",
]

BATCH = 12
Parts = tuple[nn.Module, AdamW, LambdaLR]


@dataclass(frozen=True, slots=True)
class Run:
    """A model, one of `MODELS`, and the mesh that it is trained on."""

    kind: str
    mesh: tuple[int, ...]
    names: tuple[str, ...]


class Uneven(nn.Module):
    """A small model: rows that do not divide, a parameter of one element, a buffer."""

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.second = nn.Linear(width, 5, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("steps", torch.tensor(7))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        found: torch.Tensor = self.second(hidden) * self.scale
        return found


class Partly(nn.Module):
    """A model of which only a part is trained: equal layers, the middle one frozen; tied ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 11, bias=False)
        self.back = nn.Linear(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.last = nn.Linear(6, 11, bias=False)
        self.last.weight = self.first.weight
        self.layers[1].requires_grad_(requires_grad=False)
        self.back.bias.requires_grad = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.back(self.first(inputs)))
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        found: torch.Tensor = self.last(hidden)
        return found


def _uneven(grid: DeviceMesh) -> tuple[nn.Module, list[nn.Parameter]]:
    model = Uneven()
    fully_shard(model.first, mesh=grid)
    fully_shard(model, mesh=grid)
    return model, list(model.parameters())


def _partly(grid: DeviceMesh) -> tuple[nn.Module, list[nn.Parameter]]:
    model = Partly()
    fully_shard(model, mesh=grid)
    return model, list(model.parameters())


def _trainable(grid: DeviceMesh) -> tuple[nn.Module, list[nn.Parameter]]:
    model, parameters = _partly(grid)
    return model, [one for one in parameters if one.requires_grad]


def _alone(grid: DeviceMesh) -> tuple[nn.Module, list[nn.Parameter]]:
    """Return a model of FSDP1 on one rank, which does not shard it, and of FSDP2 on several."""
    if grid.size() > 1:
        return _uneven(grid)
    cpu = torch.device("cpu")
    model = FullyShardedDataParallel(Uneven(), use_orig_params=True, device_id=cpu)
    return model, list(model.parameters())


def _tensor_parallel(grid: DeviceMesh) -> tuple[nn.Module, list[nn.Parameter]]:
    model = Uneven(14)  # divided by the ranks of "tp", which torch needs, but not by all four
    if "tp" in (grid.mesh_dim_names or ()):
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        parallelize_module(model, grid["tp"], plan)
        grid = grid["fsdp"]
    fully_shard(model.first, mesh=grid)
    fully_shard(model.second, mesh=grid)
    return model, list(model.parameters())


MODELS: dict[str, Callable[[DeviceMesh], tuple[nn.Module, list[nn.Parameter]]]] = {
    "uneven": _uneven,
    "frozen, all given": _partly,
    "frozen, not given": _trainable,
    "FSDP1 alone": _alone,
    "tensor parallel": _tensor_parallel,
}
"""What makes a model on a mesh, and the parameters that its optimizer is given."""


def train(rank: int, world: int, directory: Path, *, run: Run) -> None:
    """Train, save the files of this rank, and what the model is after one more step."""
    parts = parts_of(run, seed=1)
    for step in range(3):
        train_step(parts, step)
    name = f"world_size_{world}_rank_{rank}.pt"
    model, optimizer, scheduler = parts
    place = directory / "global_step_3" / "actor"
    place.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), place / f"model_{name}")
    torch.save(optimizer.state_dict(), place / f"optim_{name}")
    extra = {"lr_scheduler": scheduler.state_dict(), "rng": {"cpu": torch.get_rng_state()}}
    torch.save(extra, place / f"extra_state_{name}")
    save_whole(rank, parts, directory / "before.pt")
    train_step(parts, 3)
    save_whole(rank, parts, directory / "after.pt")


def resume(rank: int, world: int, directory: Path, *, run: Run) -> None:
    """Go on from the files of this rank in `resharded-W`, and save what was loaded, and trained."""
    parts = parts_of(run, seed=2)
    _load_ranks(parts, directory / f"resharded-{world}", f"world_size_{world}_rank_{rank}.pt")
    _go_on(rank, world, directory, parts)


def save_dcp(rank: int, world: int, directory: Path, *, run: Run) -> None:
    """Save the run of `train` as DCP, each rank from its own files, into `dcp`."""
    parts = parts_of(run, seed=2)
    model, optimizer, scheduler = parts
    _load_ranks(parts, directory / "global_step_3" / "actor", f"world_size_{world}_rank_{rank}.pt")
    weights, moments = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": moments, "lr_scheduler": scheduler.state_dict()}
    state_dict_saver.save(saved, checkpoint_id=directory / "dcp")


def resume_dcp(rank: int, world: int, directory: Path, *, run: Run) -> None:
    """Go on from the DCP directory `resharded-dcp`, as torch's documentation shows it."""
    parts = parts_of(run, seed=2)
    model, optimizer, scheduler = parts
    weights, moments = get_state_dict(model, optimizer)
    schedule = scheduler.state_dict()
    saved = {"model": weights, "optimizer": moments, "lr_scheduler": schedule}
    state_dict_loader.load(saved, checkpoint_id=directory / "resharded-dcp")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    scheduler.load_state_dict(schedule)
    _go_on(rank, world, directory, parts)


def _load_ranks(parts: Parts, place: Path, name: str) -> None:
    model, optimizer, scheduler = parts

    def loaded(kind: str) -> Any:
        return torch.load(place / f"{kind}_{name}", weights_only=False)

    model.load_state_dict(loaded("model"))
    optimizer.load_state_dict(loaded("optim"))
    extra = loaded("extra_state")
    scheduler.load_state_dict(extra["lr_scheduler"])
    if "rng" in extra:
        torch.set_rng_state(extra["rng"]["cpu"])


def _go_on(rank: int, world: int, directory: Path, parts: Parts) -> None:
    save_whole(rank, parts, directory / f"resumed-{world}.pt")
    train_step(parts, 3)
    save_whole(rank, parts, directory / f"trained-{world}.pt")


def parts_of(run: Run, *, seed: int) -> Parts:
    torch.manual_seed(seed)
    model, given = MODELS[run.kind](init_device_mesh("cpu", run.mesh, mesh_dim_names=run.names))
    matrices = [one for one in given if one.ndim > 1]
    others = [one for one in given if one.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=0.05, amsgrad=True)
    return model, optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def train_step(parts: Parts, step: int) -> None:
    """Train on a batch that is the same on every rank."""
    model, optimizer, scheduler = parts
    generator = torch.Generator().manual_seed(100 + step)
    inputs = torch.randn(BATCH, 6, generator=generator)
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


def save_whole(rank: int, parts: Parts, path: Path) -> None:
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
