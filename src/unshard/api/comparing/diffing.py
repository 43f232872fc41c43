"""`diff`: compare two checkpoints, merged models or steps without a merge."""

from dataclasses import replace
from pathlib import Path
from typing import Unpack

from unshard.api.comparing.models import open_models
from unshard.api.options import MergeOptions, accepting
from unshard.console import listener_or_default
from unshard.engines.compare import compare
from unshard.engines.crew import engine_for
from unshard.keywords import DiffKeywords
from unshard.progress import Listener
from unshard.stores.nodes.connection import disconnecting
from unshard.write.verification.comparison import Comparison, Tolerances


@accepting(DiffKeywords)
@disconnecting()
def diff(
    before: str | Path,
    after: str | Path,
    *,
    listener: Listener | None = None,
    **options: Unpack[DiffKeywords],
) -> Comparison:
    """Compare two checkpoints bit by bit, in any formats and layouts, without a merge.

    Memory is bounded. Values are compared as a merge would write them. A model without a
    config.json is converted by the config of the other.

    Args:
        before: a checkpoint, a run (its highest complete step), or a merged model. In the result it
            is "theirs", and "missing" has the tensors that only `before` has.
        after: the same, "ours" in the result. Tensors of different dtypes are not equal; if a merge
            may cast them, their values are compared in the dtype of `after`.
        listener: as for `merge`.
        options: as for `merge`; each applies to both.

    Raises:
        UnshardError: see `unshard.errors`; models that differ are not an error.
    """
    chosen = MergeOptions(**options, allow_missing=True, allow_unexpected=True)
    with (
        listener_or_default(listener) as heard,
        open_models([after, before], chosen, heard) as models,
        engine_for(chosen.engine, chosen.resources, heard) as engine,
    ):
        ours, theirs = (list(model.tensors.values()) for model in models)
        comparison = compare(ours, theirs, Tolerances(norms=False), engine)
    tensors = (
        replace(tensor, equal=tensor.equal and tensor.dtype_ours == tensor.dtype_theirs)
        for tensor in comparison.tensors
    )
    return replace(comparison, tensors=tuple(tensors))
