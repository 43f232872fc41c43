"""The offsets that sharded safetensors name, and whether their pieces are complete."""

import json
from math import prod
from pathlib import Path

from safetensors import safe_open


def looks_whole(directory: Path) -> bool:
    """Return whether the pieces that are left fill their tensors, as far as any file tells.

    No file names the size of a tensor, or all names: a last piece, or a tensor that lay in one
    piece, may be missing.
    """
    ends: dict[str, list[int]] = {}
    volumes: dict[str, int] = {}
    for path in directory.glob("shard-*"):
        with safe_open(path, "pt") as file:
            offsets = saved_offsets(file.metadata())
            for name in file.keys():  # noqa: SIM118 (a file, no mapping)
                shape = file.get_slice(name).get_shape()
                own = [start + size for start, size in zip(offsets[name], shape, strict=True)]
                ends[name] = [max(pair) for pair in zip(ends.get(name, own), own, strict=True)]
                volumes[name] = volumes.get(name, 0) + prod(shape)
    return all(volumes[name] == prod(end) for name, end in ends.items())


def saved_offsets(metadata: dict[str, str]) -> dict[str, list[int]]:
    info = json.loads(metadata["DCP_SHARDING_INFO"])
    return {name: piece["saved_offsets"] for name, piece in info.items()}
