"""What the files of ranks contain."""

from collections.abc import Iterator

from unshard.api.resharding.source import SourceFiles
from unshard.api.resharding.target import Target
from unshard.plan.resharding import RankFile, RankTensors, optimizer_value
from unshard.read.open import Checkpoint


def files_of_ranks(
    source: Checkpoint, target: Target, files: SourceFiles, *, names_kept: bool
) -> Iterator[RankFile]:
    """Yield the files of all ranks, those of the model first; the names of wrappers may be kept."""
    world, names = len(target.meshes), source.catalog.stored_names if names_kept else {}
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
    is_flat = state.flattened and not state.numbers
    for rank, mesh in enumerate(target.meshes):
        tensors = RankTensors(target.version, mesh)
        value = optimizer_value(tensors, state, keys, is_flat=is_flat)
        yield RankFile(files.renamed(files.optimizer, world, rank), value, tensors)
