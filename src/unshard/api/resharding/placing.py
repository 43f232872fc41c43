"""Decide how tensors are cut for another format than the one they came in.

What files of ranks state is kept. Where a format states no placements, as DCP and whole models do
not, a tensor is cut along the dimension along which it is stored in parts, or else the first.
Buffers stay whole: FSDP never cuts them, and torch does not load a DTensor into one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from unshard.api.resharding.target import PLAIN_MESH
from unshard.convert.heads import left_out_heads
from unshard.convert.names import training_names
from unshard.convert.recipes import Take, take
from unshard.errors import NotMergeableError
from unshard.read.open import Checkpoint
from unshard.read.optimizer_state import OptimizerState, split_name
from unshard.tensors.catalog import Catalog, TensorEntry
from unshard.tensors.dtypes import DTypeKind
from unshard.tensors.placements import Shard, Sharding, StridedShard


def placed(source: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose tensors are placed, under their names in training.

    The parameters of its optimizer are numbered in the order of the groups, if they have names.

    Raises:
        NotMergeableError: its weights are quantised.
    """
    config = source.config
    if config is not None and "quantization_config" in config.fields:
        raise NotMergeableError(
            f"{source.location.weights_dir}: its weights are quantised, which is not for training",
            hint="start from the model in bfloat16 or float32",
        )
    tensors = dict(source.catalog.tensors)
    if not source.location.format.sharded:  # of the hub
        tensors = _in_training(source, tensors)
    are_cut = any(one.sharding is not None or _dims_cut(one) for one in tensors.values())
    groups = () if source.optimizer is None else source.optimizer.groups
    known = frozenset(name for group in groups for name in group.params)
    frozen = source.location.format.frozen(source.location) if are_cut else None
    if frozen is not None:
        known = _whole(source, known.union(frozen))
    placings = {name: _sharding(entry, known, are_cut=are_cut) for name, entry in tensors.items()}
    model = {name: replace(one, sharding=placings[name]) for name, one in tensors.items()}
    state = None if source.optimizer is None else _state(source.optimizer, model)
    catalog = replace(source.catalog, tensors=model)
    return replace(source, catalog=catalog, optimizer=state)


def placed_again(source: Checkpoint, world_size: int) -> Checkpoint:
    """Return a checkpoint of files of ranks as placed as it is, for files of other ranks.

    Raises:
        NotMergeableError: ranks have parts of a tensor that no device mesh describes.
    """
    _refuse_parts(source)
    if not _is_whole(source) or world_size == 1:
        return source
    state, source = source.optimizer, placed(source)
    if state is None or source.optimizer is None or state.numbers:
        return source
    return replace(source, optimizer=replace(source.optimizer, numbers={}))  # it has names


def _refuse_parts(source: Checkpoint) -> None:
    """Refuse files of ranks with parts that no device mesh describes.

    Raises:
        NotMergeableError: there are such.
    """
    for entry in source.catalog.tensors.values():
        if entry.sharding is None and (entry.chunks.sizes != entry.shape).any():
            raise NotMergeableError(
                f"tensor {entry.fqn}: every rank has another part of it, and no device mesh",
                expected="a DTensor, or a tensor that every rank has whole",
                hint="write it for torch.distributed.checkpoint: --to dcp",
            )


def _is_whole(source: Checkpoint) -> bool:
    """Return whether one rank saved files of ranks without DTensors, as FSDP1 alone does."""
    tensors = source.catalog.tensors.values()
    return source.catalog.world_size == 1 and not any(one.sharding for one in tensors)


