"""What lies next to the weights that are resharded: it is carried, or named in a note."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

from unshard.api.resharding.source import FSDP_CONFIG
from unshard.api.resharding.writing import Writing
from unshard.read.beside.adapter_config import adapter_files, find_adapter, lora_names
from unshard.read.format import Choice, ReadOptions, shortened
from unshard.read.open import Checkpoint, open_latest


def open_ema(source: Checkpoint) -> tuple[Checkpoint, ...]:
    """Return lmms-engine's EMA weights of a step, if any: the tensors that are stored there."""
    own = source.location.weights_dir
    folder = own.with_name(own.name.replace("pytorch_model_", "pytorch_ema_model_"))
    if folder == own or not folder.is_dir() or not any(folder.iterdir()):
        return ()
    found = open_latest(folder, Choice(weights="ema"), ReadOptions())
    tensors = found.catalog.tensors.items()
    stored = {name: one for name, one in tensors if one.chunks.paths[0].parent == folder}
    return (replace(found, catalog=replace(found.catalog, tensors=stored)),)


def add_beside(source: Checkpoint, writing: Writing) -> None:
    """Add an adapter next to the weights, what states its alpha, and a note of all else."""
    location, others = source.location, writing.others
    has_lora = bool(lora_names(source.catalog.tensors))
    own = None if has_lora else find_adapter(location)  # which no layout has among its weights
    for path in filter(None, (*adapter_files(location), own)):
        if has_lora or location.step_dir in path.parents:
            others.copied.setdefault(path.name, path)
    if location.place != location.weights_dir:  # a file, next to anything
        return
    read = chain(*(one.states.states for one in (source, *writing.ema)))
    known = {*others.copied.values(), *(one for one in read if one.name != "config.json")}
    top = location.step_dir if location.role is None else location.weights_dir
    every = {*known, *((one.parent / re.sub(r"\d+", "#", one.name)) for one in known)}
    inside = {folder for one in known for folder in one.parents}
    names = [one.relative_to(top).as_posix() for one in _left(top, every, inside)]
    if names:
        others.notes.append(f"not copied from {top.name}: {shortened(names, 20)}")


def _left(folder: Path, known: set[Path], inside: set[Path]) -> Iterator[Path]:
    """Yield what a folder has besides known files, and those of other ranks."""
    for path in sorted(folder.iterdir()):
        if path in inside:
            yield from _left(path, known, inside)
        elif known.isdisjoint({path, folder / re.sub(r"\d+", "#", path.name)}):
            yield from [] if path.name.startswith((".", FSDP_CONFIG)) else [path]
