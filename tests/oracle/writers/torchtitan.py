"""A real model of torchtitan with FSDP2 on the CPU, saved by its `CheckpointManager`.

torchtitan's launcher asks for its data sets and a tokenizer; what builds, shards, trains and saves
the model here is its own. The truth is what torchtitan's adapter makes of the model after training,
next to the logits of the live model.
"""

import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy

from oracle.writers.hub_models import leave_logits
from oracle.writers.saving import leave_truth

__all__ = ["FAMILY", "torchtitan_llama"]

FAMILY = "llama"
_DIM, _HEADS, _KV_HEADS, _HIDDEN, _VOCABULARY = 16, 4, 2, 24, 37  # those of `tiny_config`
_BACKEND = "partial_dtensor"
_KERNELS = "torchtitan.distributed.minimal_async_ep.kernels"


class _NoKernels(ModuleType):
    """Stands for kernels of experts, which need triton and a GPU; none is called."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def torchtitan_llama(rank: int, world: int, directory: Path) -> None:
    """Train a Llama and save it into `checkpoint/step-2`, not as the last step; any world size."""
    sys.modules[_KERNELS] = _NoKernels(_KERNELS)
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

    config = _config()
    model = _sharded(config, world)
    optimizer = default_adamw(lr=0.01)
    optimizer.implementation = "foreach"
    optimizers = optimizer.build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config().build(optimizers=optimizers, training_steps=4)
    adapter = Llama3StateDictAdapter(config, None)
    manager = CheckpointManager.Config(enable=True, interval=2).build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={},
        sd_adapter=adapter,
        base_folder=str(directory),
    )
    ids = torch.arange(3, 19).reshape(2, 8)
    for step in (1, 2):
        loss: Any = cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizers.step()
        optimizers.zero_grad()
        schedulers.step()
        manager.save(step)
    manager.close()
    place = rank, world, directory
    state = model.state_dict()
    leave_logits(place, model(ids))
    leave_truth(place, adapter.to_hf({name: one.full_tensor() for name, one in state.items()}))


def _config() -> Any:
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention

    start = {"weight": partial(torch.nn.init.normal_, std=0.3)}
    layers = llama3._build_llama3_layers(
        n_layers=2,
        dim=_DIM,
        n_heads=_HEADS,
        n_kv_heads=_KV_HEADS,
        hidden_dim=_HIDDEN,
        rope=ComplexRoPE.Config(dim=_DIM // _HEADS, max_seq_len=64),
        attn_backend="flex",
    )
    for layer in layers:  # the others are compiled, or for GPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return llama3.Llama3Model.Config(
        dim=_DIM,
        vocab_size=_VOCABULARY,
        tok_embeddings=Embedding.Config(
            num_embeddings=_VOCABULARY, embedding_dim=_DIM, param_init=start
        ),
        norm=RMSNorm.Config(normalized_shape=_DIM, param_init=start),
        lm_head=Linear.Config(in_features=_DIM, out_features=_VOCABULARY, param_init=start),
        layers=layers,
    )


def _sharded(config: Any, world: int) -> Any:
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims, utils
    from torchtitan.models.llama3.parallelize import parallelize_llama

    with torch.device("meta"):
        model = config.build()
    utils.set_spmd_backend(_BACKEND)
    parallel_dims.device_type = "cpu"  # torchtitan takes CUDA where there is no GPU
    shape = {"dp_replicate": 1, "dp_shard": world, "cp": 1, "tp": 1, "pp": 1, "ep": 1}
    model = parallelize_llama(
        model,
        parallel_dims=ParallelDims(**shape, world_size=world, spmd_backend=_BACKEND),
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=ParallelismConfig(spmd_backend=_BACKEND),
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(enable=True)  # gloo knows no other
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model
