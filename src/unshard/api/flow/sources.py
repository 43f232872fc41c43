"""Open what a merge starts from: checkpoints, each with the base model if one was named."""

import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from unshard.api.options import MergeOptions, given_path
from unshard.convert.lora.names import split_adapter
from unshard.convert.recipes import take
from unshard.progress import Chosen, Listener, Stage
from unshard.read.beside.base import Base, read_base
from unshard.read.beside.companions import completed
from unshard.read.dcp.inflate import inflate, inflated_bytes
from unshard.read.open import Checkpoint, open_latest
from unshard.read.training_state.reader import TrainingState, read_training_state
from unshard.write.staging.targets import check_space

__all__ = ["Opening", "Sources", "decompressed", "inflated", "one_checkpoint", "read_checkpoint"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Sources:
    """What an output is made from: one checkpoint, or several, which are averaged.

    Attributes:
        checkpoints: in the order in which they are added. The last gives config and companions.
        weights: what each counts in an average.
        training: scheduler and random state, to be written next to the weights.
    """

    checkpoints: tuple[Checkpoint, ...]
    weights: tuple[float, ...] = (1.0,)
    training: TrainingState = field(default_factory=TrainingState)

    @property
    def last(self) -> Checkpoint:
        """What is merged; of several, the last."""
        return self.checkpoints[-1]

    @property
    def compressed_bytes(self) -> int:
        """How many bytes decompressing takes, at most; 0 if nothing is compressed."""
        return sum(inflated_bytes(one.catalog) for one in self.checkpoints)


Opening = Callable[[Listener], Sources]
"""Opens the checkpoints of a merge, and tells the listener which were chosen."""


def one_checkpoint(path: str | Path, options: MergeOptions, *, pass_over: bool) -> Opening:
    """Return a function that opens the checkpoint that a path means, with its training state.

    Raises:
        UsageError: the path is empty.
    """
    place = given_path(path, "the checkpoint")

    def opened(listener: Listener) -> Sources:
        listener(Stage("reading"))
        checkpoint = read_checkpoint(place, options, pass_over=pass_over)
        listener(Chosen(f"merging {checkpoint.title}"))
        if not options.extra_state or options.lora == "adapter":
            return Sources((checkpoint,))
        state = read_training_state(checkpoint.location, checkpoint.catalog.world_size)
        return Sources((checkpoint,), training=state)

    return opened


def read_checkpoint(path: Path, options: MergeOptions, *, pass_over: bool = True) -> Checkpoint:
    """Read the checkpoint that a path means, and the base model.

    Raises:
        UnshardError: either cannot be read.
    """
    also = [Path(one) for one in options.also]
    base = None if options.base is None else read_base(str(options.base))
    reading = replace(options.reading, shapes={} if base is None else base.shapes)
    choice = replace(options.request, pass_over=pass_over)
    checkpoint = open_latest(path, choice, reading, also)
    _log_choice(path, checkpoint)
    return checkpoint if base is None else _with_base(checkpoint, base, options)


def _with_base(checkpoint: Checkpoint, base: Base, options: MergeOptions) -> Checkpoint:
    """Return a checkpoint with its base model, whose weights are there if they are needed."""
    recipes = {name: take(entry) for name, entry in checkpoint.catalog.tensors.items()}
    needs_weights = options.lora != "adapter" and split_adapter(recipes).adapter_only
    if needs_weights and not base.tensors:
        base = read_base(base.name, needs_weights=True)
    companions = completed(checkpoint.companions, base.companions)
    return replace(checkpoint, companions=companions, base=base)


def _log_choice(path: Path, checkpoint: Checkpoint) -> None:
    location, catalog, companions = checkpoint.location, checkpoint.catalog, checkpoint.companions
    _log.info(
        "%s: %s, written by %s, in %s: step %s, role %s, %s weights",
        *(path, catalog.format, catalog.writer, location.weights_dir),
        *(location.step, location.role, location.weights),
    )
    _log.info(
        "world size %s, %d tensors, %d values left out; config: %s",
        *(catalog.world_size, len(catalog.tensors), len(catalog.skipped)),
        companions.config or "none",
    )
    for file in companions.files.values():
        _log.debug("to copy: %s", file)
    for name, entry in catalog.tensors.items():
        dtype, chunks = entry.dtype.name, len(entry.chunks)
        _log.debug("read %s: %s %s, chunks: %d", name, dtype, entry.shape, chunks)


def decompressed(sources: Sources, scratch: Path, listener: Listener) -> Sources:
    """Return the sources decompressed, each into a file named `scratch` with a number.

    Raises:
        CorruptError: see `inflate`.
    """
    listener(Stage("decompressing"))
    checkpoints = tuple(
        replace(one, catalog=inflate(one.catalog, scratch.with_suffix(f".{number}")))
        for number, one in enumerate(sources.checkpoints)
    )
    return replace(sources, checkpoints=checkpoints)


def inflated(checkpoint: Checkpoint, stack: ExitStack) -> Checkpoint:
    """Return the checkpoint with nothing compressed; what that needs is removed by the stack.

    Raises:
        OutputError: the file system of temporary files does not have the space.
        CorruptError: see `inflate`.
    """
    needed = inflated_bytes(checkpoint.catalog)
    if not needed:
        return checkpoint
    scratch = Path(tempfile.mkdtemp(prefix="_unshard-"))
    stack.callback(_remove, scratch, os.getpid())
    check_space(scratch, needed)
    return replace(checkpoint, catalog=inflate(checkpoint.catalog, scratch / "items"))


def _remove(scratch: Path, owner: int) -> None:
    """Remove a directory, unless this is a fork of the process that made it."""
    if os.getpid() == owner:
        shutil.rmtree(scratch, ignore_errors=True)
