"""Read one torch.save file: where every tensor of its state dict is. No weights are read."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from operator import mul
from pathlib import Path

from unshard.containers.pickles.records import Record, Value
from unshard.containers.strided import read_strided
from unshard.containers.torch_files.reader import TorchFile, read_torch_file
from unshard.errors import CorruptError, NotMergeableError, UnshardError
from unshard.read.torch_save.table import RankTable, TensorForm
from unshard.read.torch_save.tensors import LocalTensor, TensorDecoder
from unshard.read.torch_save.values import StorageView, TensorFormError, is_tensor, items_of, named
from unshard.read.wrapper_names import refuse_flat_parameters
from unshard.tensors.boxes import is_row_major
from unshard.tensors.chunk_rows import chunk_row
from unshard.tensors.dtypes import numpy_dtype
from unshard.tensors.placements import PlacementError, place

__all__ = ["read_rank_file", "table_of", "tensors_of"]


def read_rank_file(path: Path, *, rank: int, file: int, allowed: frozenset[str]) -> RankTable:
    """Return what the file of a rank, number `file` among those being read, contains.

    Raises:
        CheckpointError: the file as a whole cannot be read. Problems of single tensors are in the
            table.
    """
    archive = read_torch_file(path)
    items = items_of(archive.value)
    if items is None:
        raise NotMergeableError(
            f"{path}: not a state dict",
            expected="a dict of tensors by name",
            found=_describe(archive.value),
        )
    return tensors_of(archive, items, rank=rank, file_number=file, allowed=allowed)


def tensors_of(
    archive: TorchFile,
    items: Mapping[str, Value],
    *,
    rank: int,
    file_number: int,
    allowed: frozenset[str],
) -> RankTable:
    """Return where the tensors among some pickled values are; the others are listed as skipped.

    Args:
        archive: the file that has the storages.
        items: its state dict, or a part of it.
        rank: the rank that wrote it.
        file_number: its number among the files being read.
        allowed: names of tensor subclasses that the user vouches for.

    Raises:
        NotMergeableError: the values are FSDP1's flat parameters, which nothing can cut apart.
    """
    refuse_flat_parameters(archive.path, items)
    decoder = TensorDecoder(rank, partial(_integers, archive), allowed)
    tensors = {
        name: partial(decoder.decode, value) for name, value in items.items() if is_tensor(value)
    }
    table = table_of(archive, tensors, rank=rank, file_number=file_number)
    table.skipped = {name: _describe(value) for name, value in items.items() if name not in tensors}
    table.world_size = decoder.world_size
    return table


def table_of(
    archive: TorchFile,
    tensors: Mapping[str, Callable[[], LocalTensor]],
    *,
    rank: int,
    file_number: int,
) -> RankTable:
    """Return where some tensors of a file are; `tensors` has what decodes each, by name."""
    table = RankTable(rank, file_number)
    forms: dict[TensorForm, int] = {}
    count = 0
    for name, decode in tensors.items():
        try:
            tensor = decode()
            chunks = _chunks(archive, tensor)
        except (TensorFormError, PlacementError, _ShortStorageError) as error:
            where = f"tensor {name}: rank {rank} ({archive.path.name})"
            table.problems.append(_problem(error, where))
            continue
        except CorruptError as error:
            table.problems.append(error)
            continue
        itemsize = tensor.form.dtype.itemsize
        for number, (start, offsets, sizes, strides) in enumerate(chunks, count):
            if not is_row_major(sizes, strides):
                table.odd_strides[number] = strides
            row = chunk_row(rank, file_number, start, itemsize, offsets, sizes, strides)
            table.rows.extend(row)
        count += len(chunks)
        table.names.append(name)
        table.forms.append(forms.setdefault(tensor.form, len(forms)))
        table.counts.append(len(chunks))
    table.form_table = list(forms)
    return table


class _ShortStorageError(ValueError):
    """A storage has fewer bytes than its pickle says."""


def _problem(error: ValueError, where: str) -> UnshardError:
    if isinstance(error, _ShortStorageError):
        return CorruptError(f"{where}: {error}")
    how = "cannot be read: " if isinstance(error, TensorFormError) else ""
    return NotMergeableError(f"{where}: {how}{error}")


def _start(archive: TorchFile, view: StorageView) -> int:
    """Return the byte where a view starts."""
    storage = archive.storages.get(view.key)
    size = 0 if storage is None else storage.size
    needed = view.storage_elements * view.dtype.itemsize
    if size < needed and 0 not in view.sizes:
        what = f"its storage {view.key} has {size} bytes, its pickle says {needed}"
        raise _ShortStorageError(what)
    return view.offset * view.dtype.itemsize + (0 if storage is None else storage.offset)


_Chunk = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _chunks(archive: TorchFile, tensor: LocalTensor) -> list[_Chunk]:
    """Return the chunks of a local tensor: first byte, offsets, sizes, strides.

    Raises:
        PlacementError: the placement is unknown, or makes another local shape than the stored one.
    """
    form, starts = tensor.form, [_start(archive, view) for view in tensor.parts]
    if form.boxed:
        return [
            (start, offsets, view.sizes, view.strides)
            for start, offsets, view in zip(starts, tensor.offsets, tensor.parts, strict=True)
            if 0 not in view.sizes
        ]
    ((start,), (view,)) = starts, tensor.parts
    if form.sharding is None:
        return [(start, (0,) * len(view.sizes), view.sizes, view.strides)]
    local, placed = place(form.shape, form.sharding)
    if local != view.sizes and not (0 in local and 0 in view.sizes):
        mesh, placements = form.sharding.mesh, ", ".join(map(str, form.sharding.placements))
        raise PlacementError(
            f"its local shape is {list(view.sizes)}, but ({placements}) at coordinates "
            f"{mesh.coordinates} of mesh {mesh.shape} makes {list(local)} of the global shape "
            f"{list(form.shape)}"
        )
    if 0 in local:
        return []
    steps = [step * form.dtype.itemsize for step in view.strides]
    return [
        (start + sum(map(mul, at, steps)), box.offsets, box.sizes, view.strides)
        for box, at in ((piece.box, piece.local_offsets) for piece in placed)
    ]


def _integers(archive: TorchFile, view: StorageView) -> tuple[int, ...]:
    """Read the integers of a small tensor (the ranks of a device mesh)."""
    storage = archive.storages.get(view.key)
    width = view.dtype.itemsize
    if storage is None or view.storage_elements * width > storage.size:
        raise TensorFormError(f"a mesh whose ranks (storage {view.key}) are missing")
    if prod(view.sizes) > view.storage_elements:
        raise TensorFormError("a mesh that names ranks several times")
    fd = os.open(archive.path, os.O_RDONLY)
    try:
        strides = tuple(step * width for step in view.strides)
        start = storage.offset + view.offset * width
        ranks = read_strided(fd, start, strides, view.sizes, numpy_dtype(view.dtype))
    finally:
        os.close(fd)
    return tuple(ranks.reshape(-1).tolist())


def _describe(value: Value) -> str:
    """Return a few words for a value that is not a tensor."""
    if isinstance(value, Record):
        return f"not a tensor: {named(value.callee)}"
    return f"not a tensor: {type(value).__name__}"
