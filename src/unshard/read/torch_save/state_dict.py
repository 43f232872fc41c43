"""Read one torch.save file: where every tensor of its state dict is. No weights are read."""

import os
from collections.abc import Mapping
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

__all__ = ["read_rank_file", "tensors_of"]


def read_rank_file(path: Path, *, rank: int, file: int, allowed: frozenset[str]) -> RankTable:
    """Return what a rank file holds.

    Args:
        path: the file.
        rank: the rank that its name states.
        file: its number among the files being read.
        allowed: names of tensor subclasses that the user vouches for.

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
        archive: the file that holds the storages.
        items: its state dict, or a part of it.
        rank: the rank that wrote it.
        file_number: its number among the files being read.
        allowed: names of tensor subclasses that the user vouches for.

    Raises:
        NotMergeableError: the values are FSDP1's flat parameters, which nothing can cut apart.
    """
    refuse_flat_parameters(archive.path, items)
    return _Reader(archive, RankTable(rank, file_number), allowed).read(items)


class _Reader:
    def __init__(self, archive: TorchFile, table: RankTable, allowed: frozenset[str]) -> None:
        self._archive = archive
        self._table = table
        self._decoder = TensorDecoder(table.rank, lambda view: _integers(archive, view), allowed)
        self._forms: dict[TensorForm, int] = {}
        self._chunks = 0

    def read(self, items: Mapping[str, Value]) -> RankTable:
        table = self._table
        for name, value in items.items():
            if not is_tensor(value):
                table.skipped[name] = _describe(value)
                continue
            try:
                self._add(name, self._decoder.decode(value))
            except TensorFormError as error:
                self._complain(NotMergeableError, name, f"cannot be read: {error}")
            except PlacementError as error:
                self._complain(NotMergeableError, name, str(error))
        table.form_table = list(self._forms)
        table.world_size = self._decoder.world_size
        return table

    def _complain(self, kind: type[UnshardError], name: str, what: str) -> None:
        where = f"rank {self._table.rank} ({self._archive.path.name})"
        self._table.problems.append(kind(f"tensor {name}: {where}: {what}"))

    def _add(self, name: str, tensor: LocalTensor) -> None:
        table, itemsize = self._table, tensor.dtype.itemsize
        starts = [self._start(name, view) for view in tensor.parts]
        if None in starts:
            return
        pieces = _pieces(tensor)
        for part, offsets, sizes, skip in pieces:
            start, strides = (starts[part] or 0) + skip * itemsize, tensor.parts[part].strides
            if not is_row_major(sizes, strides):
                table.odd_strides[self._chunks] = strides
            table.rows.extend(
                chunk_row(table.rank, table.file, start, itemsize, offsets, sizes, strides)
            )
            self._chunks += 1
        form = TensorForm(tensor.dtype, tensor.shape, tensor.sharding, tensor.offsets is not None)
        table.names.append(name)
        table.forms.append(self._forms.setdefault(form, len(self._forms)))
        table.counts.append(len(pieces))

    def _start(self, name: str, view: StorageView) -> int | None:
        """Return the byte where a view starts; None, with a complaint, if its storage is short."""
        storage = self._archive.storages.get(view.key)
        size = 0 if storage is None else storage.size
        needed = view.storage_elements * view.dtype.itemsize
        if size < needed and 0 not in view.sizes:
            what = f"its storage {view.key} has {size} bytes, its pickle says {needed}"
            self._complain(CorruptError, name, what)
            return None
        return view.offset * view.dtype.itemsize + (0 if storage is None else storage.offset)


_PieceRow = tuple[int, tuple[int, ...], tuple[int, ...], int]


def _pieces(tensor: LocalTensor) -> list[_PieceRow]:
    """Return the chunks of a local tensor: number of the part, offsets, sizes, start in the part.

    Raises:
        PlacementError: the placement is unknown, or makes another local shape than the stored one.
    """
    if tensor.offsets is not None:
        return [
            (part, offsets, view.sizes, 0)
            for part, (offsets, view) in enumerate(zip(tensor.offsets, tensor.parts, strict=True))
            if 0 not in view.sizes
        ]
    (view,) = tensor.parts
    if tensor.sharding is None:
        return [(0, (0,) * len(view.sizes), view.sizes, 0)]
    local, placed = place(tensor.shape, tensor.sharding)
    if local != view.sizes and not (0 in local and 0 in view.sizes):
        mesh, placements = tensor.sharding.mesh, ", ".join(map(str, tensor.sharding.placements))
        raise PlacementError(
            f"its local shape is {list(view.sizes)}, but ({placements}) at coordinates "
            f"{mesh.coordinates} of mesh {mesh.shape} makes {list(local)} of the global shape "
            f"{list(tensor.shape)}"
        )
    if 0 in local:
        return []
    if len(placed) == 1:
        return [(0, placed[0].box.offsets, placed[0].box.sizes, 0)]
    return [
        (0, piece.box.offsets, piece.box.sizes, sum(map(mul, piece.local_offsets, view.strides)))
        for piece in placed
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
