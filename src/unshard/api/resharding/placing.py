"""Decide how tensors are cut for another format.

Placements in rank files are kept. Other formats, such as DCP and whole models, record none: a
tensor is then cut along the dimension along which it is stored in parts, or along the first.
Buffers stay whole: FSDP never cuts them, and torch does not load a DTensor into a buffer.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

import numpy as np

from unshard.api.resharding.target import PLAIN_MESH
from unshard.api.sources import stored_recipes
from unshard.convert.heads import left_out_heads
from unshard.convert.names import training_names
from unshard.convert.recipes import Take
from unshard.errors import NotMergeableError
from unshard.read.open import Checkpoint
from unshard.read.optimizer_state import OptimizerState, split_name
from unshard.tensors.catalog import Catalog, TensorEntry
from unshard.tensors.dtypes import DTypeKind
from unshard.tensors.placements import Shard, Sharding, StridedShard


def placed(source: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose tensors are placed, under their names in training.

    Parameters of its optimizer that have names are numbered in the order of the groups.

    Raises:
        NotMergeableError: its weights are quantised.
    """
    config = source.config
    if config is not None and "quantization_config" in config.fields:
        raise NotMergeableError(
            f"{source.location.weights_dir}: its weights are quantised, and cannot be trained",
            hint="start from the model in bfloat16 or float32",
        )
    tensors = dict(source.catalog.tensors)
    if not source.location.format.sharded:  # a model of the hub
        tensors = _in_training(source, tensors)
    any_cut = any(entry.sharding is not None or _dims_cut(entry) for entry in tensors.values())
    groups = () if source.optimizer is None else source.optimizer.groups
    parameters = frozenset(name for group in groups for name in group.params)
    frozen = source.location.format.frozen(source.location) if any_cut else None
    if frozen is not None:
        parameters = _with_tied_names(source, parameters.union(frozen))
    shardings = {
        name: _sharding(entry, parameters, any_cut=any_cut) for name, entry in tensors.items()
    }
    model = {name: replace(entry, sharding=shardings[name]) for name, entry in tensors.items()}
    state = None if source.optimizer is None else _state(source.optimizer, model)
    catalog = replace(source.catalog, tensors=model)
    return replace(source, catalog=catalog, optimizer=state)


def placed_again(source: Checkpoint, world_size: int) -> Checkpoint:
    """Return a checkpoint of rank files with its own placements, for another number of ranks.

    FSDP1 on one rank saves whole tensors without DTensors, which are placed.

    Raises:
        NotMergeableError: no device mesh describes the ranks' parts of a tensor.
    """
    entries = source.catalog.tensors.values()
    for entry in entries:
        if entry.sharding is None and (entry.chunks.sizes != entry.shape).any():
            raise NotMergeableError(
                f"tensor {entry.fqn}: every rank has a different part, and no device mesh",
                expected="a DTensor, or a tensor that every rank has whole",
                hint="write it for torch.distributed.checkpoint: --to dcp",
            )
    is_whole = source.catalog.world_size == 1 and not any(entry.sharding for entry in entries)
    if not is_whole or world_size == 1:
        return source
    state, source = source.optimizer, placed(source)
    if state is None or source.optimizer is None or state.numbers:
        return source
    return replace(source, optimizer=replace(source.optimizer, numbers={}))  # names stay


def unplaced(source: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose tensors are whole, as FSDP1 on one rank loads them."""
    state = source.optimizer
    if state is not None:
        state = replace(state, catalog=_unsharded(state.catalog))
    return replace(source, catalog=_unsharded(source.catalog), optimizer=state)


def _unsharded(catalog: Catalog) -> Catalog:
    tensors = {name: replace(entry, sharding=None) for name, entry in catalog.tensors.items()}
    return replace(catalog, tensors=tensors)


def cut_dimension(entry: TensorEntry) -> int | None:
    """Return the dimension along which a placed tensor is cut; None if each rank has it whole."""
    if entry.sharding is None:
        return None
    cuts = (one for one in entry.sharding.placements if isinstance(one, Shard | StridedShard))
    return min((placement.dim for placement in cuts), default=None)


def placed_alone(entry: TensorEntry) -> TensorEntry:
    """Return a tensor placed as it is stored: cut if it is stored in parts, or else whole."""
    dims = _dims_cut(entry)
    return replace(entry, sharding=_cut_along(dims) if dims else None)


def _cut_along(dims: Sequence[int]) -> Sharding:
    """Return the sharding along the only dimension, or else along the first of the tensor."""
    return Sharding(PLAIN_MESH, (Shard(dims[0] if len(dims) == 1 else 0),))


def _in_training(source: Checkpoint, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors of a model of the hub under training names, with tied heads."""
    renamed = training_names(stored_recipes(tensors), source.config)
    entries = {
        name: replace(recipe.entry, fqn=name)
        for name, recipe in renamed.items()
        if isinstance(recipe, Take)
    }
    for head, original in left_out_heads(entries, source.config).items():
        entries[head] = replace(entries[original], fqn=head)
    return entries


def _with_tied_names(source: Checkpoint, parameters: frozenset[str]) -> frozenset[str]:
    """Return the names of parameters, and all other names of the same stored tensors."""
    tensors = source.catalog.tensors
    starts = {_start(tensors[name]) for name in parameters if name in tensors}
    return parameters.union(name for name, entry in tensors.items() if _start(entry) in starts)


def _start(entry: TensorEntry) -> tuple[object, ...]:
    """Return a tensor's shape, file and offset, which are equal for tied weights."""
    chunks = entry.chunks
    return (entry.shape, *((int(chunks.file[0]), int(chunks.start[0])) if len(chunks) else ()))


def _dims_cut(entry: TensorEntry) -> list[int]:
    """Return the dimensions along which the tensor is stored in parts."""
    dims: list[int] = np.flatnonzero(entry.chunks.offsets.any(axis=0)).tolist()
    return dims


def _sharding(entry: TensorEntry, parameters: Container[str], *, any_cut: bool) -> Sharding | None:
    """Return the sharding of a tensor of the model; None for a buffer, which stays whole."""
    if entry.sharding is not None:
        return entry.sharding
    dims = _dims_cut(entry)
    if not dims and (not entry.shape or entry.dtype.kind is not DTypeKind.FLOAT):
        return None
    # If parameters are cut, an uncut tensor with several rows is a buffer.
    if not dims and any_cut and entry.fqn not in parameters and entry.shape[0] > 1:
        return None
    return _cut_along(dims)


def _state(state: OptimizerState, model: Mapping[str, TensorEntry]) -> OptimizerState:
    """Return an optimizer's state placed like its parameters, which are numbered."""
    tensors = {}
    by_shape = {entry.shape: entry for entry in model.values() if entry.sharding is not None}
    for name, entry in state.catalog.tensors.items():
        # A number does not identify a parameter: its state is placed like one of the same shape.
        parameter = model.get(split_name(name)[0], by_shape.get(entry.shape))
        sharding = entry.sharding
        if sharding is None and entry.shape:
            dims = _dims_cut(entry)
            sharding = Sharding(PLAIN_MESH, (Shard(dims[0]),)) if dims else None
            if parameter is not None and entry.shape == parameter.shape:
                sharding = parameter.sharding
        tensors[name] = replace(entry, sharding=sharding)
    every = [name for group in state.groups for name in group.params]
    numbers = dict(state.numbers) or {name: number for number, name in enumerate(every)}
    return replace(state, catalog=replace(state.catalog, tensors=tensors), numbers=numbers)
