"""The rank files of a checkpoint, and their contents for another number of ranks."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from unshard.api.resharding.target import ReshardTarget
from unshard.containers.json_file import json_object
from unshard.plan.resharding import RankFile, RankTensors, optimizer_value
from unshard.read.format import ReshardFormat
from unshard.read.open import Checkpoint
from unshard.read.rank_files.optimizer import find_files
from unshard.read.training_state.reader import find_state_files

_NUMBERS = re.compile(r"world_size_\d+_rank_\d+")
FSDP_CONFIG = "fsdp_config.json"


def is_fsdp1(source: Checkpoint) -> bool:
    """Return whether verl recorded FSDP1, which has no DTensors on one rank."""
    path = source.location.weights_dir / FSDP_CONFIG
    return path.is_file() and json_object(path).get("FSDP_version") == 1


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """The files of a checkpoint of rank files.

    Attributes:
        root: the directory of all of them.
        model, optimizer: a file of one rank; the optimizer's is None if there is none.
        extra: the file with scheduler and random state of each rank.
        loaders: the file with the dataloader's position of each rank (lmms-engine).
        small: all other files, by their paths below `root`.
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
        own = [model, *extra.values(), *([] if optimizer is None else [optimizer])]
        near = all(path.parent == location.weights_dir for path in own)
        near = near and not location.weights_dir.name.startswith("pytorch_model_fsdp_")
        root = location.weights_dir if near else location.step_dir
        others = [*source.companions.paths.values(), root / FSDP_CONFIG]
        small = {
            str(path.relative_to(root)): path
            for path in others
            if path.is_relative_to(root) and path.is_file()
        }
        name = "dataloader_state"
        loaders = {
            rank: path.parent.with_name(name) / path.name.replace("extra_state", name)
            for rank, path in extra.items()
        }
        loaders = {rank: path for rank, path in loaders.items() if path.is_file()}
        return cls(root, model, optimizer, extra, loaders, small)

    def renamed(self, path: Path, world: int, rank: int) -> str:
        """Return the path in the output of a rank's counterpart of a file."""
        name = _NUMBERS.sub(f"world_size_{world}_rank_{rank}", path.name)
        return str(path.relative_to(self.root).with_name(name))


def files_for(to: ReshardFormat, source: Checkpoint) -> SourceFiles:
    """Return the paths of a format's rank files, as those of a checkpoint of one rank."""
    root = Path("/")
    name = "world_size_1_rank_0.pt"
    if to is ReshardFormat.LMMS:
        model = root / "pytorch_model_fsdp_0" / f"model_{name}"
        state = root / "optimizer" / f"optimizer_{name}"
    else:
        model, state = root / f"model_{name}", root / f"optim_{name}"
    return SourceFiles(root, model, None if source.optimizer is None else state, {}, {}, {})


def files_of_ranks(
    source: Checkpoint, target: ReshardTarget, files: SourceFiles, *, names_kept: bool
) -> Iterator[RankFile]:
    """Yield the files of all ranks, the model's first; names may keep the prefixes of wrappers."""
    world, names = target.world_size, source.catalog.stored_names if names_kept else {}
    for rank, mesh in enumerate(target.meshes):
        tensors = RankTensors(target.version, mesh)
        model = source.catalog.tensors.items()
        weights = {names.get(name, name): tensors.make(entry) for name, entry in model}
        yield RankFile(files.renamed(files.model, world, rank), weights, tensors)
    state = source.optimizer
    if state is None or files.optimizer is None:
        return
    keys: dict[str, int | str] = dict(sorted(state.numbers.items(), key=lambda item: item[1]))
    if not keys:  # the state has names, which stay
        named = (*state.parameters, *(name for group in state.groups for name in group.params))
        keys = {name: name for name in named}
    is_flat = state.flattened and not state.numbers
    for rank, mesh in enumerate(target.meshes):
        tensors = RankTensors(target.version, mesh)
        value = optimizer_value(tensors, state, keys, is_flat=is_flat)
        yield RankFile(files.renamed(files.optimizer, world, rank), value, tensors)
