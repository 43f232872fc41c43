"""What `torch.load` finds in a file, in a form that can be compared bit for bit."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ranks import bits

__all__ = ["loaded", "parts_of", "same"]


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def same(ours: Any, theirs: Any) -> bool:
    """Whether two values are equal, tensors bit for bit."""
    if isinstance(theirs, torch.Tensor):
        return (
            ours.dtype == theirs.dtype and ours.shape == theirs.shape and bits(ours) == bits(theirs)
        )
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


def parts_of(path: Path) -> Any:
    """Return what a rank's file has, with the local tensors and placements of DTensors."""

    def plain(value: Any) -> Any:
        if isinstance(value, DTensor):
            return value.to_local(), list(value.shape), str(value.placements)
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items()}
        return [plain(one) for one in value] if isinstance(value, list) else value

    return plain(loaded(path))
