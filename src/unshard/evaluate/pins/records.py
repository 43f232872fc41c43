"""A pin, and its record `pin.json`, which another user or an archive may have put there."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unshard.errors import CorruptError
from unshard.evaluate.pins.files import Identity, changed_files
from unshard.evaluate.run_folder import RunRecord
from unshard.write.staging.beneath import check_path

__all__ = ["Pin", "fields_of", "parse_pin"]

_LATEST = 2.0**40  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class Pin:
    """A checkpoint that is kept.

    Attributes:
        path: the linked checkpoint: what is merged and evaluated.
        run: the directory of the run that it belongs to.
        checkpoint: the original, which may have been removed.
        step: the training step, if it is known.
        created: seconds since the epoch.
        files: inode, size and mtime in ns of each file, by path relative to `path`.
        owner: the server that made it; empty: a client.
        is_ours: whether this user made it in that place; else it is never removed.
    """

    path: Path
    run: Path
    checkpoint: Path
    step: int | None
    created: float
    files: Mapping[str, Identity]
    owner: str = ""
    is_ours: bool = True

    @property
    def directory(self) -> Path:
        """Return the directory of the pin, which holds its record and the linked checkpoint."""
        return self.path.parent

    @property
    def name(self) -> str:
        """Return the name that the pin has among those of its run."""
        return self.directory.name

    def changed(self) -> list[str]:
        """Return the files that have changed since: see `files.changed_files`."""
        return changed_files(self.path, self.files)


def fields_of(pin: Pin) -> dict[str, object]:
    """Return the fields of a pin's record."""
    return {
        "checkpoint": str(pin.checkpoint),
        "name": pin.checkpoint.name,
        "step": pin.step,
        "created": pin.created,
        "files": pin.files,
        "owner": pin.owner,
    }


def parse_pin(record: RunRecord, run: Path, directory: Path) -> Pin:
    """Return the pin that a record describes; another user may have written it.

    Raises:
        CorruptError: it is not the record of a pin.
    """
    match record.fields:
        case {
            "checkpoint": str(checkpoint),
            "name": str(name),
            "step": int() | None as step,
            "created": int() | float() as created,
            "files": dict(files),
            "owner": str(owner),
        } if _is_inside(name) and "/" not in name and 0 <= created < _LATEST and step is not True:
            found = {inside: _identity(inside, values) for inside, values in files.items()}
            path, original = directory / name, Path(checkpoint)
            return Pin(path, run, original, step, created, found, owner, record.is_ours)
    raise CorruptError("not the record of a pin")


def _is_inside(path: str) -> bool:
    try:
        check_path(path)
    except ValueError:
        return False
    return True


def _identity(inside: str, values: object) -> Identity:
    match values:
        case [int(inode), int(size), int(mtime)] if _is_inside(inside):
            return inode, size, mtime
    raise CorruptError(f"not a file of a pin: {inside!r:.100}")
