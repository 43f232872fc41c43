"""`verify`: a merged model compared with what it was merged from, or with another model."""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import inf
from pathlib import Path

from unshard.api.options import MergeOptions
from unshard.api.preparing import prepare
from unshard.api.sources import open_source
from unshard.convert.recipes import shape_of
from unshard.engines.compare import compare
from unshard.errors import UsageError
from unshard.plan.pairs import as_stored
from unshard.progress import Listener, Stage, ignore
from unshard.read.inflate import inflate, inflated_bytes
from unshard.read.open import open_whole
from unshard.write.comparison import Comparison, Tolerances

__all__ = ["verify"]


def verify(
    output: str | Path,
    against: str | Path,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
    load: bool = False,
    names: str = "hub",
    weights: str | None = None,
    role: str | None = None,
    step: int | None = None,
    also: Sequence[str | Path] = (),
    workers: int | None = None,
    memory: str | int = "64MB",
    assume_dim0: bool = False,
    ep_size: int | None = None,
    allow_globals: Sequence[str] = (),
    listener: Listener = ignore,
) -> Comparison:
    """Compare every tensor of a merged model with a checkpoint, or with another model.

    Streaming, in bounded memory. Where the dtypes differ and `merge` may cast between them, theirs
    is cast to ours first: a bfloat16 merge of a float32 checkpoint equals it exactly.

    Args:
        output: a directory with whole weights, or one file; shards beside them are not looked at.
        against: a checkpoint or a model, taken as `merge` would convert it, dtypes kept.
        atol: allowed |ours - theirs|; with `rtol` added.
        rtol: allowed |ours - theirs| / |theirs|. Both 0: bit by bit.
        load: also load names and shapes with transformers (extra `torch`).
        names: "hub" or "training": which names `merge` gave the output.
        weights: which weights of `against`; as in `merge`, like all that follow.
        role: actor or critic.
        step: of several.
        also: more directories of the same checkpoint.
        workers: threads.
        memory: bound on all buffers, at least 4 MiB.
        assume_dim0: plain tensors that differ are shards.
        ep_size: size of the expert parallelism.
        allow_globals: tensor subclasses to read.
        listener: called with progress events.

    Raises:
        UnshardError: one of the tree in `unshard.errors`; that the models differ is no error.
    """
    if not (0 <= atol < inf and 0 <= rtol < inf):
        raise UsageError("--atol, --rtol: a tolerance must be a number, 0 or more")
    options = MergeOptions(
        names=names,
        weights=weights,
        role=role,
        step=step,
        also=also,
        workers=workers,
        memory=memory,
        assume_dim0=assume_dim0,
        ep_size=ep_size,
        allow_globals=allow_globals,
    )
    settings = options.settings
    listener(Stage("reading"))
    ours = open_whole(Path(output), options.reading)
    mine = as_stored(ours.catalog)
    source = open_source(Path(against), options)
    with ExitStack() as stack:
        catalog = source.checkpoint.catalog
        if inflated_bytes(catalog):
            listener(Stage("decompressing"))
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="_unshard-"))
            catalog = inflate(catalog, Path(scratch) / "items")
            source = replace(source, checkpoint=replace(source.checkpoint, catalog=catalog))
        theirs = prepare(source, options).tensors
        found = compare(mine, theirs, Tolerances(atol, rtol), settings, listener)
    if not load:
        return found
    from unshard.write.verify_load import verify_load

    listener(Stage("loading"))
    forms = {one.name: (one.dtype, shape_of(one.recipe)) for one in mine}
    return replace(found, loading=verify_load(ours.location.weights_dir, forms))
