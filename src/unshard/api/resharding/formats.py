"""The formats that a reshard writes: which one a checkpoint is in, and where its files are."""

from enum import Enum
from pathlib import Path

from unshard.api.resharding.source import SourceFiles
from unshard.errors import NotMergeableError, UsageError
from unshard.read.open import Checkpoint


class ReshardFormat(Enum):
    """Who loads the output: `dcp` is for `dcp.load`, `accelerate` for its `load_state`."""

    VERL = "verl"
    LMMS = "lmms"
    DCP = "dcp"
    ACCELERATE = "accelerate"

    @classmethod
    def _of_model(cls, source: Checkpoint, to: "ReshardFormat") -> "ReshardFormat":
        """Return a format whose trainers load the names that the source has."""
        if to.value not in source.location.format.layouts:
            raise NotMergeableError(
                f"{source.location.weights_dir}: has the names of {source.location.format}, which "
                f"trainers of --to {to.value} do not load",
                hint="merge it first, and reshard the merged model",
            )
        return to

    @property
    def is_dcp(self) -> bool:
        """Whether the files are those of torch.distributed.checkpoint, and not of ranks."""
        return self in {ReshardFormat.DCP, ReshardFormat.ACCELERATE}

    @classmethod
    def wanted(cls, source: Checkpoint, to: str | None) -> "ReshardFormat":
        """Return the format that the user named, or else that of the source.

        Raises:
            UsageError: there is none of that name.
            NotMergeableError: none was named, and the source is in none of these formats; or its
                trainers do not load the source's names.
        """
        names = ", ".join(one.value for one in cls)
        if to is not None:
            if to not in {one.value for one in cls}:
                raise UsageError(f"--to {to}: unknown", expected=names)
            return cls._of_model(source, cls(to))
        found = format_of(source)
        if found is None:
            raise NotMergeableError(
                f"{source.location.file or source.location.weights_dir}: unshard reads its "
                f"format ({source.catalog.format}) but does not write it",
                expected="rank files, such as model_world_size_4_rank_0.pt, or a DCP checkpoint",
                hint=f"name the format to write: --to {names.replace(', ', '|')}",
            )
        return found


def format_of(source: Checkpoint) -> ReshardFormat | None:
    """Return the format that a checkpoint is in; None for any that is not written."""
    layout = source.location.format.layout(source.location, source.catalog)
    return None if layout is None else ReshardFormat(layout)


def keeps_keys(source: Checkpoint, to: ReshardFormat) -> bool:
    """Return whether files of ranks stay in their format, and so parameters keep their keys."""
    return to is format_of(source) and not to.is_dcp


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
