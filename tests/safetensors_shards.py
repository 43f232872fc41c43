"""Sharded safetensors as torch and transformers write them."""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file

from unshard.read.format import Location, ReadOptions
from unshard.read.safetensors_shards.reader import SAFETENSORS_SHARDS
from unshard.tensors.catalog import Catalog

Piece = tuple[Sequence[int], torch.Tensor]


def shard_path(directory: Path, rank: int, index: int = 1, count: int = 1) -> Path:
    return directory / f"shard-{rank + 1:05d}-model-{index:05d}-of-{count:05d}.safetensors"


def write_shard(path: Path, pieces: Mapping[str, Piece], info: object = None) -> None:
    """Write a file as the real writer does; `info` replaces what it says of its pieces."""
    offsets = {name: {"saved_offsets": list(start)} for name, (start, _) in pieces.items()}
    metadata = {
        "DCP_SHARDING_INFO": json.dumps(offsets if info is None else info),
        "DCP_VERSION": "1.0",
        "format": "pt",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: piece.clone(memory_format=torch.contiguous_format)
        for name, (_, piece) in pieces.items()
    }
    save_file(tensors, path, metadata)


def cut(tensor: torch.Tensor, world: int, dim: int = 0) -> list[Piece]:
    """Cut a tensor as FSDP does; ranks may get nothing."""
    step = -(-tensor.shape[dim] // world)
    ends = [min(rank * step, tensor.shape[dim]) for rank in range(world + 1)]
    return [
        (
            [start if d == dim else 0 for d in range(tensor.ndim)],
            tensor.narrow(dim, start, end - start),
        )
        for start, end in pairwise(ends)
    ]


def whole(tensor: torch.Tensor) -> Piece:
    return [0] * tensor.ndim, tensor


def read(directory: Path, also: Sequence[Path] = ()) -> Catalog:
    place = Location(
        directory, directory, None, None, "model", SAFETENSORS_SHARDS, also=tuple(also)
    )
    return SAFETENSORS_SHARDS.read(place, ReadOptions())
