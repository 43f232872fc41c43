"""DCP checkpoints saved with `flatten_state_dict=False`: whole dicts, each pickled as one object.

Only rank 0's copy of an object is kept. Of plain tensors that is all there is; of DTensors it is
rank 0's part, and the others are lost.
"""

from pathlib import Path

from unshard.containers.torch_files.reader import read_torch_file
from unshard.errors import IncompleteError, NotMergeableError, raise_all
from unshard.read.dcp.metadata import MODEL_KEYS, DcpMetadata
from unshard.read.format import Location, ReadOptions
from unshard.read.torch_save.gathering import Gathering
from unshard.read.torch_save.state_dict import tensors_of
from unshard.read.torch_save.values import items_of
from unshard.read.torch_save.views import is_tensor
from unshard.tensors.catalog import ByteRange, Catalog, Skipped

__all__ = ["holds_model", "read_object"]


def holds_model(metadata: DcpMetadata) -> bool:
    """Return whether a save that was not flattened keeps the model as one object."""
    return not metadata.paths and any(name in metadata.objects for name in MODEL_KEYS)


def read_object(metadata: DcpMetadata, location: Location, options: ReadOptions) -> Catalog:
    """Read the object that holds the model's state dict.

    Raises:
        NotMergeableError: no object is a model's, or it holds one rank's part of sharded tensors.
        CheckpointError: its file is missing or damaged.
    """
    where = location.weights_dir
    names = [name for name in MODEL_KEYS if name in metadata.objects]
    if not names:
        raise NotMergeableError(
            f"{where}: has no tensors, only {len(metadata.objects)} pickled objects",
            found=", ".join(list(metadata.objects)[:8]),
            hint="if this is the optimizer's directory, give the one above it",
        )
    (name, *_) = names
    window = _window(metadata, location, name)
    archive = read_torch_file(window.path, offset=window.offset, length=window.length)
    items = items_of(archive.value)
    if items is None or not any(is_tensor(value) for value in items.values()):
        raise NotMergeableError(f"{window.path}: {name} is not a state dict")
    table = tensors_of(archive, items, rank=0, file_number=0, allowed=options.allowed_globals)
    gathered = Gathering()
    gathered.add(table)
    raise_all(NotMergeableError, f"{where}: {name} cannot be merged", gathered.problems)
    if table.world_size > 1:
        raise NotMergeableError(
            f"{where}: {name} was saved as one object (flatten_state_dict=False)",
            expected="the parts of all ranks",
            found=f"rank 0's part of {table.world_size} ranks; torch kept no other",
            hint="save it again with the default planner",
        )
    others = [Skipped(other, "not model weights: object") for other in metadata.objects]
    others += [Skipped(other, "not model weights: tensor") for other in metadata.tensors]
    return Catalog(
        writer="torch",
        world_size=1,
        tensors={key: draft.entry((window.path,)) for key, draft in gathered.drafts.items()},
        skipped=(*gathered.skipped.values(), *(one for one in others if one.fqn != name)),
        archives=(window,),
        notes=(f"{where}: saved without flattening; the tensors are rank 0's",),
    )


def _window(metadata: DcpMetadata, location: Location, name: str) -> ByteRange:
    item = metadata.items.get((name, None))
    paths = [] if item is None else [root / item.path for root in location.roots]
    found: Path | None = next((path for path in paths if path.is_file()), None)
    if item is None or found is None:
        raise IncompleteError(f"{location.weights_dir}: the file that contains {name} is missing")
    if item.compressed:
        raise NotMergeableError(
            f"{found}: {name} is a compressed object, which unshard does not read"
        )
    if item.offset + item.length > found.stat().st_size:
        raise IncompleteError(f"{found}: truncated: {name} is outside the file")
    return ByteRange(found, item.offset, item.length)
