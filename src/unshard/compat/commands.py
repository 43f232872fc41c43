"""What all drop-in commands share: how they end, what they advise, a config as a file."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

from unshard.cli.running import process
from unshard.compat.generation import GENERATION_CONFIG, generation_config
from unshard.errors import ConversionError, speaking
from unshard.fronts import Front, line_of
from unshard.progress import Listener
from unshard.showing import listening

if TYPE_CHECKING:
    from unshard.api import MergeOptions, Prepared

__all__ = [
    "DTYPES",
    "SavesItself",
    "as_file",
    "as_transformers_saves",
    "merge_line",
    "need_config",
    "run",
    "showing",
]

DTYPES = ("float32", "float16", "bfloat16")


class SavesItself(Protocol):
    """A config of transformers."""

    def save_pretrained(self, save_directory: str, /) -> object:
        """Write config.json into a directory."""


def run(main: Callable[[], None], *, failed: str = "error: ") -> NoReturn:
    """Run a command as this process; exit with 1 if it fails, as the originals do.

    Args:
        main: the command.
        failed: the words before an error's message, on stderr.
    """
    process.run(main, failed=failed, failure=1)


@contextmanager
def showing(front: Front) -> Iterator[Listener]:
    """Show the progress, the warnings and the errors of a command in the words of a front."""
    with speaking(front), listening(quiet=False, front=front) as listener:
        yield listener


def merge_line(checkpoint: Path, output: Path, options: "MergeOptions") -> str:
    """Return the line of `unshard merge` that does what a drop-in does."""
    return line_of("unshard merge", [str(checkpoint), str(output)], options.chosen)


def need_config(prepared: "Prepared") -> "Prepared":
    """Return what is to be made, unless it has no config: the originals stop there.

    Raises:
        ConversionError: transformers could not load the output.
    """
    if prepared.config is not None:
        return prepared
    location = prepared.checkpoint.location
    places = dict.fromkeys((location.weights_dir, location.step_dir))
    raise ConversionError(
        f"{location.place}: there is no config.json, without which the output is not a model",
        expected="config.json in " + " or ".join(f"{one} or its huggingface/" for one in places),
        hint="give it with --config FILE|DIR or --base MODEL",
    )


def as_transformers_saves(prepared: "Prepared") -> "Prepared":
    """Return what is to be made, with the generation_config.json that lmms-engine's merger writes.

    Raises:
        ConversionError: see `need_config`.
    """
    config = need_config(prepared).config
    text = None if config is None else generation_config(config.fields)
    if text is None or GENERATION_CONFIG in prepared.checkpoint.companions.files:
        return prepared
    return replace(prepared, files={**prepared.files, GENERATION_CONFIG: text})


@contextmanager
def as_file(config: SavesItself | str | Path | None) -> Iterator[Path | None]:
    """Yield a file with a config of transformers; a path, and None, as they are."""
    if config is None or isinstance(config, str | Path):
        yield None if config is None else Path(config)
        return
    with tempfile.TemporaryDirectory(prefix="_unshard-") as scratch:
        config.save_pretrained(scratch)
        yield Path(scratch) / "config.json"
