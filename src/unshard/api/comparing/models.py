"""Open checkpoints, merged models or steps as the tensors that a merge would write."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from unshard.api.converting import convert
from unshard.api.options import MergeOptions, given_path
from unshard.api.sources import Sources, inflated, read_checkpoint
from unshard.convert.outputs import ConvertedTensor
from unshard.engines.files import PieceReader
from unshard.progress import Chosen, Listener, Stage, Warned
from unshard.read.dcp.items import inflated_bytes
from unshard.read.open import Checkpoint

_CACHE_BYTES = 8 * 1024 * 1024  # two slabs of the largest size, one of each model


@dataclass(frozen=True, slots=True, eq=False)
class ConvertedModel:
    """A decompressed checkpoint, and the tensors of its merge, by name, in the model's order."""

    checkpoint: Checkpoint
    tensors: Mapping[str, ConvertedTensor]


@contextmanager
def open_models(
    paths: Sequence[str | Path], options: MergeOptions, listener: Listener
) -> Iterator[Sequence[ConvertedModel]]:
    """Open checkpoints, runs or merged models, in any formats and layouts.

    Options about writing do not apply. A model without a config.json is converted by the config of
    the first model that has one. At the end of the `with` block, also after an error, all files are
    checked for changes.

    Raises:
        UnshardError: as `merge` raises it before it writes; or a file has changed.
    """
    with ExitStack() as stack:
        resolved = [given_path(path, "a checkpoint") for path in paths]
        listener(Stage("reading"))
        opened = [read_checkpoint(path, options) for path in resolved]
        configs = [source.companions.config for source in opened if source.companions.config]
        if configs and options.config is None and options.names == "hub":
            shared = replace(options, config=configs[0])
            opened = [
                source if source.config is not None else read_checkpoint(path, shared)
                for source, path in zip(opened, resolved, strict=True)
            ]
        for source in opened:
            listener(Chosen(f"reading {source.title}"))
            for note in source.catalog.notes:
                listener(Warned(note))
        if any(inflated_bytes(source.catalog) for source in opened):
            listener(Stage("decompressing"))
        opened = [inflated(source, stack) for source in opened]
        models = [_converted(source, options) for source in opened]
        with Sources(tuple(opened)).steady():
            yield models


def _converted(checkpoint: Checkpoint, options: MergeOptions) -> ConvertedModel:
    tensors = convert(Sources((checkpoint,)), options, all_shapes=False).tensors
    return ConvertedModel(checkpoint, {tensor.name: tensor for tensor in tensors})


def block_reader(models: Sequence[ConvertedModel], at_once: int = 1) -> PieceReader:
    """Return a reader for `at_once` threads with a small cache, to read blocks of tensors."""
    return PieceReader(
        models[0].checkpoint.location.weights_dir, cache_bytes=_CACHE_BYTES, at_once=at_once
    )
