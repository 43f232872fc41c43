"""Checkpoints of many layouts, each with options of a merge: what is read must not matter."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import Shard

from optimizers import KEYS, like, save_optimizer
from ranks import save_ranks
from safetensors_shards import cut, shard_path, write_shard
from tiny_models import tiny_model


def matrices(*shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {f"w{n}": torch.randn(shape, generator=generator) for n, shape in enumerate(shapes)}


def rows(directory: Path) -> None:
    """Verl's rank files: long runs, which are copied."""
    save_ranks(directory / "global_step_3" / "actor", matrices((800, 500), (301, 300), (3,)), 3)


def columns(directory: Path) -> None:
    """Sharded along dimension 1: runs that are copied interleaved, and some that are gathered."""
    tensors = matrices((6, 70_000), (701, 502))
    save_ranks(directory, tensors, 3, placements=[Shard(1)])


def safetensors_shards(directory: Path) -> None:
    tensors = matrices((800, 500), (301, 300), (70, 6000))
    pieces = {name: cut(tensor, 2, n % 2) for n, (name, tensor) in enumerate(tensors.items())}
    for rank in range(2):
        write_shard(shard_path(directory, rank), {name: one[rank] for name, one in pieces.items()})


def adapted(directory: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    layer = "base_model.model.model.layers.0.mlp.up_proj"
    shapes = {"base_layer": (300, 1100), "lora_A.default": (8, 1100), "lora_B.default": (300, 8)}
    tensors = {
        f"{layer}.{name}.weight": torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    save_ranks(directory, tensors, 2, extra={"base_model.model.model.norm.weight": torch.ones(9)})
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    meta = {"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM"}
    (directory / "lora_train_meta.json").write_text(json.dumps(meta))


def experts(directory: Path) -> None:
    """A mixture whose experts transformers stacks; they are written one by one."""
    model = tiny_model("qwen3_moe")
    save_ranks(directory, dict(model.state_dict()), 3)
    model.config.save_pretrained(directory)


def optimizer(directory: Path) -> None:
    """Verl's rank files of a model and of its optimizer."""
    tensors = matrices((80, 50), (31, 30), (3,))
    save_ranks(directory, tensors, 2)
    save_optimizer(directory, {key: like(tensors, seed) for seed, key in enumerate(KEYS)}, 2)


Options = dict[str, Any]
LAYOUTS: dict[str, tuple[str | Callable[[Path], None], Options]] = {
    "verl": (rows, {}),
    "verl, cast": (rows, {"dtype": "bfloat16", "max_shard_size": "800KB"}),
    "dimension 1": (columns, {"max_shard_size": "2MB"}),
    "dimension 1, cast": (columns, {"dtype": "float16"}),
    "sharded safetensors": (safetensors_shards, {}),
    "LoRA, fused": (adapted, {"allow_missing": True}),
    "LoRA, both": (adapted, {"allow_missing": True, "dtype": "bfloat16", "lora": "both"}),
    "LoRA, adapter": (adapted, {"lora": "adapter"}),
    "stacked experts": (experts, {}),
    "stacked experts, cast": (experts, {"dtype": "bfloat16", "max_shard_size": "40KB"}),
    "FSDP + TP": ("fsdp2_tp_uneven", {}),
    "ShardedTensor": ("fsdp1_sharded", {}),
    "DCP": ("dcp_tensors", {}),
    "DCP, strided": ("dcp_strides", {}),
    "DCP, compressed": ("dcp_zstd", {}),
    "optimizer": (optimizer, {"optimizer": True, "max_shard_size": "20KB"}),
    "DCP, optimizer": ("dcp_model_optimizer", {"optimizer": True}),
    "HF Trainer": ("dcp_accelerate", {"dtype": "bfloat16"}),
}
WORLDS = {"fsdp2_tp_uneven": 4, "dcp_zstd": 2}


def make_layout(
    layout: str, checkpoint: Path, write_checkpoint: Callable[[str, int, Path], object]
) -> Options:
    """Write the checkpoint of a layout; return the options that it is merged with."""
    writer, options = LAYOUTS[layout]
    if isinstance(writer, str):
        write_checkpoint(writer, WORLDS.get(writer, 3), checkpoint)
    else:
        writer(checkpoint)
    return options | {"config": "none"}


def contents(directory: Path) -> dict[str, bytes]:
    """Return every file below a directory, by its path there."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
