"""`diff`: what changed between two checkpoints, merged models or steps, without a merge."""

from dataclasses import replace
from pathlib import Path
from typing import Unpack

from unshard.api.comparing.models import open_models
from unshard.api.options import MergeOptions, accepting
from unshard.engines.compare import compare
from unshard.engines.crew import engine_for
from unshard.keywords import DiffKeywords
from unshard.progress import Listener
from unshard.showing import hearing
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
    config.json is converted by that of the other.

    Args:
        before: a checkpoint, a directory of several (the highest complete step is taken), or a
            merged model: "theirs" of the result, in which "missing" is what only this one has.
        after: another one: "ours". A tensor of another dtype is not equal; where a merge may cast,
            its values are compared in the dtype after.
        listener: as for `merge`.
        options: as for `merge`; each applies to both.

    Raises:
        UnshardError: one of the tree in `unshard.errors`; models that differ are not an error.
    """
    chosen = MergeOptions(**options, allow_missing=True, allow_unexpected=True)
    with (
        hearing(listener) as heard,
        open_models([after, before], chosen, heard) as models,
        engine_for(chosen.engine, chosen.resources, heard) as engine,
    ):
        ours, theirs = (list(model.tensors.values()) for model in models)
        found = compare(ours, theirs, Tolerances(norms=False), engine)
    tensors = (
        replace(one, equal=one.equal and one.dtype_ours == one.dtype_theirs)
        for one in found.tensors
    )
    return replace(found, tensors=tuple(tensors))
