"""What the drop-in commands share: how they end, what they advise, how they convert."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from unshard.cli import running
from unshard.errors import UnknownFormatError, UsageError, front_of_errors
from unshard.fronts import Call, Command, Front
from unshard.merger.saving import as_transformers_saves
from unshard.progress import Listener
from unshard.showing import listening

if TYPE_CHECKING:
    from unshard.api import MergeOptions, Report
    from unshard.api.inspecting import ShardCounts
    from unshard.tensors.catalog import Catalog

_DTYPES = ("float32", "float16", "bfloat16")


def path_argument(text: str) -> Path:
    """Return the path that an argument is; an empty variable of a shell is none.

    Raises:
        argparse.ArgumentTypeError: it is empty.
    """
    if not text:  # `Path` would take it for the current directory
        raise argparse.ArgumentTypeError("it is an empty path; for the current directory, give .")
    return Path(text)


def add_options(parser: argparse.ArgumentParser, *, output: str, folder: str, dtype: str) -> None:
    """Add the options that both conversion scripts have, by the names that each gives them."""
    parser.add_argument(output, type=path_argument, help="default: CHECKPOINT_PATH_merged")
    about = "folder of the shards; default: actor"
    parser.add_argument(folder, type=path_argument, default="actor", help=about)
    about = "default: bfloat16"
    parser.add_argument(dtype, default="bfloat16", choices=_DTYPES, help=about)


def run(main: Callable[[], None], *, failed: str = "error: ") -> NoReturn:
    """Run a command as this process; exit with 1 if it fails, as the originals do.

    `failed` is printed before the message of an error.
    """
    running.run(main, failed=failed, failure=1)


@contextmanager
def showing(front: Front) -> Iterator[Listener]:
    """Show the progress, the warnings and the errors of a command in the words of a front."""
    with front_of_errors(front), listening(quiet=False, front=front) as listener:
        yield listener


def merge_line(checkpoint: Path, output: Path, options: "MergeOptions") -> Call:
    """Return the line of `unshard merge` that does what a drop-in does."""
    return Call("unshard merge", (str(checkpoint), str(output)), options.chosen)


@dataclass(frozen=True, slots=True)
class Paths:
    """Where a conversion script reads and writes: the step, its folder of shards, the output."""

    checkpoint: Path
    actor: Path
    output: Path


def find_paths(checkpoint: Path, subfolder: Path, output: Path | None) -> Paths:
    """Return the paths that a script's arguments name.

    Raises:
        UnknownFormatError: there is no such directory.
        UsageError: the default output would look like a checkpoint to a trainer.
    """
    step = checkpoint.resolve()
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
    return Paths(step, actor, Path(f"{step}_merged") if output is None else output.resolve())


def convert(
    paths: Paths,
    options: "MergeOptions",
    before: Callable[["Catalog", "ShardCounts"], None],
) -> "Report":
    """Make the output of a conversion script, and show the progress.

    `before` is called with what was read, before anything is written.
    """
    from unshard.api.inspecting import count_shards
    from unshard.api.making import Prepared
    from unshard.api.merging import merge_checkpoint

    def tell(prepared: Prepared) -> Prepared:
        saved = as_transformers_saves(prepared)
        catalog = saved.checkpoint.catalog
        before(catalog, count_shards(catalog))
        return saved

    front = Command({}, merge_line(paths.actor, paths.output, options))
    alone = replace(options, config="none")  # as the originals: no base is looked for
    with showing(front) as listener:
        return merge_checkpoint(paths.actor, paths.output, alone, listener, before=tell)


def print_how_to_load(output: Path) -> None:
    """Print how the output is loaded."""
    print("\nYou can now load this model with:")
    print("  from transformers import AutoModelForCausalLM")
    print(f"  model = AutoModelForCausalLM.from_pretrained({str(output)!r})")
