"""What all drop-in commands do alike: how they end, and how a config becomes a file."""

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from unshard.errors import UnshardError

__all__ = ["DTYPES", "SavesItself", "as_file", "run"]

DTYPES = ("float32", "float16", "bfloat16")
_INTERRUPTED = 130


class SavesItself(Protocol):
    """A config of transformers."""

    def save_pretrained(self, save_directory: str, /) -> object:
        """Write config.json into a directory."""


def run(main: Callable[[], None], *, failed: str = "error: ") -> None:
    """Run a command; exit with 1 if it fails, as the originals do.

    Args:
        main: the command.
        failed: what stands before an error's message, on stderr.
    """
    try:
        main()
    except UnshardError as error:
        print(f"{failed}{error}", file=sys.stderr)
        raise SystemExit(1) from error
    except KeyboardInterrupt as error:
        print("interrupted: nothing was left half done", file=sys.stderr)
        raise SystemExit(_INTERRUPTED) from error


@contextmanager
def as_file(config: SavesItself | str | Path | None) -> Iterator[Path | None]:
    """Yield a file with a config of transformers; a path, and None, as they are."""
    if config is None or isinstance(config, str | Path):
        yield None if config is None else Path(config)
        return
    with tempfile.TemporaryDirectory(prefix="_unshard-") as scratch:
        config.save_pretrained(scratch)
        yield Path(scratch) / "config.json"
