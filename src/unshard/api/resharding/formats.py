"""The formats that a reshard writes: which one a checkpoint is in, and which is wanted."""

from unshard.errors import NotMergeableError, UsageError
from unshard.read.format import ReshardFormat
from unshard.read.open import Checkpoint


def wanted_format(source: Checkpoint, to: str | None) -> ReshardFormat:
    """Return the format that the user named, or else that of the source.

    Raises:
        UsageError: there is none of that name.
        NotMergeableError: none was named, and the source is in none of these formats; or its
            trainers do not load the source's names.
    """
    location, known = source.location, {one.value: one for one in ReshardFormat}
    found = format_of(source) if to is None else known.get(to)
    if to is not None and found is None:
        raise UsageError(f"--to {to}: unknown", expected=", ".join(known))
    if found is None:
        raise NotMergeableError(
            f"{location.file or location.weights_dir}: unshard reads its format "
            f"({source.catalog.format}) but does not write it",
            expected="rank files, such as model_world_size_4_rank_0.pt, or a DCP checkpoint",
            hint=f"name the format to write: --to {'|'.join(known)}",
        )
    if found not in location.format.reshards_to:
        raise NotMergeableError(
            f"{location.weights_dir}: has the names of {location.format}, which trainers of "
            f"--to {found.value} do not load",
            hint="merge it first, and reshard the merged model",
        )
    return found


def format_of(source: Checkpoint) -> ReshardFormat | None:
    """Return the format that a checkpoint is in; None for any that is not written."""
    return source.location.format.reshard_format(source.location, source.catalog)


def keeps_keys(source: Checkpoint, to: ReshardFormat) -> bool:
    """Return whether files of ranks stay in their format, and so parameters keep their keys."""
    return to is format_of(source) and not to.is_dcp
