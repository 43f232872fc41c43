"""What both conversion scripts do: a checkpoint of verl becomes a model and its training state."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from unshard.errors import UnknownFormatError, UsageError

if TYPE_CHECKING:
    from unshard.api import MergeOptions, Report
    from unshard.api.sources import Source
    from unshard.engines.threads import RunPlan
    from unshard.read.inspection import ShardCounts

__all__ = ["Paths", "convert", "find_paths", "opened"]


@dataclass(frozen=True, slots=True)
class Paths:
    """Where a script reads and writes: the step, the folder of its shards, the output."""

    checkpoint: Path
    actor: Path
    output: Path


def find_paths(checkpoint: str, subfolder: str, output: str | None) -> Paths:
    """Return the paths that the arguments of a script mean.

    Raises:
        UnknownFormatError: there is no such directory.
        UsageError: the default output would look like a checkpoint to a trainer.
    """
    step = Path(checkpoint).resolve()
    if not step.exists():
        raise UnknownFormatError(f"Checkpoint path does not exist: {step}")
    actor = step / subfolder
    if not actor.exists():
        raise UnknownFormatError(f"Actor directory does not exist: {actor}")
    if output is None and step.name.startswith("checkpoint"):
        raise UsageError(
            f"{step}_merged: would lie among checkpoints under a name that trainers take for one",
            hint="say where to write: --output",
        )
    return Paths(step, actor, Path(f"{step}_merged") if output is None else Path(output).resolve())


def opened(paths: Paths, options: "MergeOptions") -> tuple["Source", "ShardCounts"]:
    """Read a checkpoint, and count its shards."""
    from unshard.api.sources import open_source
    from unshard.read.inspection import count_shards

    source = open_source(paths.actor, options)
    return source, count_shards(source.checkpoint.catalog)


def convert(source: "Source", paths: Paths, options: "MergeOptions", engine: "RunPlan") -> "Report":
    """Make the output, and show how far it is."""
    from unshard.api.delivering import deliver
    from unshard.api.preparing import prepare, with_training_state
    from unshard.cli.show import listening

    started = time.monotonic()
    with listening(quiet=False) as listener:
        prepared = with_training_state(prepare([source], options), options)
        return deliver(prepared, paths.output, options, listener, engine=engine, started=started)
