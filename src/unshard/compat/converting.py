"""What both conversion scripts do: a checkpoint of verl becomes a model and its training state."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from unshard.compat.commands import merge_line, need_config, showing
from unshard.errors import UnknownFormatError, UsageError
from unshard.fronts import Command

if TYPE_CHECKING:
    from unshard.api import MergeOptions, Report
    from unshard.api.inspecting import ShardCounts
    from unshard.engines.threads import RunPlan
    from unshard.tensors.catalog import Catalog

__all__ = ["Paths", "convert", "find_paths", "print_how_to_load"]


@dataclass(frozen=True, slots=True)
class Paths:
    """Where a script reads and writes: the step, the folder of its shards, the output."""

    checkpoint: Path
    actor: Path
    output: Path


def find_paths(checkpoint: str, subfolder: str, output: str | None) -> Paths:
    """Return the paths that a script's arguments name.

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
            f"{step}_merged: trainers would take the default output for one of their checkpoints",
            hint="give another output: --output",
        )
    return Paths(step, actor, Path(f"{step}_merged") if output is None else Path(output).resolve())


def convert(
    paths: Paths,
    options: "MergeOptions",
    engine: "RunPlan",
    before: Callable[["Catalog", "ShardCounts"], None],
) -> "Report":
    """Make the output, and show the progress.

    Args:
        paths: the checkpoint and the output.
        options: how to merge.
        engine: what writes the files.
        before: called with what was read, before anything is written.
    """
    from unshard.api import Prepared, merge_with
    from unshard.api.inspecting import count_shards

    def tell(prepared: Prepared) -> Prepared:
        catalog = need_config(prepared).checkpoint.catalog
        before(catalog, count_shards(catalog))
        return prepared

    front = Command({}, merge_line(paths.actor, paths.output, options))
    with showing(front) as listener:
        return merge_with(paths.actor, paths.output, options, listener, engine=engine, before=tell)


def print_how_to_load(output: Path) -> None:
    """Print how the output is loaded."""
    print("\nYou can now load this model with:")
    print("  from transformers import AutoModelForCausalLM")
    print(f"  model = AutoModelForCausalLM.from_pretrained({str(output)!r})")
