"""Open checkpoints, merged models or steps of a run as the tensors that a merge would write."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from unshard.api.converting import convert
from unshard.api.options import MergeOptions, given_path
from unshard.api.sources import Sources, inflated, read_checkpoint
from unshard.convert.outputs import Converted
from unshard.engines.files import PieceReader
from unshard.progress import Chosen, Listener, Stage, Warned
from unshard.read.dcp.items import inflated_bytes
from unshard.read.open import Checkpoint

_CACHE_BYTES = 8 * 1024 * 1024  # two slabs of the largest size, one of each model


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A checkpoint, and the tensors that its merge would write, by name and in the model's order.

    Attributes:
        checkpoint: what was read; nothing in it is compressed.
        tensors: each has `name`, `dtype` and `recipe` (`shape_of(recipe)` is its shape).
    """

    checkpoint: Checkpoint
    tensors: Mapping[str, Converted]


@contextmanager
def open_models(
    paths: Sequence[str | Path], options: MergeOptions, listener: Listener
) -> Iterator[Sequence[Model]]:
    """Open models, in any formats and layouts, under the names that the options ask for.

    One without a config.json is converted by that of the first that has one. After the `with`
    block, also if it raises, it is checked that no file has changed since it was opened.

    Args:
        paths: each as for `merge`: a checkpoint, a run, or a merged model.
        options: as for `merge`; those about writing do not apply.
        listener: is told what was chosen, and the notes about it.

    Raises:
        UnshardError: as `merge` raises it before it writes; or a file has changed.
    """
    with ExitStack() as stack:
        places = [given_path(path, "a checkpoint") for path in paths]
        listener(Stage("reading"))
        found = [read_checkpoint(place, options) for place in places]
        configs = [one.companions.config for one in found if one.companions.config is not None]
        if configs and options.config is None and options.names == "hub":
            shared = replace(options, config=configs[0])
            found = [
                one if one.config is not None else read_checkpoint(place, shared)
                for one, place in zip(found, places, strict=True)
            ]
        for one in found:
            listener(Chosen(f"reading {one.title}"))
            for note in one.catalog.notes:
                listener(Warned(note))
        if any(inflated_bytes(one.catalog) for one in found):
            listener(Stage("decompressing"))
        found = [inflated(one, stack) for one in found]
        models = [Model(one, _tensors_of(one, options)) for one in found]
        with Sources(tuple(found)).steady():
            yield models


def _tensors_of(checkpoint: Checkpoint, options: MergeOptions) -> Mapping[str, Converted]:
    converted = convert(Sources((checkpoint,)), options, all_shapes=False)
    return {one.name: one for one in converted.tensors}


def block_reader(models: Sequence[Model], at_once: int = 1) -> PieceReader:
    """Return what reads the tensors of models, `PieceReader.blocks`; to be closed.

    Args:
        models: whose files are read.
        at_once: how many threads may read at a time.
    """
    return PieceReader(
        models[0].checkpoint.location.weights_dir, cache_bytes=_CACHE_BYTES, at_once=at_once
    )
