"""The sharded safetensors format, recognised by names; its readers are imported on demand."""

from typing import TYPE_CHECKING

from unshard.read.format import Format, Location, ReadOptions, by_name, has_file
from unshard.read.safetensors_shards.names import is_shard_name
from unshard.tensors.catalog import Catalog

if TYPE_CHECKING:
    from unshard.read.optimizer_state import SavedState


def _read(location: Location, options: ReadOptions) -> Catalog:
    from unshard.read.safetensors_shards.weights import read

    return read(location, options)


def _read_optimizer(location: Location, *_: object) -> "SavedState | None":
    from unshard.read.dcp.optimizer import places_beside, read_optimizer

    return read_optimizer(places_beside(location))


SAFETENSORS_SHARDS = Format(
    "sharded safetensors",
    has_file(is_shard_name),
    _read,
    by_name(is_shard_name),
    optimizer=_read_optimizer,
)
