"""DCP of a checkpoint in another format, in the dict that `dcp.load` is given.

    model                 what `get_model_state_dict` returns
    optimizer             what `get_optimizer_state_dict` returns
    lr_scheduler          what the scheduler's `state_dict` returns (in one directory only)

accelerate has model and optimizer in directories of their own.

Source: `torch.distributed.checkpoint._traverse`, accelerate 1.15's `load_fsdp_model` and
`load_fsdp_optimizer`.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from unshard.api.resharding.anew.placing import cut_dimension
from unshard.api.resharding.anew.ranks import add_companions
from unshard.api.resharding.anew.training import add_training, read_training
from unshard.api.resharding.formats import ReshardFormat
from unshard.api.resharding.target import Target
from unshard.api.resharding.writing import Addition, Writing
from unshard.containers.torch_files.dcp_files import object_data
from unshard.containers.torch_files.dcp_metadata import ItemPath, SavedObject
from unshard.containers.torch_files.dtensors import Version
from unshard.containers.torch_files.writer import Plain, SavedTensor
from unshard.errors import NotMergeableError
from unshard.plan.dcp_resharding import DcpDirectory, SavedEntry, lay_out_directories
from unshard.read.dcp.scheduler import SCHEDULER
from unshard.read.open import Checkpoint
from unshard.read.optimizer_state import OptimizerState
from unshard.tensors.catalog import TensorEntry

_MODEL, _OPTIMIZER = "model", "optimizer"
_Items = Iterator[SavedEntry | SavedObject]


def dcp_anew(source: Checkpoint, target: Target, to: ReshardFormat, output: Path) -> Writing:
    """Return what is written of a checkpoint that is placed (see `placing`)."""
    world, version = len(target.meshes), target.version
    training = read_training(source)
    model: list[SavedEntry | SavedObject] = [*_model(source)]
    state = [] if source.optimizer is None else [*_state(source.optimizer, version)]
    if to is ReshardFormat.ACCELERATE:
        several = {"pytorch_model_fsdp_0": model, "optimizer_0": state}
        directories = [DcpDirectory(name, items) for name, items in several.items() if items]
    else:
        scheduler = [*_objects((SCHEDULER,), training.scheduler, version)]
        directories = [DcpDirectory("", [*model, *state, *scheduler])]
    place = PurePosixPath(output.absolute())
    made, metadata = lay_out_directories(directories, world, version, place)
    files = Addition(data=metadata)
    add_companions(source, "", files)
    add_training(training, to, world, target.meshes[0].device_type, files)
    return Writing(made, files)


def _model(source: Checkpoint) -> Iterator[SavedEntry]:
    for name, entry in source.catalog.tensors.items():
        yield _saved((_MODEL, name), entry)


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
