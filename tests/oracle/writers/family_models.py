"""Models of families sharded by FSDP2, and models without values of every type that has rules."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from transformers.models.auto import configuration_auto, modeling_auto

from oracle.writers.saving import copy_state, rank_file, save_rank
from tiny_models import Fields, tiny_model

__all__ = ["hollow_model", "save_gemma3", "save_qwen2_fsdp1", "save_qwen3_moe"]


def save_qwen3_moe(rank: int, world: int, directory: Path) -> None:
    """Save the model under FSDP2, a unit per layer."""
    _save_sharded("qwen3_moe", rank, world, directory)


def save_gemma3(rank: int, world: int, directory: Path) -> None:
    """Save the model under FSDP2: a language model with a vision tower, and a tied head."""
    _save_sharded("gemma3", rank, world, directory)


def save_qwen2_fsdp1(rank: int, world: int, directory: Path) -> None:
    """Save Qwen2 under FSDP1 without a mesh, a unit per layer: ShardedTensors."""
    wrap = partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True)
    model = tiny_model()
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = wrap(layer)
    whole = wrap(model)
    FullyShardedDataParallel.set_state_dict_type(whole, StateDictType.SHARDED_STATE_DICT)
    torch.save(whole.state_dict(), rank_file(directory, world, rank))


def _save_sharded(model_type: str, rank: int, world: int, directory: Path) -> None:
    model = tiny_model(model_type)
    truth = copy_state(model)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    save_rank((rank, world, directory), model.state_dict(), truth)


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and module[0].__class__.__name__.endswith("Layer"):
            yield from module


# models without values, of every type that has rules

_FEW: Fields = {
    "num_hidden_layers": 2,
    "num_layers": 2,
    "depth": 2,
    "encoder_layers": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 8,
    "moe_num_experts": 4,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
}
_NEEDED: Mapping[str, Fields] = {
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
}
_CLASSES: Mapping[str, str] = {
    **modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    **modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    "qwen2_5_omni": "Qwen2_5OmniForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeForConditionalGeneration",
}


def hollow_model(model_type: str) -> Any:
    """Return a model of a few layers and experts, else of its type's usual sizes, no memory."""
    config = _few(type(configuration_auto.CONFIG_MAPPING[model_type]()))
    if model_type == "qwen3_omni_moe":
        config.enable_audio_output = False
    with torch.device("meta"):
        return getattr(transformers, _CLASSES[model_type])(config)


def _few(made: Any) -> Any:
    """Return a config with few layers and experts, and so the configs inside it."""
    usual = made()
    inner = {
        key: _few(type(getattr(usual, key))).to_dict()
        for key in made.sub_configs
        if getattr(usual, key, None) is not None
    }
    few = {key: value for key, value in _FEW.items() if type(getattr(usual, key, None)) is int}
    return made(**few, **inner, **_NEEDED.get(made.model_type, {}))
