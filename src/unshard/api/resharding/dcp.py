"""The items of a DCP output.

The items of a DCP checkpoint are copied under their own names, without interpretation, so that
trainer-specific state keeps its keys. For other formats, the items are those of a dict for
`dcp.load`:

    model                 the result of `get_model_state_dict`
    optimizer             the result of `get_optimizer_state_dict`
    lr_scheduler          the scheduler's `state_dict` (in one directory only)

accelerate has model and optimizer in directories of their own.

Source: `torch.distributed.checkpoint._traverse`, accelerate 1.15's `load_fsdp_model` and
`load_fsdp_optimizer`.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from unshard.api.resharding.placing import cut_dimension, placed_alone
from unshard.api.resharding.target import ReshardTarget
from unshard.containers.open_files import opened
from unshard.containers.strided import read_exactly
from unshard.containers.torch_files.dcp_files import object_data
from unshard.containers.torch_files.dcp_metadata import ItemPath, SavedObject
from unshard.containers.torch_files.dtensors import Version
from unshard.containers.torch_files.writer import Plain, SavedTensor
from unshard.errors import NotMergeableError
from unshard.plan.resharding import DcpDirectory, SavedEntry
from unshard.read.dcp.item_table import Item
from unshard.read.dcp.items import inflate, inflated_bytes
from unshard.read.dcp.metadata import read_metadata
from unshard.read.dcp.optimizer import dcp_root, inflated_object, place_of, places_beside
from unshard.read.dcp.scheduler import SCHEDULER
from unshard.read.dcp.tensors import metadata_files, read_tensors
from unshard.read.format import Location, ReshardFormat
from unshard.read.open import Checkpoint, check_coverage
from unshard.read.optimizer_state import OptimizerState
from unshard.tensors.catalog import Catalog, TensorEntry
from unshard.write.stage import scratch_directory

_MODEL, _OPTIMIZER = "model", "optimizer"
_LARGEST = 1 << 30
"""Bound on the bytes of a decompressed object."""
_Items = Iterator[SavedEntry | SavedObject]


def saved_anew(source: Checkpoint, target: ReshardTarget, scheduler: Plain) -> list[DcpDirectory]:
    """Return the directories for a checkpoint in another format that is placed (see `placing`).

    Raises:
        NotMergeableError: a value cannot be written.
    """
    tensors, version = source.catalog.tensors.items(), target.version
    model: list[SavedEntry | SavedObject] = [_saved((_MODEL, name), one) for name, one in tensors]
    state = [] if source.optimizer is None else [*_state(source.optimizer, version)]
    if target.format is ReshardFormat.ACCELERATE:
        several = {"pytorch_model_fsdp_0": model, "optimizer_0": state}
        return [DcpDirectory(name, items) for name, items in several.items() if items]
    return [DcpDirectory("", [*model, *state, *_objects((SCHEDULER,), scheduler, version)])]


def _saved(path: ItemPath, entry: TensorEntry) -> SavedEntry:
    return SavedEntry(path, entry, entry.dtype, cut_dimension(entry))


def _state(state: OptimizerState, version: Version) -> _Items:
    """Yield the items of an optimizer's state in the order of its parameters, then its groups."""
    tensors = state.tensors
    for parameter in state.parameters:
        path = (_OPTIMIZER, "state", parameter)
        for key, entry in tensors.get(parameter, {}).items():
            yield _saved((*path, key), entry)
        yield from _objects(path, state.values.get(parameter, {}), version)
    for number, group in enumerate(state.groups):
        fields = {**group.values, "params": [*group.params]}
        yield from _objects((_OPTIMIZER, "param_groups", number), fields, version)


def _objects(path: ItemPath, value: Plain, version: Version) -> Iterator[SavedObject]:
    """Yield the items into which torch flattens a value: dicts, and lists that contain dicts.

    Raises:
        NotMergeableError: a value cannot be written.
    """
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _objects((*path, str(key)), part, version)
    elif isinstance(value, list) and not _is_item(value):
        for index, part in enumerate(value):
            yield from _objects((*path, index), part, version)
    elif value is not None or len(path) > 1:
        try:
            data = object_data(value, version)
        except (TypeError, ValueError) as error:
            where = ".".join(map(str, path))
            raise NotMergeableError(
                f"{where}: cannot be written: {error}",
                hint="rank files in their own format can contain it: leave out --to",
            ) from error
        yield SavedObject(path, data)


def _is_item(value: Plain) -> bool:
    """Return whether torch saves a value as one item: not a dict, nor a list of dicts or tensors.

    Lists inside a list are searched, too; a tuple is always one item.
    """
    if not isinstance(value, list):
        return not isinstance(value, Mapping)
    return all(_is_item(part) and not isinstance(part, SavedTensor) for part in value)


def saved_again(source: Checkpoint, stack: ExitStack) -> list[DcpDirectory]:
    """Return the directories of a DCP checkpoint; the stack removes decompressed files.

    Raises:
        NotMergeableError: it was saved without flattening, so torch kept only one rank's part.
        CheckpointError: a tensor has holes, or an object cannot be read.
    """
    root = dcp_root(source.location)
    return [
        DcpDirectory("" if at.weights_dir == root else at.weights_dir.name, _items(at, stack))
        for at in (source.location, *places_beside(source.location))
    ]


def _items(location: Location, stack: ExitStack) -> list[SavedEntry | SavedObject]:
    """Return all items of a directory, in its order."""
    metadata = read_metadata(metadata_files(location))
    if not metadata.steps:
        raise NotMergeableError(
            f"{location.weights_dir}: was saved without flattening (flatten_state_dict=False)",
            expected="an item for each tensor",
            hint="give --to FORMAT, which writes the model alone",
        )
    own_names = {name: name for name in metadata.tensors}
    entries, _ = read_tensors(metadata, own_names, location.roots)
    catalog = Catalog("", 1, entries, roots=location.roots)
    check_coverage(catalog)
    if inflated_bytes(catalog):
        catalog = inflate(catalog, scratch_directory(stack) / "items")
    tensors = catalog.tensors
    items: list[SavedEntry | SavedObject] = []
    for name, path in metadata.steps.items():
        if name in metadata.objects:
            items.append(SavedObject(path, _data(*place_of(metadata, location, name), name)))
        elif name in tensors:
            entry = placed_alone(tensors[name])
            items.append(SavedEntry(path, entry, entry.dtype, cut_dimension(entry)))
    return items


def _data(path: Path, item: Item, name: str) -> bytes:
    """Return the bytes of an object."""
    if item.compressed:
        return inflated_object(path, item, name, _LARGEST)
    with opened(path) as file:
        data = bytearray(item.length)
        read_exactly(file, item.offset, memoryview(data))
        return bytes(data)
