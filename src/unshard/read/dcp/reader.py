"""The torch DCP format, recognised by names; its readers are imported on demand."""

from typing import TYPE_CHECKING

from unshard.containers.torch_files.writer import Plain
from unshard.read.dcp.names import ACCELERATE, METADATA, UNFINISHED
from unshard.read.format import (
    Format,
    Location,
    ReadOptions,
    ReshardFormat,
    by_name,
    has_file,
    unfinished_file,
)
from unshard.tensors.catalog import Catalog
from unshard.with_notes import WithNotes

if TYPE_CHECKING:
    from unshard.read.optimizer_state import SavedState


def _claims(name: str) -> bool:
    if name.endswith(".distcp"):
        return True
    return any(pattern.fullmatch(name) for pattern in (METADATA, UNFINISHED))


def _missing(location: Location) -> str | None:
    """Return a message if `.metadata` is missing, which torch writes last."""
    names = {path.name for path in location.weights_dir.iterdir()}
    if not any(name.endswith(".distcp") for name in names):
        return unfinished_file(location)
    is_done = ".metadata" in names and ".metadata.tmp" not in names
    return None if is_done else ".metadata is missing"


def _reshard_format(location: Location, _: Catalog) -> ReshardFormat:
    is_inner = location.weights_dir.name.startswith(ACCELERATE)
    return ReshardFormat.ACCELERATE if is_inner else ReshardFormat.DCP


def _read(location: Location, options: ReadOptions) -> Catalog:
    from unshard.read.dcp.model import read

    return read(location, options)


def _read_optimizer(location: Location, *_: object) -> "SavedState | None":
    from unshard.read.dcp.optimizer import places_beside, read_optimizer

    return read_optimizer([location, *places_beside(location)])


def _read_scheduler(location: Location) -> WithNotes[Plain]:
    from unshard.read.dcp.scheduler import read_scheduler

    return read_scheduler(location)


DCP = Format(
    "torch DCP",
    has_file(_claims),
    _read,
    by_name(_claims),
    missing=_missing,
    optimizer=_read_optimizer,
    scheduler=_read_scheduler,
    reshard_format=_reshard_format,
)
