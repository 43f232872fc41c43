"""The files of a checkpoint whose ranks saved on several nodes: directories read as one."""

import filecmp
from collections.abc import Callable, Sequence
from pathlib import Path

from unshard.errors import CorruptError, IncompleteError

__all__ = ["files_in", "find_file"]


def files_in(roots: Sequence[Path], is_meant: Callable[[str], bool]) -> list[Path]:
    """Return the files of these names in all directories, by name.

    A file that several directories hold is taken from the first, if it is the same everywhere.

    Raises:
        CorruptError: two directories hold different files of one name.
        IncompleteError: what has such a name is no file.
    """
    names: set[str] = set()
    for root in roots:
        for path in root.iterdir():
            if not is_meant(path.name):
                continue
            if not path.is_file():
                raise IncompleteError(
                    f"{path}: is no file", hint="is it a link to one that is gone?"
                )
            names.add(path.name)
    found = (find_file(roots, name) for name in sorted(names))
    return [path for path in found if path is not None]


def find_file(roots: Sequence[Path], name: str) -> Path | None:
    """Return the file of this name, or relative path, from the first directory that has it.

    Raises:
        CorruptError: two directories hold different files of that name.
    """
    there = [root / name for root in roots if (root / name).is_file()]
    for other in there[1:]:
        if not _same(there[0], other):
            raise CorruptError(
                f"{other}: differs from {there[0]}, which has the same name",
                expected="directories that each hold other ranks' files of one checkpoint",
                hint="are these two steps, or two runs?",
            )
    return there[0] if there else None


def _same(first: Path, second: Path) -> bool:
    return first.samefile(second) or filecmp.cmp(first, second, shallow=False)
