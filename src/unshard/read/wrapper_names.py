"""Take the names of wrappers out of tensor names: FSDP, torch.compile, activation checkpoints, DDP.

A wrapper's attribute may stand anywhere in a name (`layers.0._orig_mod.weight`) and never means
anything. `module` (DDP, DeepSpeed, torch's AveragedModel) may also be a model's own word; it is
taken out only in front, where every name starts with it.

Sources: FSDP_WRAPPED_MODULE, _CHECKPOINT_PREFIX, OptimizedModule of torch; Lightning's
`_forward_module`; accelerate's extract_model_from_parallel.
"""

import os
from collections.abc import Mapping
from dataclasses import replace

from unshard.containers.open_files import OpenFiles
from unshard.errors import CorruptError, raise_all
from unshard.read.chunks import equal_tensors
from unshard.tensors.catalog import TensorEntry

__all__ = ["unwrapped"]

_WRAPPERS = frozenset(
    {
        "_fsdp_wrapped_module",
        "_fpw_module",
        "_orig_mod",
        "_checkpoint_wrapped_module",
        "_forward_module",
    }
)
_LEADING = "module."
_AVERAGES = "n_averaged"  # of torch.optim.swa_utils.AveragedModel


def unwrapped(tensors: Mapping[str, TensorEntry]) -> tuple[dict[str, TensorEntry], list[str]]:
    """Return the tensors under their names without wrappers, and what to say about it.

    Raises:
        CorruptError: names become one whose tensors are not equal.
    """
    names = {name: _without_wrappers(name) for name in tensors}
    counter = names.pop(_AVERAGES, None)
    while names and all(name.startswith(_LEADING) for name in names.values()):
        names = {name: short.removeprefix(_LEADING) for name, short in names.items()}
    kept: dict[str, TensorEntry] = {}
    notes: list[str] = []
    if counter is not None:
        notes.append(f"{_AVERAGES} is the counter of an averaged model: left out")
    problems: list[CorruptError] = []
    with OpenFiles(os.O_RDONLY, limit=16) as files:
        for name, short in names.items():
            entry = tensors[name]
            first = kept.get(short)
            if first is None:
                kept[short] = replace(entry, fqn=short)
            elif equal_tensors(first, entry, files):
                notes.append(f"{name} is the same tensor as {short} without its wrapper: left out")
            else:
                problems.append(_collision(name, short, first, entry))
    raise_all(CorruptError, "tensors whose names differ by a wrapper only", problems)
    changed = sum(short != name for name, short in names.items())
    if changed:
        notes.insert(0, f"names of wrappers were taken out of {changed} tensor names")
    return kept, notes


def _without_wrappers(name: str) -> str:
    if not any(wrapper in name for wrapper in _WRAPPERS):
        return name
    kept = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(kept) or name


def _collision(name: str, short: str, first: TensorEntry, second: TensorEntry) -> CorruptError:
    return CorruptError(
        f"tensor {short}: {name} has the same name but for a wrapper, and other values",
        expected="one of them, or equal ones",
        found=f"{first.dtype} {list(first.shape)} and {second.dtype} {list(second.shape)}",
        hint="the state dict was put together from two models; save one of them",
    )