def unplaced(source: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose tensors are whole, as FSDP1 on one rank loads them."""
    catalog, state = source.catalog, source.optimizer
    if state is not None:
        state = replace(state, catalog=replace(state.catalog, tensors=_plain(state.catalog)))
    return replace(source, catalog=replace(catalog, tensors=_plain(catalog)), optimizer=state)


def _plain(catalog: Catalog) -> dict[str, TensorEntry]:
    return {name: replace(one, sharding=None) for name, one in catalog.tensors.items()}


def cut_dimension(entry: TensorEntry) -> int | None:
    """Return the dimension along which a placed tensor is cut; None if each rank has it whole."""
    if entry.sharding is None:
        return None
    cut = {one.dim for one in entry.sharding.placements if isinstance(one, Shard | StridedShard)}
    return min(cut, default=None)


def placed_alone(entry: TensorEntry) -> TensorEntry:
    """Return a tensor placed as it is stored: cut if it is stored in parts, and else whole."""
    dims = _dims_cut(entry)
    sharding = Sharding(PLAIN_MESH, (Shard(dims[0] if len(dims) == 1 else 0),)) if dims else None
    return replace(entry, sharding=sharding)


def _in_training(source: Checkpoint, tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors of a model of the hub as training has them: other names, tied heads."""
    renamed = training_names({name: take(one) for name, one in tensors.items()}, source.config)
    entries = {
        name: replace(recipe.entry, fqn=name)
        for name, recipe in renamed.items()
        if isinstance(recipe, Take)
    }
    for head, original in left_out_heads(entries, source.config).items():
        entries[head] = replace(entries[original], fqn=head)
    return entries


def _whole(source: Checkpoint, known: frozenset[str]) -> frozenset[str]:
    """Return known parameters, which may be stored whole, and their other names."""
    tensors = source.catalog.tensors
    places = {_place(tensors[name]) for name in known if name in tensors}
    return known.union(name for name, one in tensors.items() if _place(one) in places)


def _place(entry: TensorEntry) -> tuple[object, ...]:
    """Return where a tensor begins; the same of tied ones."""
    chunks = entry.chunks
    return (entry.shape, *((int(chunks.file[0]), int(chunks.start[0])) if len(chunks) else ()))


def _dims_cut(entry: TensorEntry) -> list[int]:
    """Return the dimensions along which its chunks differ."""
    found: list[int] = np.flatnonzero(entry.chunks.offsets.any(axis=0)).tolist()
    return found


def _sharding(entry: TensorEntry, known: Iterable[str], *, are_cut: bool) -> Sharding | None:
    """Return how a tensor of the model is placed; None: each rank has it whole, as a buffer."""
    if entry.sharding is not None:
        return entry.sharding
    dims = _dims_cut(entry)
    if not dims and (not entry.shape or entry.dtype.kind is not DTypeKind.FLOAT):
        return None
    # Of a checkpoint whose parameters are cut, a tensor of several rows that is not is a buffer.
    if not dims and are_cut and entry.fqn not in known and entry.shape[0] > 1:
        return None
    return Sharding(PLAIN_MESH, (Shard(dims[0] if len(dims) == 1 else 0),))


def _state(state: OptimizerState, model: Mapping[str, TensorEntry]) -> OptimizerState:
    """Return an optimizer's state placed like its parameters, which are numbered."""
    tensors = {}
    forms = {one.shape: one for one in model.values() if one.sharding is not None}
    for name, entry in state.catalog.tensors.items():
        # Of a number it is not known which parameter it is: it is placed like one of its shape.
        parameter = model.get(split_name(name)[0], forms.get(entry.shape))
        sharding = entry.sharding
        if sharding is None and entry.shape:
            dims = _dims_cut(entry)
            own = Sharding(PLAIN_MESH, (Shard(dims[0]),)) if dims else None
            is_like = parameter is not None and entry.shape == parameter.shape
            sharding = parameter.sharding if parameter is not None and is_like else own
        tensors[name] = replace(entry, sharding=sharding)
    every = [name for group in state.groups for name in group.params]
    numbers = dict(state.numbers) or {name: number for number, name in enumerate(every)}
    return replace(state, catalog=replace(state.catalog, tensors=tensors), numbers=numbers)
