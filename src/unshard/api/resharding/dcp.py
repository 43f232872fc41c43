"""The items of DCP: those of the checkpoint again, or anew for one in another format.

Of a checkpoint of DCP, every tensor and object stays under its own name. Nothing is interpreted, so
what only the trainer knows stays where it looks for it. Of others, it is the dict that `dcp.load`
is given:

    model                 what `get_model_state_dict` returns
    optimizer             what `get_optimizer_state_dict` returns
    lr_scheduler          what the scheduler's `state_dict` returns (in one directory only)

accelerate has model and optimizer in directories of their own.

Source: `torch.distributed.checkpoint._traverse`, accelerate 1.15's `load_fsdp_model` and
`load_fsdp_optimizer`.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from unshard.api.resharding.placing import cut_dimension, placed_alone
from unshard.containers.open_files import opened
from unshard.containers.strided import read_exactly
from unshard.containers.torch_files.dcp_files import object_data
from unshard.containers.torch_files.dcp_metadata import ItemPath, SavedObject
from unshard.containers.torch_files.dtensors import Version
from unshard.containers.torch_files.writer import Plain, SavedTensor
from unshard.errors import NotMergeableError
from unshard.plan.dcp_resharding import DcpDirectory, SavedEntry
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
"""Bytes of a compressed object."""
_Items = Iterator[SavedEntry | SavedObject]


def saved_anew(
    source: Checkpoint, to: ReshardFormat, scheduler: Plain, version: Version
) -> list[DcpDirectory]:
    """Return the directories of a checkpoint in another format, which is placed (see `placing`).

    Raises:
        NotMergeableError: a value is not one that can be written.
    """
    tensors = source.catalog.tensors.items()
    model: list[SavedEntry | SavedObject] = [_saved((_MODEL, name), one) for name, one in tensors]
    state = [] if source.optimizer is None else [*_state(source.optimizer, version)]
    if to is ReshardFormat.ACCELERATE:
        several = {"pytorch_model_fsdp_0": model, "optimizer_0": state}
        return [DcpDirectory(name, items) for name, items in several.items() if items]
    return [DcpDirectory("", [*model, *state, *_objects((SCHEDULER,), scheduler, version)])]


def _saved(path: ItemPath, entry: TensorEntry) -> SavedEntry:
    return SavedEntry(path, entry, entry.dtype, cut_dimension(entry))


def _state(state: OptimizerState, version: Version) -> _Items:
    """Yield the items of an optimizer's state, in the order of its parameters, and its groups."""
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
    """Yield the items that torch makes of a value: dicts are flattened, and lists that have any.

    Raises:
        NotMergeableError: a value is not one that can be written.
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
                hint="files of ranks that stay in their format can have it: leave out --to",
            ) from error
        yield SavedObject(path, data)


def _is_item(value: Plain) -> bool:
    """Return whether torch saves a value as one item: not a dict, nor a list of dicts or tensors.

    A list inside counts as what it has; a tuple is always one item.
    """
    if not isinstance(value, list):
        return not isinstance(value, Mapping)
    return all(_is_item(part) and not isinstance(part, SavedTensor) for part in value)


def saved_again(source: Checkpoint, stack: ExitStack) -> list[DcpDirectory]:
    """Return the directories of a DCP checkpoint; the stack removes what is decompressed for it.

    Raises:
        NotMergeableError: it was saved without flattening, so torch kept one rank's part only.
        CheckpointError: a tensor has holes, or an object cannot be read.
    """
    root = dcp_root(source.location)
    return [
        DcpDirectory("" if one.weights_dir == root else one.weights_dir.name, _items(one, stack))
        for one in (source.location, *places_beside(source.location))
    ]


def _items(place: Location, stack: ExitStack) -> list[SavedEntry | SavedObject]:
    """Return everything that a directory has, in its order."""
    metadata = read_metadata(metadata_files(place))
    if not metadata.steps:
        raise NotMergeableError(
            f"{place.weights_dir}: was saved without flattening (flatten_state_dict=False)",
            expected="tensors under names of their own",
            hint="give --to FORMAT, which writes the model alone",
        )
    found, _ = read_tensors(metadata, {name: name for name in metadata.tensors}, place.roots)
    catalog = Catalog("", 1, found, roots=place.roots)
    check_coverage(catalog)
    if inflated_bytes(catalog):
        catalog = inflate(catalog, scratch_directory(stack) / "items")
    tensors = catalog.tensors
    items: list[SavedEntry | SavedObject] = []
    for name, path in metadata.steps.items():
        if name in metadata.objects:
            items.append(SavedObject(path, _data(*place_of(metadata, place, name), name)))
        elif name in tensors:
            entry = placed_alone(tensors[name])
            items.append(SavedEntry(path, entry, entry.dtype, cut_dimension(entry)))
    return items


def _data(path: Path, item: Item, name: str) -> bytes:
    """Return what an object contains."""
    if item.compressed:
        return inflated_object(path, item, name, _LARGEST)
    with opened(path) as file:
        data = bytearray(item.length)
        read_exactly(file, item.offset, memoryview(data))
        return bytes(data)
