"""Carry the files next to the weights of a reshard, or name them in a note."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

from unshard.api.resharding.ranks import FSDP_CONFIG, SourceFiles, is_fsdp1
from unshard.api.resharding.writing import Addition, Writing, random_note, trainer_rng
from unshard.console import counted
from unshard.containers.torch_files.reader import read_torch_file
from unshard.read.beside.adapter_config import adapter_files, find_adapter, lora_names
from unshard.read.dcp.optimizer import dcp_root
from unshard.read.format import Choice, ReadOptions, shortened
from unshard.read.open import Checkpoint, open_latest
from unshard.read.training_state.plain_values import plain_values

_SMALL = re.compile(
    r"scheduler(_\d+)?\.bin|scheduler\.pt|sampler(_\d+)?\.bin|trainer_state\.json|meta\.pt"
    r"|training_args\.bin|custom_checkpoint_\d+\.pkl|scaler\.pt|dl_state_dict(_\d+)?\.bin"
)
_OF_RANK = re.compile(
    r"random_states_(?P<accelerate>\d{1,5})\.pkl|rng_state(_(?P<hf>\d{1,5}))?\.pth"
)


def open_ema(source: Checkpoint) -> tuple[Checkpoint, ...]:
    """Return the tensors in lmms-engine's EMA folder of a step, if it has one."""
    own = source.location.weights_dir
    folder = own.with_name(own.name.replace("pytorch_model_", "pytorch_ema_model_"))
    if folder == own or not folder.is_dir() or not any(folder.iterdir()):
        return ()
    ema = open_latest(folder, Choice(weights="ema"), ReadOptions())
    tensors = ema.catalog.tensors.items()
    stored = {name: entry for name, entry in tensors if entry.chunks.paths[0].parent == folder}
    return (replace(ema, catalog=replace(ema.catalog, tensors=stored)),)


def add_beside(writing: Writing) -> None:
    """Add an adapter next to the weights, its config, and a note of files that are not copied."""
    source, others = writing.source, writing.others
    location, has_lora = source.location, bool(lora_names(source.catalog.tensors))
    own = None if has_lora else find_adapter(location)  # layouts do not have it among the weights
    for path in filter(None, (*adapter_files(location), own)):
        if has_lora or location.step_dir in path.parents:
            others.copied.setdefault(path.name, path)
    if location.place != location.weights_dir:  # a single file, whose neighbours are unrelated
        return
    read = chain(*(opened.states.states for opened in (source, *writing.ema)))
    known = {*others.copied.values(), *(path for path in read if path.name != "config.json")}
    top = location.step_dir if location.role is None else location.weights_dir
    patterns = {path.parent / re.sub(r"\d+", "#", path.name) for path in known}
    folders = {folder for path in known for folder in path.parents}
    rest = [path.relative_to(top).as_posix() for path in _rest(top, known | patterns, folders)]
    if rest:
        others.notes.append(f"not copied from {top.name}: {shortened(rest, 20)}")


def _rest(folder: Path, known: set[Path], folders: set[Path]) -> Iterator[Path]:
    """Yield all paths of a folder but known files, also of other ranks ("#" is a number)."""
    for path in sorted(folder.iterdir()):
        if path in folders:
            yield from _rest(path, known, folders)
        elif known.isdisjoint({path, folder / re.sub(r"\d+", "#", path.name)}):
            yield from [] if path.name.startswith((".", FSDP_CONFIG)) else [path]


def carried_with_ranks(source: Checkpoint, files: SourceFiles, world: int) -> Addition:
    """Return the files next to rank files; files of ranks are adapted to the number of ranks."""
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
            state = plain_values(read_torch_file(file))
            added.saved[files.renamed(file, world, rank)] = state.value
            if state.notes and not rank:
                added.notes.append(f"{file.name}: left out {', '.join(state.notes)}")
    if world > 1 and source.optimizer is not None and is_fsdp1(source):
        added.notes.append(
            f"{FSDP_CONFIG} records FSDP1, which on several ranks loads the model, but no moments "
            "of whole parameters: to load the optimizer, continue with FSDP2"
        )
    skipped = [value.fqn for value in source.catalog.skipped]
    if skipped:
        added.notes.append(f"left out of the model: {', '.join(skipped[:5])} (not tensors)")
    return added


def _loader_note(before: int, world: int) -> str:
    return (
        f"the dataloaders of {counted(before, 'rank')} have no equivalent on {world}: rank R gets "
        f"the position of rank R modulo {before}, so it skips as many batches of its own, and some "
        "samples of this epoch may be seen twice or not at all"
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
    for is_trainer, paths in ranks.items():
        before = max(paths) + 1
        for rank in range(world):
            name = trainer_rng(rank, world) if is_trainer else f"random_states_{rank}.pkl"
            if rank % before in paths:
                files.copied[name] = paths[rank % before]
            else:
                files.notes.append(f"rank {rank} gets no random state: the file is missing")
        if before != world:
            files.notes.append(random_note(before, world))
    return files
