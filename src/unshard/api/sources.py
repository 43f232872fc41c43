"""Open what a merge starts from: a checkpoint, with the base model if one was named."""

import logging
import os
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from unshard.api.options import MergeOptions
from unshard.convert.lora_names import split_adapter
from unshard.convert.recipes import take
from unshard.read.beside.base import Base, read_base
from unshard.read.beside.companions import completed
from unshard.read.dcp.inflate import inflate, inflated_bytes
from unshard.read.open import Checkpoint, open_latest
from unshard.write.targets import check_space

__all__ = ["inflated", "read_checkpoint"]

_log = logging.getLogger(__name__)


def read_checkpoint(path: Path, options: MergeOptions, *, pass_over: bool = True) -> Checkpoint:
    """Read the checkpoint that a path means, and the base model.

    Raises:
        UnshardError: either cannot be read.
    """
    also = [Path(one) for one in options.also]
    base = None if options.base is None else read_base(str(options.base))
    reading = replace(options.reading, shapes={} if base is None else base.shapes)
    request = replace(options.request, pass_over=pass_over)
    checkpoint = open_latest(path, request, reading, also)
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


def inflated(checkpoint: Checkpoint, stack: ExitStack) -> Checkpoint:
    """Return the checkpoint with nothing compressed; what that needs is removed by the stack.

    Raises:
        OutputError: the file system of temporary files lacks the space.
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
