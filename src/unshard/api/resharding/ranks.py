"""What the files of ranks contain, and the files beside them."""

import re
from collections.abc import Iterator, Mapping

from unshard.api.resharding.source import FSDP_CONFIG, SourceFiles, is_fsdp1
from unshard.api.resharding.target import Target
from unshard.api.resharding.writing import Addition, random_note
from unshard.containers.torch_files.reader import read_torch_file
from unshard.plan.resharding import RankFile, RankTensors, flat_optimizer_value, optimizer_value
from unshard.read.open import Checkpoint
from unshard.read.training_state.plain_values import plain_values
from unshard.showing import counted


def files_of_ranks(
    source: Checkpoint, target: Target, files: SourceFiles, names: Mapping[str, str]
) -> Iterator[RankFile]:
    """Yield the files of all ranks, those of the model first; some tensors may get other names."""
    world = len(target.meshes)
    for rank, mesh in enumerate(target.meshes):
        tensors = RankTensors(target.version, mesh)
        model = source.catalog.tensors.items()
        weights = {names.get(name, name): tensors.make(one) for name, one in model}
        yield RankFile(files.renamed(files.model, world, rank), weights, tensors)
    state = source.optimizer
    if state is None or files.optimizer is None:
        return
    keys: dict[str, int | str] = dict(sorted(state.numbers.items(), key=lambda one: one[1]))
    if not keys:  # it has names, which stay
        named = (*state.parameters, *(name for group in state.groups for name in group.params))
        keys = {name: name for name in named}
    made = flat_optimizer_value if state.flattened and not state.numbers else optimizer_value
    for rank, mesh in enumerate(target.meshes):
        tensors = RankTensors(target.version, mesh)
        value = made(tensors, state, keys)
        yield RankFile(files.renamed(files.optimizer, world, rank), value, tensors)


def other_files(source: Checkpoint, target: Target, files: SourceFiles) -> Addition:
    """Return the files that have no tensors of the model."""
    world, before, added = len(target.meshes), source.catalog.world_size, Addition()
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
