"""Train a model, and save its optimizer in every way, with the truth of torch's own next to it.

`truth-NAME.pt` are the whole tensors that `get_optimizer_state_dict(full_state_dict=True)` returns,
by the names that unshard gives them, those of a flattened state dict. The optimizers, by NAME:

* all: AdamW on `model.parameters()`, frozen ones too, as verl and lmms-engine make it;
* grouped: AdamW with amsgrad, two groups by weight decay, without what is frozen;
* momentum: SGD on what is trained.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.optim import SGD, AdamW, Optimizer

from oracle.writers.dcp_saving import dcp_writer
from oracle.writers.saving import accelerate_rank_file, rank_file

__all__ = ["STEPS", "fsdp1_optimizers", "fsdp2_optimizers", "hybrid_optimizers"]

STEPS = 3


class Layer(nn.Module):
    """Matrices and vectors, two of each shape, whose sizes no world size divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(10, 13)
        self.down = nn.Linear(13, 10)
        self.norm = nn.RMSNorm(10)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(hidden + self.down(self.up(hidden).tanh()))
        return found


class Trained(nn.Module):
    """Two layers, tied weights, a frozen matrix, a buffer, and one tensor of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 10)
        self.frozen = nn.Linear(10, 10, bias=False).requires_grad_(requires_grad=False)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.scale = nn.Parameter(torch.tensor([0.5]))
        self.head = nn.Linear(10, 37, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("frequencies", torch.logspace(0, -4, 5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.embed(ids))
        for layer in self.layers:
            hidden = layer(hidden)
        found: torch.Tensor = self.head(hidden * self.scale)
        return found


def fsdp2_optimizers(rank: int, world: int, directory: Path) -> None:
    """Save what FSDP2 on a mesh of one dimension trains; any world size."""
    _save_fsdp2((rank, world, directory), (world,), ("fsdp",))


def hybrid_optimizers(rank: int, world: int, directory: Path) -> None:
    """Save what FSDP2 trains that replicates the shards (HSDP), 2 x 2; world size 4."""
    _save_fsdp2((rank, world, directory), (2, 2), ("ddp", "fsdp"))


def _save_fsdp2(
    place: tuple[int, int, Path], mesh_shape: tuple[int, ...], mesh_names: tuple[str, ...]
) -> None:
    rank, world, directory = place
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=mesh_names)
    model = Trained()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    every = AdamW(model.parameters(), lr=0.01)
    _train(model, every)
    _leave_truth(rank, directory / "truth-all.pt", model, every)
    verl = directory / "verl" / "global_step_3" / "actor"
    verl.mkdir(parents=True, exist_ok=True)
    name = f"world_size_{world}_rank_{rank}.pt"
    torch.save(model.state_dict(), rank_file(verl, world, rank))
    torch.save(every.state_dict(), verl / f"optim_{name}")
    named = get_optimizer_state_dict(model, every)
    for folder, saved in (
        ("named", named),
        ("flattened", _flattened(model, every)),
        ("unnamed", _reordered(every.state_dict())),
    ):
        (directory / folder).mkdir(exist_ok=True)
        torch.save(model.state_dict(), rank_file(directory / folder, world, rank))
        torch.save(saved, directory / folder / f"optim_{name}")
    weights = get_model_state_dict(model)
    both = {"model": weights, "optimizer": named}
    _save_dcp(directory / "dcp", both)
    _save_dcp(directory / "dcp-zstd", both, _extensions=[ZStandard()])
    _save_dcp(directory / "accelerate" / "pytorch_model_fsdp_0", {"model": weights})
    _save_dcp(directory / "accelerate" / "optimizer_0", {"optimizer": named})
    flat = {**weights, "optimizer": _flattened(model, every), "train_state": {"step": 3}}
    _save_dcp(directory / "titan", flat)

    grouped = AdamW(_groups(model), lr=0.02, amsgrad=True)
    _train(model, grouped)
    _leave_truth(rank, directory / "truth-grouped.pt", model, grouped)
    lmms = directory / "lmms" / "checkpoint-3"
    for folder in ("pytorch_model_fsdp_0", "optimizer"):
        (lmms / folder).mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), rank_file(lmms / "pytorch_model_fsdp_0", world, rank))
    torch.save(grouped.state_dict(), lmms / "optimizer" / f"optimizer_{name}")
    trained = [one for one in model.named_parameters() if one[1].requires_grad]
    momentum = SGD(trained, lr=0.1, momentum=0.9)
    _train(model, momentum)
    _leave_truth(rank, directory / "truth-momentum.pt", model, momentum)
    (directory / "momentum").mkdir(exist_ok=True)
    torch.save(model.state_dict(), rank_file(directory / "momentum", world, rank))
    torch.save(momentum.state_dict(), directory / "momentum" / f"optim_{name}")


def fsdp1_optimizers(rank: int, world: int, directory: Path) -> None:
    """Save what FSDP1 trains, by names as accelerate does, and by numbers; any world size."""
    model = FullyShardedDataParallel(Trained(), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = AdamW(model.parameters(), lr=0.01)
    _train(model, optimizer)
    _leave_truth(rank, directory / "truth-all.pt", model, optimizer)
    FullyShardedDataParallel.set_state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(),
        ShardedOptimStateDictConfig(),
    )
    saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    bins, numbered = directory / "bins", directory / "numbered"
    for folder in (bins, numbered):
        folder.mkdir(exist_ok=True)
    torch.save(model.state_dict(), accelerate_rank_file(bins, rank))
    torch.save(saved, bins / f"optimizer_0_rank{rank}.bin")
    torch.save(model.state_dict(), rank_file(numbered, world, rank))
    torch.save(optimizer.state_dict(), numbered / f"optim_world_size_{world}_rank_{rank}.pt")
    _save_dcp(directory / "dcp", {"model": model.state_dict(), "optimizer": saved})


def _train(model: nn.Module, optimizer: Optimizer) -> None:
    for _ in range(STEPS):
        ids = torch.randint(37, (2, 8))
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()


def _groups(model: nn.Module) -> Iterable[dict[str, Any]]:
    """Yield two groups, as HF's Trainer makes them: with and without weight decay."""
    trained = [one for one in model.parameters() if one.requires_grad]
    yield {"params": [one for one in trained if one.ndim > 1], "weight_decay": 0.1}
    yield {"params": [one for one in trained if one.ndim <= 1], "weight_decay": 0.0}


def _leave_truth(rank: int, path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Write the whole state of an optimizer, as torch gathers it, on rank 0."""
    options = StateDictOptions(
        full_state_dict=True
    )  # with cpu_offload, those of FSDP1 are mixed up
    whole: dict[str, Any] = dict(get_optimizer_state_dict(model, optimizer, options=options))
    if rank == 0:
        torch.save(
            {
                f"state.{name}.{key}": tensor.clone()
                for name, fields in whole["state"].items()
                for key, tensor in fields.items()
                if tensor is not None
            },
            path,
        )


def _flattened(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return dict(get_optimizer_state_dict(model, optimizer, options=options))


def _reordered(saved: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict in which a vector is a group of its own, next to one of its shape."""
    alone = next(n for n, one in saved["state"].items() if tuple(one["exp_avg"].shape) == (10,))
    (group,) = saved["param_groups"]
    rest = [number for number in group["params"] if number != alone]
    groups = [{**group, "params": [alone]}, {**group, "params": rest}]
    return {"state": saved["state"], "param_groups": groups}


def _save_dcp(directory: Path, state: dict[str, Any], **options: Any) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    state_dict_saver.save(state, storage_writer=dcp_writer(directory, **options))
