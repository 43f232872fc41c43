"""Files of ranks: where those of a checkpoint are, and what is written into others."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from unshard.api.resharding.target import Target
from unshard.containers.json_file import json_object
from unshard.plan.resharding import RankFile, RankTensors, optimizer_value
from unshard.read.format import ReshardFormat
from unshard.read.open import Checkpoint
from unshard.read.rank_files.optimizer import find_files
from unshard.read.training_state.reader import find_state_files

_NUMBERS = re.compile(r"world_size_\d+_rank_\d+")
FSDP_CONFIG = "fsdp_config.json"


def is_fsdp1(source: Checkpoint) -> bool:
    """Return whether verl recorded that it trained with FSDP1, which has no DTensors alone."""
    path = source.location.weights_dir / FSDP_CONFIG
    return path.is_file() and json_object(path).get("FSDP_version") == 1


def _loader_beside(extra: Path) -> Path:
    """Return where lmms-engine saves the position of the dataloader of a rank."""
    name = "dataloader_state"
    return extra.parent.with_name(name) / extra.name.replace("extra_state", name)


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """The files of a checkpoint, by their paths below its root.

    Attributes:
        root: the directory that has all of them.
        model, optimizer: the file of a rank; the optimizer's is None if there is none.
        extra: of each rank, the file with its scheduler and random state.
        loaders: of each rank, the file with the position of its dataloader (lmms-engine).
        small: all others that belong to it.
    """

    root: Path
    model: Path
    optimizer: Path | None
    extra: Mapping[int, Path]
    loaders: Mapping[int, Path]
    small: Mapping[str, Path]

    @classmethod
    def of(cls, source: Checkpoint) -> "SourceFiles":
        """Return the files of a checkpoint."""
        location, world = source.location, source.catalog.world_size
        model = next(iter(source.catalog.tensors.values())).chunks.paths[0]
        optimizer = next(iter(find_files(location, world).values()), None)
        state = find_state_files(location, world)
        ranks = {} if state is None else state.ranks
        extra = {rank: path for rank, path in ranks.items() if _NUMBERS.search(path.name)}
        loaders = {rank: _loader_beside(path) for rank, path in extra.items()}
        found = [model, *extra.values(), *([] if optimizer is None else [optimizer])]
        near = all(path.parent == location.weights_dir for path in found)
        near = near and not location.weights_dir.name.startswith("pytorch_model_fsdp_")
        root = location.weights_dir if near else location.step_dir
        others = [*source.companions.paths.values(), root / FSDP_CONFIG]
        small = {
            str(path.relative_to(root)): path
            for path in others
            if path.is_relative_to(root) and path.is_file()
        }
        loaders = {rank: path for rank, path in loaders.items() if path.is_file()}
        return cls(root, model, optimizer, extra, loaders, small)

    def renamed(self, path: Path, world: int, rank: int) -> str:
        """Return the path in the output of what a rank has in place of a file."""
        name = _NUMBERS.sub(f"world_size_{world}_rank_{rank}", path.name)
        return str(path.relative_to(self.root).with_name(name))


def files_for(to: ReshardFormat, source: Checkpoint) -> SourceFiles:
    """Return where the files of ranks of a format are, as those of a checkpoint of one rank."""
    root = Path("/")
    name = "world_size_1_rank_0.pt"
    if to is ReshardFormat.LMMS:
        model = root / "pytorch_model_fsdp_0" / f"model_{name}"
        state = root / "optimizer" / f"optimizer_{name}"
    else:
        model, state = root / f"model_{name}", root / f"optim_{name}"
    return SourceFiles(root, model, None if source.optimizer is None else state, {}, {}, {})


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
