"""Scenarios of a real `Accelerator` with FSDP on the CPU: `save_state` and `save_fsdp_model`.

accelerate offers FSDP on accelerators only: its state is told that the CPU, over gloo, is one. What
shards, trains and saves is accelerate's own. The truth is the model after one step of training.
"""

import os
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    merge_fsdp_weights,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from oracle.writers.hub_models import full_state, leave_logits, shards_state
from oracle.writers.saving import leave_truth
from tiny_models import tiny_model, with_adapter

__all__ = [
    "accelerate_bins_fsdp1",
    "accelerate_bins_fsdp2",
    "accelerate_fsdp1",
    "accelerate_fsdp2",
    "accelerate_full",
    "accelerate_load",
    "accelerate_local",
    "accelerate_lora",
    "accelerate_merge",
    "accelerate_runs",
    "launched",
]

_Place = tuple[int, int, Path]
_Parts = tuple[Accelerator, nn.Module, Optimizer]


def accelerate_fsdp1(rank: int, world: int, directory: Path) -> None:
    """Save ShardedTensors of FSDP1 with DCP into `step_1`; any world size."""
    _save_state((rank, world, directory), "step_1", version=1, kind="SHARDED_STATE_DICT")


def accelerate_fsdp2(rank: int, world: int, directory: Path) -> None:
    """Save DTensors of FSDP2 with DCP into `checkpoint_1`; any world size."""
    _save_state((rank, world, directory), "checkpoint_1", version=2, kind="SHARDED_STATE_DICT")


def accelerate_lora(rank: int, world: int, directory: Path) -> None:
    """Save a model of peft and FSDP2 as `accelerate_fsdp2` saves one; any world size."""
    model = with_adapter(tiny_model("llama"))
    _save_state((rank, world, directory), "checkpoint_1", version=2, model=model)


def accelerate_full(rank: int, world: int, directory: Path) -> None:
    """Save the whole model of FSDP2 from rank 0 into `step_1`; any world size.

    FSDP1 frees its parameters when it gathers them on the CPU: it cannot be tried.
    """
    _save_state((rank, world, directory), "step_1", version=2, kind="FULL_STATE_DICT")


def accelerate_local(rank: int, world: int, directory: Path) -> None:
    """Save flat parameters of FSDP1, whose shapes no file tells; any world size."""
    _save_state((rank, world, directory), "step_1", version=1, kind="LOCAL_STATE_DICT")


def accelerate_bins_fsdp1(rank: int, world: int, directory: Path) -> None:
    """Save ShardedTensors of FSDP1, a file per rank, without DCP; any world size."""
    _save_bins((rank, world, directory), version=1)


def accelerate_bins_fsdp2(rank: int, world: int, directory: Path) -> None:
    """Save DTensors of FSDP2, a file per rank, without DCP; any world size."""
    _save_bins((rank, world, directory), version=2)


def accelerate_load(rank: int, world: int, directory: Path) -> None:
    """Load `resharded` by `load_state` into another state, and leave what it is then."""
    with launched(rank, world):
        accelerator, model, optimizer = _trained(2, "SHARDED_STATE_DICT")
        optimizer.step()  # without gradients, so that only the number of steps differs
        for one in model.parameters():
            one.data.zero_()
        accelerator.load_state(str(directory / "resharded"))
        whole = StateDictOptions(full_state_dict=True)
        found = {
            "model": full_state(model),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=whole),
            "scheduler": accelerator._schedulers[0].state_dict(),
            "rng": torch.get_rng_state(),
        }
        torch.save(found, directory / f"loaded-{rank}.pt")


def accelerate_merge(rank: int, world: int, directory: Path) -> None:
    """Merge a DCP directory with accelerate's own tool, into `accelerate` next to it."""
    with launched(rank, world):
        merge_fsdp_weights(str(directory), str(directory.parent / "accelerate"))


def accelerate_runs(rank: int, world: int, directory: Path, *, code: str) -> None:
    """Train with FSDP2, and run a page's code in a directory; any world size."""
    with launched(rank, world), chdir(directory):
        accelerator, model, _ = _trained(2, "SHARDED_STATE_DICT")
        exec(code, {"accelerator": accelerator})  # noqa: S102
        leave_truth((rank, world, directory), full_state(model))


@contextmanager
def launched(rank: int, world: int) -> Iterator[None]:
    """Be a process that `accelerate launch` started, on a CPU that counts as an accelerator."""
    before = dict(os.environ)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        ACCELERATE_TORCH_DEVICE="cpu",  # not cpu:0, which FSDP1 takes for another device
        OMP_NUM_THREADS="1",
    )
    try:
        _forget()
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
        yield
    finally:
        _forget()
        os.environ.clear()
        os.environ.update(before)


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _save_state(
    place: _Place,
    name: str,
    *,
    version: int,
    kind: str = "SHARDED_STATE_DICT",
    model: nn.Module | None = None,
) -> None:
    rank, world, directory = place
    with launched(rank, world):
        accelerator, model, _ = _trained(version, kind, model)
        accelerator.save_state(str(directory / name))
        leave_logits(place, model)
        leave_truth(place, _whole(model, version))


def _save_bins(place: _Place, *, version: int) -> None:
    rank, world, directory = place
    output = str(directory / "step_1")
    with launched(rank, world):
        accelerator, model, optimizer = _trained(version, "SHARDED_STATE_DICT")
        plugin = accelerator.state.fsdp_plugin
        save_fsdp_model(plugin, accelerator, model, output, use_dcp=False)
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, output, use_dcp=False)
        leave_truth(place, _whole(model, version))


def _whole(model: nn.Module, version: int) -> dict[str, torch.Tensor]:
    return full_state(model) if version == 2 else shards_state(model)


def _trained(version: int, kind: str, model: nn.Module | None = None) -> _Parts:
    """Let accelerate shard a model, by default a Llama, and train it for one step."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        state_dict_type=kind,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = model or tiny_model("llama")
    if version == 1:  # its parameters are others once it is wrapped
        model = accelerator.prepare(model)
    optimizer: Optimizer = AdamW(model.parameters(), lr=0.01)
    scheduler = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    if version == 1:
        optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    else:
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    ids = torch.arange(16).reshape(2, 8)
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return accelerator, model, optimizer
