"""Scenarios of FSDP1 without a device mesh: ShardedTensors, in rank files and in DCP directories.

The truth is what the model held before it was wrapped.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed._shard.api import load_with_process_group
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictType,
)

from oracle.writers.dcp import sharded_mixed
from oracle.writers.dcp_saving import check_loads, dcp_writer, save_dcp
from oracle.writers.model import Mixed
from oracle.writers.saving import (
    accelerate_rank_file,
    copy_state,
    equal_bits,
    leave_truth,
    rank_file,
    save_rank,
)

__all__ = [
    "dcp_fsdp1",
    "dcp_full",
    "fsdp1_flat_sharded",
    "fsdp1_hybrid_no_mesh",
    "fsdp1_local",
    "fsdp1_local_flat",
    "fsdp1_sharded",
    "fsdp1_sharded_bin",
    "fsdp2_bin",
]

_Tensors = OrderedDict[str, torch.Tensor]
_Piece = tuple[list[int], torch.Tensor]


def fsdp1_sharded(rank: int, world: int, directory: Path) -> None:
    """Save ShardedTensors of a model that keeps its parameters; any world size."""
    state, truth = _sharded_state(use_orig_params=True)
    _save_sharded((rank, world, directory), rank_file(directory, world, rank), state, truth)


def fsdp1_flat_sharded(rank: int, world: int, directory: Path) -> None:
    """Save ShardedTensors of a model of flat parameters; any world size."""
    state, truth = _sharded_state(use_orig_params=False)
    _save_sharded((rank, world, directory), rank_file(directory, world, rank), state, truth)


def fsdp1_hybrid_no_mesh(rank: int, world: int, directory: Path) -> None:
    """Shard within groups of two and replicate between them, without a mesh; world size 4."""
    within = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    state, truth = _sharded_state(
        use_orig_params=True,
        process_group=(within, between),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    )
    path = rank_file(directory, world, rank)
    _save_sharded((rank, world, directory), path, state, truth, group=within)


def fsdp1_sharded_bin(rank: int, world: int, directory: Path) -> None:
    """Save as `fsdp1_sharded`, in accelerate's files; any world size."""
    state, truth = _sharded_state(use_orig_params=True)
    _save_sharded((rank, world, directory), accelerate_rank_file(directory, rank), state, truth)


def fsdp2_bin(rank: int, world: int, directory: Path) -> None:
    """Save the DTensors of FSDP2 in accelerate's files; any world size."""
    model, truth = sharded_mixed(world)
    path = accelerate_rank_file(directory, rank)
    save_rank((rank, world, directory), model.state_dict(), truth, path=path)


def fsdp1_local(rank: int, world: int, directory: Path) -> None:
    """Save flat parameters, and slices of them by name; no file tells their shapes; any world."""
    _save_local((rank, world, directory), use_orig_params=True)


def fsdp1_local_flat(rank: int, world: int, directory: Path) -> None:
    """Save flat parameters alone; any world size."""
    _save_local((rank, world, directory), use_orig_params=False)


def dcp_fsdp1(rank: int, world: int, directory: Path) -> None:
    """Save ShardedTensors with DCP; any world size."""
    state, truth = _sharded_state(use_orig_params=True)
    save_dcp((rank, world, directory), {"model": state}, truth, stored="model.{}".format)


def dcp_full(rank: int, world: int, directory: Path) -> None:
    """Gather the whole model on rank 0, which saves it with DCP alone; any world size."""
    wrapped, truth = _wrapped(use_orig_params=True)
    config = FullStateDictConfig(rank0_only=True)
    state = _state_of(wrapped, StateDictType.FULL_STATE_DICT, config)
    if rank == 0:
        state_dict_saver.save({"model": state}, storage_writer=dcp_writer(directory), no_dist=True)
        check_loads(directory, truth, stored="model.{}".format)
    leave_truth((rank, world, directory), truth)


def _wrapped(**options: Any) -> tuple[FullyShardedDataParallel, _Tensors]:
    """Return `Mixed` under FSDP1, a unit per dtype, and what it held before."""
    wrap: Callable[..., FullyShardedDataParallel] = partial(
        FullyShardedDataParallel, device_id=torch.device("cpu"), **options
    )
    model = Mixed()
    truth = copy_state(model)
    for name in ("block", "bfloat16_layer", "float16_layer"):
        setattr(model, name, wrap(getattr(model, name)))
    return wrap(model), truth


def _state_of(
    wrapped: FullyShardedDataParallel, kind: StateDictType, config: StateDictConfig
) -> dict[str, torch.Tensor]:
    FullyShardedDataParallel.set_state_dict_type(wrapped, kind, config)
    state: dict[str, torch.Tensor] = wrapped.state_dict()
    return state


def _sharded_state(**options: Any) -> tuple[dict[str, torch.Tensor], _Tensors]:
    wrapped, truth = _wrapped(**options)
    kind = StateDictType.SHARDED_STATE_DICT
    return _state_of(wrapped, kind, ShardedStateDictConfig(offload_to_cpu=True)), truth


def _save_local(place: tuple[int, int, Path], *, use_orig_params: bool) -> None:
    rank, world, directory = place
    wrapped, truth = _wrapped(use_orig_params=use_orig_params)
    state = _state_of(wrapped, StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig())
    torch.save(state, rank_file(directory, world, rank))
    leave_truth(place, truth)


def _save_sharded(
    place: tuple[int, int, Path],
    path: Path,
    state: Mapping[str, torch.Tensor],
    truth: _Tensors,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write this rank's file, make sure that torch reads it back and it holds the truth.

    Every rank must call it. torch reads a ShardedTensor only in a group like the writer's.
    """
    torch.save(state, path)
    with load_with_process_group(group) if group else nullcontext():
        again: dict[str, torch.Tensor] = torch.load(path, weights_only=False)
    assert list(again) == list(state)
    _check_pieces(again, truth)
    leave_truth(place, truth)


def _check_pieces(state: Mapping[str, torch.Tensor], truth: _Tensors) -> None:
    """Put together the pieces of all ranks, each where its own metadata says."""
    mine = {name: _pieces(value) for name, value in state.items()}
    every: list[dict[str, list[_Piece]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, mine)
    assert mine.keys() == truth.keys()
    for name, tensor in truth.items():
        whole = torch.empty_like(tensor)
        for offsets, piece in [piece for rank in every for piece in rank[name]]:
            box = [slice(o, o + n) for o, n in zip(offsets, piece.shape, strict=True)]
            whole[tuple(box)] = piece
        assert sum(len(rank[name]) for rank in every) > 0, name
        assert equal_bits(whole, tensor), name


def _pieces(value: torch.Tensor) -> list[_Piece]:
    if not isinstance(value, ShardedTensor):
        return [([0] * value.ndim, value)]
    return [(shard.metadata.shard_offsets, shard.tensor) for shard in value.local_shards()]
