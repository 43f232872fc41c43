"""The meshes that models of transformers are sharded on, and their whole tensors."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from transformers import LlamaForCausalLM

from oracle.writers.saving import logits_file
from tiny_models import logits, tiny_model

__all__ = ["full_state", "hub_mesh", "leave_logits", "sharded_llama", "shards_state"]

_State = OrderedDict[str, torch.Tensor]


def hub_mesh(world: int) -> DeviceMesh:
    """Return a mesh of one dimension, or for four ranks one of 2 x 2 that replicates (HSDP)."""
    if world == 4:
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    return init_device_mesh("cpu", (world,), mesh_dim_names=("shards",))


def sharded_llama(world: int) -> LlamaForCausalLM:
    """Return a tiny Llama under FSDP2, a unit per layer."""
    mesh = hub_mesh(world)
    model: LlamaForCausalLM = tiny_model("llama")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def full_state(model: nn.Module) -> _State:
    """Gather a model of FSDP2 on rank 0; other ranks get nothing. Every rank must call it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    return _State((name, tensor.detach().clone()) for name, tensor in state.items())


def shards_state(model: nn.Module) -> _State:
    """Gather a model of FSDP1 on rank 0, from its shards. Every rank must call it.

    FSDP1 itself cannot gather on the CPU: it frees the parameters that it means to offload.
    """
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state: dict[str, torch.Tensor] = model.state_dict()
    return _State((name, _gather_shards(value)) for name, value in state.items())


def leave_logits(place: tuple[int, int, Path], model: Any) -> None:
    """Leave what the live model, sharded as it is, makes of a few tokens. Every rank must call."""
    found = model if isinstance(model, torch.Tensor) else logits(model)
    if place[0] == 0:
        torch.save(found.detach().clone(), logits_file(place[2]))


def _gather_shards(value: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, ShardedTensor):
        return value.detach().clone()
    first = dist.get_rank() == 0
    whole = torch.empty(value.size(), dtype=value.dtype) if first else None
    value.gather(dst=0, out=whole)
    return torch.empty(0) if whole is None else whole
