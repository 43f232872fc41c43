"""Removes names of wrappers from tensor names: FSDP, torch.compile, activation checkpoints, DDP.

A wrapper's attribute may be anywhere in a name (`layers.0._orig_mod.weight`) and has no meaning.
`module` (DDP, DeepSpeed, torch's AveragedModel) may also be a model's own word; it is removed after
another wrapper, and in front if every name starts with it.

Sources: FSDP_WRAPPED_MODULE, _CHECKPOINT_PREFIX, OptimizedModule of torch; Lightning's
`_forward_module`; accelerate's extract_model_from_parallel.

FSDP1's flat parameters (LOCAL_STATE_DICT) have names of a wrapper too, and are refused.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from unshard.containers.chunks import equal_tensors
from unshard.containers.open_files import OpenFiles
from unshard.errors import CorruptError, NotMergeableError, raise_all
from unshard.tensors.catalog import TensorEntry
from unshard.with_notes import WithNotes

REMOVED = "names of wrappers were removed from"
"""The start of the note that tensor names differ from those of the files."""

_WRAPPERS = frozenset(
    "_fsdp_wrapped_module _fpw_module _orig_mod _checkpoint_wrapped_module _forward_module".split()
)
_LEADING = "module."
_FLAT = ("_flat_param", "flat_param")
_AVERAGES = "n_averaged"  # of torch.optim.swa_utils.AveragedModel


def unwrapped(tensors: Mapping[str, TensorEntry]) -> WithNotes[dict[str, TensorEntry]]:
    """Return the tensors under names without wrappers; those that become one must be equal."""
    names = names_without_wrappers([name for name in tensors if name != _AVERAGES])
    by_name: dict[str, TensorEntry] = {}
    notes: list[str] = []
    if _AVERAGES in tensors:
        notes.append(f"{_AVERAGES} is the counter of an averaged model: left out")
    problems: list[CorruptError] = []
    with OpenFiles(os.O_RDONLY, limit=16) as files:
        for name, short in names.items():
            entry = tensors[name]
            first = by_name.get(short)
            if first is None:
                by_name[short] = replace(entry, fqn=short)
            elif first.chunks.compressed.any() or entry.chunks.compressed.any():
                problems.append(_collision(name, short, first, entry, "and both are compressed"))
            elif equal_tensors(first, entry, files):
                notes.append(f"{name} is the same tensor as {short} without its wrapper: left out")
            else:
                problems.append(_collision(name, short, first, entry, "and other values"))
    raise_all(CorruptError, "tensors whose names differ by a wrapper only", problems)
    changed = sum(short != name for name, short in names.items())
    if changed:
        notes.insert(0, f"{REMOVED} {changed} tensor names")
    return WithNotes(by_name, tuple(notes))


def stored_names(tensors: Iterable[str]) -> dict[str, str]:
    """Return the names in the files of the tensors that `unwrapped` renames."""
    stored: dict[str, str] = {}
    for name, short in names_without_wrappers([n for n in tensors if n != _AVERAGES]).items():
        stored.setdefault(short, name)
    return {short: name for short, name in stored.items() if short != name}


def names_without_wrappers(wrapped: Sequence[str]) -> dict[str, str]:
    """Return every name of a model without the names of wrappers in it."""
    names = {name: _without_wrappers(name) for name in wrapped}
    if not all(name.startswith(_LEADING) for name in names.values()):
        names = {name: _without_wrappers(name, inner=_LEADING[:-1]) for name in wrapped}
    return _without_leading(names)


def without_wrapper_module(names: Mapping[str, str]) -> dict[str, str]:
    """Remove the attribute of a LightningModule or ComposerModel from names, if all have it."""
    first = {name.partition(".")[0] for name in names.values()}
    if len(first) != 1:
        return dict(names)
    return {key: name.partition(".")[2] or name for key, name in names.items()}


def _without_wrappers(name: str, inner: str = "") -> str:
    """Remove wrappers from a name, and the part directly after a wrapper if it is `inner`."""
    if not any(wrapper in name for wrapper in _WRAPPERS):
        return name
    parts: list[str] = []
    inside = False
    for part in name.split("."):
        if part in _WRAPPERS or (inside and part == inner):
            inside = True
        else:
            parts.append(part)
            inside = False
    return ".".join(parts) or name


def _without_leading(names: dict[str, str]) -> dict[str, str]:
    """Remove `module.` from all names, if all have it; or from those that then equal another."""
    while names and all(name.startswith(_LEADING) for name in names.values()):
        names = {name: short.removeprefix(_LEADING) for name, short in names.items()}
    shorter = set(names.values())
    return {
        name: bare if (bare := short.removeprefix(_LEADING)) in shorter else short
        for name, short in names.items()
    }


def _collision(
    name: str, short: str, first: TensorEntry, second: TensorEntry, how: str
) -> CorruptError:
    return CorruptError(
        f"tensor {short}: {name} has the same name except for a wrapper, {how}",
        expected="only one of them, or equal values",
        found=f"{first.dtype} {list(first.shape)} and {second.dtype} {list(second.shape)}",
        hint="the state dict was put together from two models; save one of them",
    )


def refuse_flat_parameters(where: Path, names: Iterable[str]) -> None:
    """Refuse tensors that are a module's parameters end to end: only the model has the cuts."""
    flat = [name for name in names if name.rpartition(".")[2] in _FLAT]
    if flat:
        raise NotMergeableError(
            f"{where}: flat parameters of FSDP1 (LOCAL_STATE_DICT): {flat[0]} …",
            expected="tensors under their own names and shapes",
            found=f"{len(flat)} flat parameters; only the model has their boundaries",
            hint="load it in the training code, on as many ranks, and save it again with "
            "StateDictType.SHARDED_STATE_DICT or FULL_STATE_DICT",
        )
