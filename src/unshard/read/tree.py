"""The folders of a tree: the only I/O of a search for a checkpoint.

Formats and searches use only these names, so tests can replace the disk by a mapping of folders.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from operator import methodcaller
from pathlib import Path

from unshard.containers.json_file import json_object
from unshard.errors import CorruptError

LONGEST_TEXT = 4096
"""The most characters that are read of a text file."""


class Tree:
    """Folders and files, cached when first asked for.

    A trainer may remove directories meanwhile; a removed directory is empty.

    Attributes:
        is_dir, is_file, is_link: the same as those of `Path`.
        size: of a file, in bytes.
        text: the beginning of a text file; None if there is none, or if it cannot be read.
        fields: of a JSON file; empty if it cannot be read.
        exists: whether something exists now; this is not cached.
        resolve: the path without links.
    """

    def __init__(self) -> None:
        self._inside: dict[Path, Mapping[str, Path] | OSError] = {}
        self.is_dir: Callable[[Path], bool] = cache(methodcaller("is_dir"))
        self.is_file: Callable[[Path], bool] = cache(methodcaller("is_file"))
        self.is_link: Callable[[Path], bool] = cache(methodcaller("is_symlink"))
        self.size: Callable[[Path], int] = cache(lambda path: path.stat().st_size)
        self.text: Callable[[Path], str | None] = cache(_text)
        self.fields: Callable[[Path], Mapping[str, object]] = cache(_fields)
        self.exists: Callable[[Path], bool] = methodcaller("exists")
        self.resolve: Callable[[Path], Path] = methodcaller("resolve")

    def inside(self, folder: Path) -> Mapping[str, Path]:
        """Return the paths in a folder, sorted by name; empty if it is not a folder.

        Raises:
            OSError: it may not be read.
        """
        if folder not in self._inside:
            try:
                paths = sorted(folder.iterdir()) if folder.is_dir() else []
                self._inside[folder] = {path.name: path for path in paths}
            except FileNotFoundError:
                self._inside[folder] = {}
            except OSError as error:
                self._inside[folder] = error
        paths_or_error = self._inside[folder]
        if isinstance(paths_or_error, OSError):
            raise paths_or_error
        return paths_or_error

    def glob(self, folder: Path, pattern: str) -> Iterator[Path]:
        """Yield the paths that match a relative pattern; none in folders that may not be read."""
        first, _, rest = pattern.partition("/")
        with suppress(PermissionError):
            for name, path in self.inside(folder).items():
                if fnmatchcase(name, first):
                    yield from self.glob(path, rest) if rest else (path,)


def _text(path: Path) -> str | None:
    with suppress(OSError):  # missing, or just removed
        if path.is_file():
            with path.open(encoding="utf-8", errors="replace") as stream:
                return stream.read(LONGEST_TEXT)
    return None


def _fields(path: Path) -> Mapping[str, object]:
    with suppress(CorruptError):
        return json_object(path)
    return {}
