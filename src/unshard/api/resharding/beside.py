"""What lies next to the weights that are resharded: it is carried, or named in a note."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

from unshard.api.resharding.ranks import FSDP_CONFIG, SourceFiles, is_fsdp1
from unshard.api.resharding.writing import Addition, Writing, random_note, trainer_rng
from unshard.containers.torch_files.reader import read_torch_file
from unshard.read.beside.adapter_config import adapter_files, find_adapter, lora_names
from unshard.read.dcp.optimizer import dcp_root
from unshard.read.format import Choice, ReadOptions, shortened
from unshard.read.open import Checkpoint, open_latest
from unshard.read.training_state.plain_values import plain_values
from unshard.showing import counted

_SMALL = re.compile(
    r"scheduler(_\d+)?\.bin|scheduler\.pt|sampler(_\d+)?\.bin|trainer_state\.json|meta\.pt"
    r"|training_args\.bin|custom_checkpoint_\d+\.pkl|scaler\.pt|dl_state_dict(_\d+)?\.bin"
)
_OF_RANK = re.compile(
    r"random_states_(?P<accelerate>\d{1,5})\.pkl|rng_state(_(?P<hf>\d{1,5}))?\.pth"
)


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


def carried_with_ranks(source: Checkpoint, files: SourceFiles, world: int) -> Addition:
    """Return the files next to those of ranks, those of ranks for another number of them."""
    before, added = source.catalog.world_size, Addition()
    for name, path in files.small.items():
        if path.name == FSDP_CONFIG:
            data = path.read_bytes()
            added.data[name] = re.sub(rb'("world_size"\s*:\s*)\d+', rb"\g<1>%d" % world, data)
        else:
            added.copied[name] = path
    carried = (
        ("scheduler and random state", files.extra, random_note),
        ("dataloader position", files.loaders, _loader_note),
    )
    for kind, own, changed in carried:
        if own and world != before:
            added.notes.append(changed(before, world))
        of_ranks = {rank: own.get(rank % before) for rank in range(world if own else 0)}
        for rank, file in of_ranks.items():
            if file is None:
                added.notes.append(f"rank {rank} gets no {kind}: the file is missing")
                continue
            found = plain_values(read_torch_file(file))
            added.saved[files.renamed(file, world, rank)] = found.value
            if found.notes and not rank:
                added.notes.append(f"{file.name}: left out {', '.join(found.notes)}")
    if world > 1 and source.optimizer is not None and is_fsdp1(source):
        added.notes.append(
            f"{FSDP_CONFIG} says FSDP1, which on several ranks loads the model, but no moments of "
            "whole parameters: with the optimizer, go on with FSDP2"
        )
    skipped = [one.fqn for one in source.catalog.skipped]
    if skipped:
        added.notes.append(f"left out of the model: {', '.join(skipped[:5])} (not tensors)")
    return added


def _loader_note(before: int, world: int) -> str:
    return (
        f"the dataloaders of {counted(before, 'rank')} have no equivalent on {world}: rank R gets "
        f"the position of rank R modulo {before}, so it goes on after as many batches of its own, "
        "and some samples of this epoch may be seen twice or not at all"
    )


def carried_with_dcp(source: Checkpoint, world: int) -> Addition:
    """Return the files next to a DCP checkpoint that a trainer resumes from."""
    files, root = Addition(), dcp_root(source.location)
    for path in source.companions.paths.values():
        if path.is_relative_to(root):
            files.copied[str(path.relative_to(root))] = path
    ranks: dict[bool, dict[int, Path]] = {}
    for path in sorted(root.iterdir()):
        match = _OF_RANK.fullmatch(path.name)
        if match:
            number = int(match["accelerate"] or match["hf"] or 0)
            ranks.setdefault(match["accelerate"] is None, {})[number] = path
        elif _SMALL.fullmatch(path.name):
            files.copied[path.name] = path
    for is_trainer, found in ranks.items():
        before = max(found) + 1
        for rank in range(world):
            name = trainer_rng(rank, world) if is_trainer else f"random_states_{rank}.pkl"
            if rank % before in found:
                files.copied[name] = found[rank % before]
            else:
                files.notes.append(f"rank {rank} gets no random state: the file is missing")
        if before != world:
            files.notes.append(random_note(before, world))
    return files
