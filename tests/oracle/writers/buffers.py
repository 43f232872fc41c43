"""Models whose buffers differ between ranks, as training leaves them: FSDP2, and FSDP1.

The truth is what torch itself gathers: rank 0's full state dict.
"""

import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.ao.quantization import (
    FakeQuantize,
    HistogramObserver,
    MovingAveragePerChannelMinMaxObserver,
)
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations, spectral_norm
from torch.optim import Optimizer

from oracle.writers.hub_models import full_state
from oracle.writers.saving import gather, leave_truth, rank_file

__all__ = ["HIDDEN", "fsdp1_statistics", "ignored", "ignored_named", "statistics"]

HIDDEN = 6
observed: Any = FakeQuantize  # which torch declares without types


class Codebook(nn.Module):
    """A codebook that exponential averages move, as the codecs of transformers and others do."""

    initted: torch.Tensor
    cluster_size: torch.Tensor
    embed: torch.Tensor
    embed_avg: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("initted", torch.zeros(1))
        self.register_buffer("cluster_size", torch.zeros(4))
        self.register_buffer("embed", torch.randn(4, HIDDEN))
        self.register_buffer("embed_avg", torch.randn(4, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            near = torch.cdist(x, self.embed).argmin(1)
            chosen = nn.functional.one_hot(near, 4).float()
            self.initted.fill_(1 + dist.get_rank())
            self.cluster_size.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.embed_avg.mul_(0.9).add_(chosen.t() @ x, alpha=0.1)
            self.embed.copy_(self.embed_avg / (self.cluster_size[:, None] + 1e-2))
        return x + self.embed[near]


class Counted(nn.Module):
    """A layer with counters, and the largest input so far, as a quantiser has it."""

    steps: torch.Tensor
    seen: torch.Tensor
    mean_norm: torch.Tensor
    input_amax: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("mean_norm", torch.tensor(0.0))
        self.register_buffer("input_amax", torch.zeros(HIDDEN))
        self.register_buffer("inv_freq", torch.arange(5.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.steps += 1 + dist.get_rank()
            self.seen += len(x) * (1 + dist.get_rank())
            self.mean_norm.copy_(x.norm())
            self.input_amax.copy_(x.abs().amax(0))
        out: torch.Tensor = self.linear(x)
        return out


def trainable() -> nn.Sequential:
    """Return a model with every kind of buffer; ranks have the same parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's older APIs are deprecated
        model = nn.Sequential(
            OrderedDict(
                first=nn.Linear(HIDDEN, HIDDEN),
                norm=nn.BatchNorm1d(HIDDEN),
                bare=nn.BatchNorm1d(HIDDEN, affine=False),
                fake=observed(observer=MovingAveragePerChannelMinMaxObserver, ch_axis=1),
                histogram=HistogramObserver(),
                codebook=Codebook(),
                counted=Counted(),
                old=nn.Linear(HIDDEN, HIDDEN),
                new=nn.Linear(HIDDEN, HIDDEN),
            )
        )
        torch.manual_seed(100 + dist.get_rank())  # vectors of spectral norm begin at random
        spectral_norm(model.get_submodule("old"))
        parametrizations.spectral_norm(model.get_submodule("new"))
    return model


def _train(model: nn.Module, optimizer: Optimizer) -> None:
    torch.manual_seed(200 + dist.get_rank())
    for _ in range(2):
        model(torch.randn(5, HIDDEN)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _save(
    place: tuple[int, int, Path], model: nn.Module, optimizer: dict[str, object] | None
) -> None:
    rank, world, directory = place
    state = model.state_dict()
    torch.save(state, rank_file(directory, world, rank))
    if optimizer is not None:
        torch.save(optimizer, directory / f"optim_world_size_{world}_rank_{rank}.pt")
    if isinstance(model, FullyShardedDataParallel):  # which cannot gather on the CPU
        pairs = state.items()
        leave_truth(place, {n: gather(v) if isinstance(v, DTensor) else v for n, v in pairs})
    else:
        leave_truth(place, full_state(model))


def statistics(rank: int, world: int, directory: Path) -> None:
    """Train with FSDP2, and save the model and, as verl does, the optimizer's numbered state."""
    model = trainable()
    for layer in ("first", "counted"):
        fully_shard(model.get_submodule(layer), mesh=init_device_mesh("cpu", (world,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _train(model, optimizer)
    _save((rank, world, directory), model, optimizer.state_dict())


def fsdp1_statistics(rank: int, world: int, directory: Path) -> None:
    """Train with FSDP1, whose optimizer has parts of flat parameters, some as long as a buffer."""
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN))
    sharded = FullyShardedDataParallel(
        model,
        device_id=torch.device("cpu"),
        device_mesh=init_device_mesh("cpu", (world,)),
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    _train(sharded, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        FullyShardedDataParallel.set_state_dict_type(
            sharded, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=True)
        )
        _save((rank, world, directory), sharded, optimizer.state_dict())


class Ignoring(nn.Module):
    """A model with parameters that FSDP ignores, which every rank trains by itself.

    One is a scalar, which FSDP2 cannot shard; one is called as a buffer is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.running_gain = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.linear(x)) * self.logit_scale * self.running_gain.sum()
        return out


def _ignored(world: int) -> tuple[nn.Module, Optimizer]:
    model = Ignoring()
    own = {model.logit_scale, model.running_gain}
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)), ignored_params=own)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 * (1 + dist.get_rank()))
    _train(model, optimizer)
    return model, optimizer


def ignored(rank: int, world: int, directory: Path) -> None:
    """Save parameters that FSDP2 ignores, and the optimizer's state by number."""
    model, optimizer = _ignored(world)
    _save((rank, world, directory), model, optimizer.state_dict())


def ignored_named(rank: int, world: int, directory: Path) -> None:
    """Save parameters that FSDP2 ignores, and the optimizer's state by name."""
    model, optimizer = _ignored(world)
    state = get_optimizer_state_dict(model, optimizer)
    _save((rank, world, directory), model, dict(state))
