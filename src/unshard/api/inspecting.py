"""`inspect`: what a checkpoint holds, and what `merge` would make of it."""

from collections.abc import Sequence
from pathlib import Path

from unshard.api.converting import convert
from unshard.api.options import MergeOptions, given_path
from unshard.api.preparing import plan_output
from unshard.api.sources import Sources, read_checkpoint
from unshard.errors import ConversionError
from unshard.read.inspection import Inspection, describe

__all__ = ["inspect"]


def inspect(
    checkpoint: str | Path,
    *,
    weights: str | None = None,
    role: str | None = None,
    step: int | None = None,
    also: Sequence[str | Path] = (),
    assume_dim0: bool = False,
    ep_size: int | None = None,
    allow_globals: Sequence[str] = (),
) -> Inspection:
    """Say what a checkpoint holds and what `merge` would make of it; nothing is written.

    Arguments are those of `merge`.

    Raises:
        CheckpointError: it cannot be read.
    """
    options = MergeOptions(
        weights=weights,
        role=role,
        step=step,
        also=also,
        assume_dim0=assume_dim0,
        ep_size=ep_size,
        allow_globals=allow_globals,
    )
    found = read_checkpoint(given_path(checkpoint, "the checkpoint"), options)
    named = None if found.config is None else found.config.dtype
    try:
        sources = Sources((found,))
        prepared = plan_output(sources, convert(sources, options), options)
    except ConversionError as error:
        refusal = f"nothing: {error.subject}"
        return describe(found, config_dtype=named, would_write=refusal, warnings=())
    layout = prepared.plan.layout
    files = f"{len(layout.files)} file{'s' if len(layout.files) > 1 else ''}"
    would_write = f"{found.location.default_output}: {files}, {layout.total_size:,} bytes"
    return describe(found, config_dtype=named, would_write=would_write, warnings=prepared.warnings)
