"""The files of a checkpoint whose ranks saved on several nodes: directories read as one."""

import filecmp
from collections.abc import Callable, Sequence
from pathlib import Path

from unshard.errors import CorruptError

__all__ = ["files_in"]


def files_in(roots: Sequence[Path], is_meant: Callable[[str], bool]) -> list[Path]:
    """Return the files of these names in all directories, by name.

    A file that several directories hold is taken from the first, if it is the same everywhere.

    Raises:
        CorruptError: two directories hold different files of one name.
    """
    found: dict[str, Path] = {}
    for root in roots:
        for path in sorted(root.iterdir()):
            if not is_meant(path.name) or not path.is_file():
                continue
            first = found.setdefault(path.name, path)
            if first is not path and not _same(first, path):
                raise CorruptError(
                    f"{path}: differs from {first}, which has the same name",
                    expected="directories that each hold other ranks' files of one checkpoint",
                    hint="are these two steps, or two runs?",
                )
    return [found[name] for name in sorted(found)]


def _same(first: Path, second: Path) -> bool:
    return first.samefile(second) or filecmp.cmp(first, second, shallow=False)
