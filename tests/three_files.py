"""A checkpoint whose weights become three files."""

from pathlib import Path
from typing import Any

import torch

from ranks import save_ranks

FILES = 3
CHOSEN: dict[str, Any] = {"dtype": "float16", "max_shard_size": 100_000}
"""The options with which it becomes them."""


def name_of(number: int) -> str:
    """Return the name of a file of the output; they are counted from 1."""
    return f"model-0000{number}-of-0000{FILES}.safetensors"


def save_three_files(directory: Path) -> Path:
    """Write the checkpoint; in the first output file a tensor becomes infinite."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for number in range(FILES):
        tensors[f"l.{number}.a"] = torch.randn(2, 150, 150, generator=generator)
        tensors[f"l.{number}.b"] = torch.full((7, 5), 1.0 if number else 1e6)
    save_ranks(directory, tensors, 2)
    (directory / "config.json").write_text('{"model_type": "x"}')
    return directory
