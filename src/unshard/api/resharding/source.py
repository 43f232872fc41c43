"""What is asked of the checkpoint that is resharded, and its files."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unshard.containers.json_file import json_object
from unshard.errors import NotMergeableError
from unshard.read.open import Checkpoint
from unshard.read.rank_files.optimizer import find_files
from unshard.read.training_state.reader import find_state_files

_NUMBERS = re.compile(r"world_size_\d+_rank_\d+")
FSDP_CONFIG = "fsdp_config.json"


def refuse_parts(source: Checkpoint) -> None:
    """Refuse files of ranks with parts that no device mesh describes.

    Raises:
        NotMergeableError: there are such.
    """
    for entry in source.catalog.tensors.values():
        if entry.sharding is None and (entry.chunks.sizes != entry.shape).any():
            raise NotMergeableError(
                f"tensor {entry.fqn}: every rank has another part of it, and no device mesh",
                expected="a DTensor, or a tensor that every rank has whole",
                hint="write it for torch.distributed.checkpoint: --to dcp",
            )


def is_whole(source: Checkpoint) -> bool:
    """Return whether one rank saved files of ranks without DTensors, as FSDP1 alone does."""
    tensors = source.catalog.tensors.values()
    return source.catalog.world_size == 1 and not any(one.sharding for one in tensors)


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
