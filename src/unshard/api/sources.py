"""What a merge starts from: a checkpoint, and the base model if one was named."""

import logging
import os
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from unshard.api.options import MergeOptions
from unshard.convert.lora_names import split_adapter
from unshard.convert.recipes import take
from unshard.read.beside.base import Base, read_base
from unshard.read.beside.companions import completed
from unshard.read.dcp.inflate import inflate, inflated_bytes
from unshard.read.open import Checkpoint, open_latest
from unshard.write.targets import check_space

__all__ = ["Source", "inflated", "open_source"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """What a merge starts from: the checkpoint, and the base model if one was named."""

    checkpoint: Checkpoint
    base: Base | None


def open_source(path: Path, options: MergeOptions, *, pass_over: bool = True) -> Source:
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
    if base is None:
        return Source(checkpoint, None)
    recipes = {name: take(entry) for name, entry in checkpoint.catalog.tensors.items()}
    needs_weights = options.lora != "adapter" and split_adapter(recipes).adapter_only
    if needs_weights and not base.tensors:
        base = read_base(base.name, needs_weights=True)
    companions = completed(checkpoint.catalog.companions, base.companions)
    catalog = replace(checkpoint.catalog, companions=companions)
    return Source(replace(checkpoint, catalog=catalog), base)


def _log_choice(path: Path, checkpoint: Checkpoint) -> None:
    location, catalog = checkpoint.location, checkpoint.catalog
    _log.info(
        "%s: %s, written by %s, in %s: step %s, role %s, %s weights",
        *(path, catalog.format, catalog.writer, location.weights_dir),
        *(location.step, location.role, location.weights),
    )
    _log.info(
        "world size %s, %d tensors, %d values left out; config: %s",
        *(catalog.world_size, len(catalog.tensors), len(catalog.skipped)),
        catalog.companions.config or "none",
    )
    for file in catalog.companions.files.values():
        _log.debug("to copy: %s", file)
    for name, entry in catalog.tensors.items():
        dtype, chunks = entry.dtype.name, len(entry.chunks)
        _log.debug("read %s: %s %s, chunks: %d", name, dtype, entry.shape, chunks)


def inflated(source: Source, stack: ExitStack) -> Source:
    """Return the source with nothing in it compressed; what that needs is removed by the stack.

    Raises:
        OutputError: the file system of temporary files lacks the space.
        CorruptError: see `inflate`.
    """
    catalog = source.checkpoint.catalog
    needed = inflated_bytes(catalog)
    if not needed:
        return source
    scratch = Path(tempfile.mkdtemp(prefix="_unshard-"))
    stack.callback(_remove, scratch, os.getpid())
    check_space(scratch, needed)
    catalog = inflate(catalog, scratch / "items")
    return replace(source, checkpoint=replace(source.checkpoint, catalog=catalog))


def _remove(scratch: Path, owner: int) -> None:
    """Remove a directory, unless this is a fork of the process that made it."""
    if os.getpid() == owner:
        shutil.rmtree(scratch, ignore_errors=True)
