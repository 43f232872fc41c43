"""Scenarios of transformers' own sharding: `save_pretrained(distributed_checkpoint=True)`.

The truth is the model before it was saved whole, and loaded from there into shards.
"""

from pathlib import Path

from torch import distributed as dist
from transformers import Qwen2ForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from oracle.writers.saving import copy_state, leave_truth
from tiny_models import tiny_model

__all__ = ["pretrained_hsdp", "pretrained_shards", "pretrained_tp"]

_Place = tuple[int, int, Path]


def pretrained_shards(rank: int, world: int, directory: Path) -> None:
    """Save a model that transformers sharded with FSDP2; a world size of 2 or more."""
    _save_pretrained((rank, world, directory), DistributedConfig(fsdp_size=world))


def pretrained_hsdp(rank: int, world: int, directory: Path) -> None:
    """Save as `pretrained_shards`, sharded and replicated; world size 4."""
    _save_pretrained((rank, world, directory), DistributedConfig(fsdp_size=2, dp_replicate_size=2))


def pretrained_tp(rank: int, world: int, directory: Path) -> None:
    """Save as `pretrained_shards`, FSDP over TP; world size 4.

    transformers redistributes strided shards before it saves them.
    """
    _save_pretrained((rank, world, directory), DistributedConfig(fsdp_size=2, tp_size=2), 40)


def _save_pretrained(place: _Place, config: DistributedConfig, vocabulary: int = 37) -> None:
    """Load a saved model into shards and save those."""
    rank, _, directory = place
    whole = tiny_model(vocab_size=vocabulary)
    source = directory.parent / f"{directory.name}.source"
    if rank == 0:
        whole.save_pretrained(source)
    dist.barrier()
    model = Qwen2ForCausalLM.from_pretrained(source, distributed_config=config)
    model.save_pretrained(directory, distributed_checkpoint=True)
    leave_truth(place, copy_state(whole))
