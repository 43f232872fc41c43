"""What all drop-in commands do alike: how they end, what they advise, a config as a file."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

from unshard.cli import process
from unshard.fronts import line_of

if TYPE_CHECKING:
    from unshard.api import MergeOptions

__all__ = ["DTYPES", "SavesItself", "as_file", "merge_line", "run"]

DTYPES = ("float32", "float16", "bfloat16")


class SavesItself(Protocol):
    """A config of transformers."""

    def save_pretrained(self, save_directory: str, /) -> object:
        """Write config.json into a directory."""


def run(main: Callable[[], None], *, failed: str = "error: ") -> NoReturn:
    """Run a command as this process; exit with 1 if it fails, as the originals do.

    Args:
        main: the command.
        failed: what stands before an error's message, on stderr.
    """
    process.run(main, failed=failed, failure=1)


def merge_line(checkpoint: Path, output: Path, options: "MergeOptions") -> str:
    """Return the line of `unshard merge` that does what a drop-in does."""
    return line_of("unshard merge", [str(checkpoint), str(output)], options.chosen)


@contextmanager
def as_file(config: SavesItself | str | Path | None) -> Iterator[Path | None]:
    """Yield a file with a config of transformers; a path, and None, as they are."""
    if config is None or isinstance(config, str | Path):
        yield None if config is None else Path(config)
        return
    with tempfile.TemporaryDirectory(prefix="_unshard-") as scratch:
        config.save_pretrained(scratch)
        yield Path(scratch) / "config.json"
