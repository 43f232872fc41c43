"""What the files of ranks contain, and the files beside them."""

import re
from collections.abc import Iterator
from pathlib import Path

from unshard.api.resharding.source import FSDP_CONFIG, SourceFiles
from unshard.api.resharding.target import Target
from unshard.api.resharding.writing import random_note
from unshard.containers.torch_files.reader import read_torch_file
from unshard.containers.torch_files.writer import write_torch_file
from unshard.errors import NotMergeableError
from unshard.plan.resharding import RankFile, RankTensors, optimizer_value
from unshard.read.open import Checkpoint
from unshard.read.optimizer.state import split_name
from unshard.read.training_state.plain_values import plain_values
from unshard.tensors.catalog import TensorEntry

__all__ = ["add_files", "files_of_ranks"]


def files_of_ranks(source: Checkpoint, target: Target, files: SourceFiles) -> Iterator[RankFile]:
    """Yield the files of all ranks, those of the model first."""
    world = len(target.meshes)
    for rank, mesh in enumerate(target.meshes):
        tensors = RankTensors(target.version, mesh)
        weights = {name: tensors.make(one) for name, one in source.catalog.tensors.items()}
        yield RankFile(files.renamed(files.model, world, rank), weights, tensors)
    state = source.optimizer
    if state is None or files.optimizer is None:
        return
    if sorted(state.numbers.values()) != list(range(len(state.numbers))) or not state.numbers:
        raise NotMergeableError(
            f"{files.optimizer}: not all of its parameters have a number and a name",
            hint="reshard a checkpoint without LoRA or frozen parameters",
        )
    entries: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in state.catalog.tensors.items():
        parameter, key = split_name(name)
        entries.setdefault(parameter, {})[key] = entry
    groups = [(group.params, group.values) for group in state.groups]
    for rank, mesh in enumerate(target.meshes):
        tensors = RankTensors(target.version, mesh)
        value = optimizer_value(tensors, entries, state.values, groups, state.numbers)
        yield RankFile(files.renamed(files.optimizer, world, rank), value, tensors)


def add_files(
    source: Checkpoint, target: Target, files: SourceFiles, directory: Path
) -> tuple[list[str], list[str]]:
    """Write what has no tensors of the model; return notes, and the paths of what was written."""
    world, before = len(target.meshes), source.catalog.world_size
    notes, written = [], []
    for name, path in files.small.items():
        data = path.read_bytes()
        if path.name == FSDP_CONFIG:
            data = re.sub(rb'("world_size"\s*:\s*)\d+', rb"\g<1>%d" % world, data)
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
        written.append(name)
    if files.extra and world != before:
        notes.append(random_note(before, world))
    for rank in range(world if files.extra else 0):
        file = files.extra.get(rank % before)
        if file is None:
            notes.append(f"rank {rank} gets no scheduler and random state: the file is missing")
            continue
        found = plain_values(read_torch_file(file))
        if found.notes and not rank:
            notes.append(f"{file.name}: left out {', '.join(found.notes)}")
        name = files.renamed(file, world, rank)
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        write_torch_file(directory / name, found.value)
        written.append(name)
    skipped = [one.fqn for one in source.catalog.skipped]
    if skipped:
        notes.append(f"left out of the model: {', '.join(skipped[:5])} (not tensors)")
    return notes, written
