"""Shared code of the drop-in commands: arguments, exit codes, advice, conversion."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from unshard.cli import running
from unshard.console import listening
from unshard.errors import UnknownFormatError, UsageError, front_of_errors
from unshard.fronts import Call, Command, Front
from unshard.merger.saving import as_transformers_saves
from unshard.progress import Listener

if TYPE_CHECKING:
    from unshard.api import MergeOptions, Report
    from unshard.api.inspecting import ShardCounts
    from unshard.tensors.catalog import Catalog

NOT_NEEDED = "accepted, but not needed: "
_DTYPES = ("float32", "float16", "bfloat16")


def path_argument(text: str) -> Path:
    """Return the path of an argument.

    Raises:
        argparse.ArgumentTypeError: it is empty, such as an unset variable of a shell.
    """
    if not text:  # `Path("")` is the current directory
        raise argparse.ArgumentTypeError("it is an empty path; for the current directory, give .")
    return Path(text)


def merger_parsers(
    shared: argparse.ArgumentParser,
    prog: str,
    *,
    backends: tuple[str, ...],
    test: str,
    test_dir: str,
) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Return the parser of verl's or verl-omni's merger, and that of its operation `merge`.

    Args:
        shared: their options of both operations, to which the common options are added.
        prog: the module's name.
        backends: the values of `--backend`.
        test: the help of the operation `test`.
        test_dir: the help of `--test_hf_dir`.
    """
    about = f"{NOT_NEEDED}the format is detected"
    shared.add_argument("--backend", required=True, choices=backends, help=about)
    about = "the checkpoint: global_step_N/actor"
    shared.add_argument("--local_dir", type=path_argument, help=about)
    about = f"{NOT_NEEDED}no code of a model is run"
    shared.add_argument("--trust-remote-code", action="store_true", help=about)
    parser = argparse.ArgumentParser(prog=f"python -m unshard.compat.{prog}")
    operations = parser.add_subparsers(dest="operation", required=True)
    about = "merge a checkpoint and save it"
    merge = operations.add_parser("merge", parents=[shared], help=about)
    about = "the output directory; default: tmp"
    merge.add_argument("--target_dir", default="tmp", type=path_argument, help=about)
    merge.add_argument("--hf_upload_path", help="also upload it to this repository on the hub")
    merge.add_argument("--private", action="store_true", help="make that repository private")
    compare = operations.add_parser("test", parents=[shared], help=test)
    compare.add_argument("--test_hf_dir", type=path_argument, required=True, help=test_dir)
    return parser, merge


def add_options(parser: argparse.ArgumentParser, *, output: str, folder: str, dtype: str) -> None:
    """Add the options of both conversion scripts, under the names of each script."""
    parser.add_argument(output, type=path_argument, help="default: CHECKPOINT_PATH_merged")
    about = "folder of the shards; default: actor"
    parser.add_argument(folder, type=path_argument, default="actor", help=about)
    about = "default: bfloat16"
    parser.add_argument(dtype, default="bfloat16", choices=_DTYPES, help=about)


def run(main: Callable[[], None], *, failed: str = "error: ") -> NoReturn:
    """Run a command as this process; exit with 1 if it fails, like the originals.

    `failed` is the prefix of an error's message.
    """
    running.run(main, failed=failed, failure=1)


@contextmanager
def console_listener(front: Front) -> Iterator[Listener]:
    """Show the progress, warnings and errors of a command as a front writes them."""
    with front_of_errors(front), listening(quiet=False, front=front) as listener:
        yield listener


def merge_line(checkpoint: Path, output: Path, options: "MergeOptions") -> Call:
    """Return the line of `unshard merge` that is equivalent to a drop-in."""
    return Call("unshard merge", (str(checkpoint), str(output)), options.chosen)


@dataclass(frozen=True, slots=True)
class Paths:
    """The paths of a conversion script: the step, its folder of shards, the output."""

    checkpoint: Path
    actor: Path
    output: Path


def find_paths(checkpoint: Path, subfolder: Path, output: Path | None) -> Paths:
    """Return the paths of a script's arguments.

    Raises:
        UnknownFormatError: a directory does not exist.
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
            f"{step}_merged: to trainers, the default output would look like a checkpoint",
            hint="give another output: --output",
        )
    return Paths(step, actor, Path(f"{step}_merged") if output is None else output.resolve())


def convert(
    paths: Paths,
    options: "MergeOptions",
    before: Callable[["Catalog", "ShardCounts"], None],
) -> "Report":
    """Write the output of a conversion script, and show the progress.

    `before` is called with the catalog and its counts, before anything is written.
    """
    from unshard.api.inspecting import count_shards
    from unshard.api.making import PlannedMerge
    from unshard.api.merging import merge_checkpoint

    def prepare(prepared: PlannedMerge) -> PlannedMerge:
        saved = as_transformers_saves(prepared)
        catalog = saved.checkpoint.catalog
        before(catalog, count_shards(catalog))
        return saved

    front = Command({}, merge_line(paths.actor, paths.output, options))
    alone = replace(options, config="none")  # without a base, like the originals
    with console_listener(front) as listener:
        return merge_checkpoint(paths.actor, paths.output, alone, listener, before=prepare)


def print_how_to_load(output: Path) -> None:
    """Print Python code that loads the output."""
    print("\nYou can now load this model with:")
    print("  from transformers import AutoModelForCausalLM")
    print(f"  model = AutoModelForCausalLM.from_pretrained({str(output)!r})")
