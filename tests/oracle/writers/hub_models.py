"""Tiny models of transformers, the meshes they are sharded on, and their whole tensors."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

__all__ = [
    "full_state",
    "hub_mesh",
    "sharded_llama",
    "shards_state",
    "tiny_llama",
    "tiny_llama_config",
    "tiny_qwen2",
    "tiny_qwen2_config",
]

_SIZES: Mapping[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
_Model = TypeVar("_Model", bound=nn.Module)
_State = OrderedDict[str, torch.Tensor]


def tiny_llama_config() -> LlamaConfig:
    """Return a configuration whose vocabulary divides by no common world size."""
    return LlamaConfig(vocab_size=37, **_SIZES)


def tiny_qwen2_config(vocabulary: int = 37) -> Qwen2Config:
    """Return one with biases beside the weights."""
    return Qwen2Config(vocab_size=vocabulary, **_SIZES)


def tiny_llama() -> LlamaForCausalLM:
    """Return a model whose norms are not all ones."""
    return _with_norms(LlamaForCausalLM(tiny_llama_config()))


def tiny_qwen2(vocabulary: int = 37) -> Qwen2ForCausalLM:
    """Return a model whose norms are not all ones."""
    return _with_norms(Qwen2ForCausalLM(tiny_qwen2_config(vocabulary)))


def hub_mesh(world: int) -> DeviceMesh:
    """Return a mesh of one dimension, or for four ranks one of 2 x 2 that replicates (HSDP)."""
    if world == 4:
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    return init_device_mesh("cpu", (world,), mesh_dim_names=("shards",))


def sharded_llama(world: int) -> LlamaForCausalLM:
    """Return `tiny_llama` under FSDP2, a unit per layer."""
    mesh = hub_mesh(world)
    model = tiny_llama()
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


def _gather_shards(value: torch.Tensor) -> torch.Tensor:
    if not isinstance(value, ShardedTensor):
        return value.detach().clone()
    first = dist.get_rank() == 0
    whole = torch.empty(value.size(), dtype=value.dtype) if first else None
    value.gather(dst=0, out=whole)
    return torch.empty(0) if whole is None else whole


def _with_norms(model: _Model) -> _Model:
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0)
    return model
