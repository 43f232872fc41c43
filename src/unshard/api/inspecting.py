"""`inspect`: what a checkpoint holds, and what `merge` would make of it."""

from pathlib import Path
from typing import Unpack

from unshard.api.converting import convert
from unshard.api.options import MergeOptions, given_path, showing
from unshard.api.preparing import plan_output
from unshard.api.sources import Sources, read_checkpoint
from unshard.errors import ConversionError
from unshard.keywords import ReadKeywords
from unshard.read.inspection import Inspection, describe

__all__ = ["inspect"]


@showing(ReadKeywords)
def inspect(checkpoint: str | Path, **options: Unpack[ReadKeywords]) -> Inspection:
    """Say what a checkpoint holds and what `merge` would make of it; nothing is written.

    Args:
        checkpoint: as for `merge`.
        options: as for `merge`.

    Raises:
        CheckpointError: it cannot be read.
    """
    chosen = MergeOptions(**options)
    found = read_checkpoint(given_path(checkpoint, "the checkpoint"), chosen)
    named = None if found.config is None else found.config.dtype
    try:
        sources = Sources((found,))
        prepared = plan_output(sources, convert(sources, chosen), chosen)
    except ConversionError as error:
        refusal = f"nothing: {error.subject}"
        return describe(found, config_dtype=named, would_write=refusal, warnings=())
    layout = prepared.plan.layout
    files = f"{len(layout.files)} file{'s' if len(layout.files) > 1 else ''}"
    would_write = f"{found.location.default_output}: {files}, {layout.total_size:,} bytes"
    return describe(found, config_dtype=named, would_write=would_write, warnings=prepared.warnings)
