"""Read one rank file: directory, pickle, and where every tensor of it lies. No weights are read."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from unshard.containers.pickle_machine import DangerousPickleError, MalformedPickleError
from unshard.containers.records import Record, Value
from unshard.containers.strided import read_strided
from unshard.containers.torch_zip import TorchZip, read_torch_zip
from unshard.containers.unpickle import unpickle
from unshard.errors import CorruptError, NotMergeableError, UnsafeError, UnshardError
from unshard.read.pickle_values import TensorFormError
from unshard.read.rank_table import Kind, RankTable
from unshard.read.torch_tensors import LocalTensor, StorageView, TensorDecoder, is_tensor
from unshard.tensors.dtypes import numpy_dtype
from unshard.tensors.placements import PlacementError, Sharding, place

__all__ = ["read_rank_file"]


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
    return _Reader(read_torch_zip(path), RankTable(rank, file), allowed).read()


class _Reader:
    def __init__(self, archive: TorchZip, table: RankTable, allowed: frozenset[str]) -> None:
        self._archive = archive
        self._table = table
        self._decoder = TensorDecoder(table.rank, lambda view: _integers(archive, view), allowed)
        self._kinds: dict[Kind, int] = {}
        self._chunks = 0

    def read(self) -> RankTable:
        table = self._table
        for name, value in _state_dict(self._archive).items():
            if not is_tensor(value):
                table.skipped[name] = _describe(value)
                continue
            try:
                self._add(name, self._decoder.decode(value))
            except TensorFormError as error:
                self._complain(NotMergeableError, name, f"it is {error}")
            except PlacementError as error:
                self._complain(NotMergeableError, name, str(error))
        table.kind_table = list(self._kinds)
        return table

    def _complain(self, kind: type[UnshardError], name: str, what: str) -> None:
        where = f"rank {self._table.rank} ({self._archive.path.name})"
        self._table.problems.append(kind(f"tensor {name}: {where}: {what}"))

    def _add(self, name: str, tensor: LocalTensor) -> None:
        view, table = tensor.view, self._table
        storage = self._archive.storages.get(view.key)
        size = 0 if storage is None else storage.size
        needed = view.storage_elements * view.dtype.itemsize
        if size < needed and 0 not in view.sizes:
            what = f"its storage {view.key} has {size} bytes, its pickle says {needed}"
            self._complain(CorruptError, name, what)
            return
        pieces = _pieces(tensor)
        first = view.offset * view.dtype.itemsize + (0 if storage is None else storage.offset)
        for offsets, sizes, skip in pieces:
            start = first + skip * view.dtype.itemsize
            table.add_chunk(self._chunks, start, view.dtype.itemsize, offsets, sizes, view.strides)
            self._chunks += 1
        kind = Kind(view.dtype, tensor.shape, tensor.sharding)
        table.names.append(name)
        table.kinds.append(self._kinds.setdefault(kind, len(self._kinds)))
        table.counts.append(len(pieces))


_PieceRow = tuple[tuple[int, ...], tuple[int, ...], int]


def _pieces(tensor: LocalTensor) -> list[_PieceRow]:
    """Return the chunks of a local tensor: offsets and sizes, and where each starts in it.

    Raises:
        PlacementError: the placement is unknown, or makes another local shape than the stored one.
    """
    view = tensor.view
    if tensor.sharding is None:
        return [((0,) * len(view.sizes), view.sizes, 0)]
    local, placed = place(tensor.shape, tensor.sharding)
    if local != view.sizes and not (0 in local and 0 in view.sizes):
        raise PlacementError(_mismatch(tensor, tensor.sharding, local))
    if 0 in local:
        return []
    if len(placed) == 1:
        return [(placed[0].box.offsets, placed[0].box.sizes, 0)]
    return [(p.box.offsets, p.box.sizes, _dot(p.local_offsets, view.strides)) for p in placed]


def _mismatch(tensor: LocalTensor, sharding: Sharding, local: tuple[int, ...]) -> str:
    placements = ", ".join(map(str, sharding.placements))
    return (
        f"its local shape is {list(tensor.view.sizes)}, but ({placements}) at coordinates "
        f"{sharding.mesh.coordinates} of mesh {sharding.mesh.shape} makes {list(local)} of the "
        f"global shape {list(tensor.shape)}"
    )


def _dot(offsets: Sequence[int], strides: Sequence[int]) -> int:
    return sum(offset * step for offset, step in zip(offsets, strides, strict=True))


def _state_dict(archive: TorchZip) -> Mapping[str, Value]:
    """Unpickle a file and return its state dict."""
    path = archive.path
    try:
        value, _ = unpickle(archive.pickle)
    except MalformedPickleError as error:
        raise CorruptError(f"{path}: its pickle is not valid: {error}") from error
    except DangerousPickleError as error:
        raise UnsafeError(
            f"{path}: its pickle refers to {error}, which no checkpoint needs: it was made to run "
            "commands when it is loaded",
            hint="nothing was run. Do not load this file with torch; find out where it comes from",
        ) from error
    items: dict[Value, Value] | None = None
    if isinstance(value, dict):
        items = value
    elif isinstance(value, Record) and value.is_call_of("collections.OrderedDict"):
        items = dict(value.items)
    if items is None or not all(isinstance(name, str) for name in items):
        raise NotMergeableError(
            f"{path}: not a state dict",
            expected="a dict of tensors by name",
            found=_describe(value),
        )
    return {name: item for name, item in items.items() if isinstance(name, str)}


def _integers(archive: TorchZip, view: StorageView) -> tuple[int, ...]:
    """Read the integers of a small tensor (the ranks of a device mesh)."""
    storage = archive.storages.get(view.key)
    width = view.dtype.itemsize
    if storage is None or view.storage_elements * width > storage.size:
        raise TensorFormError(f"a mesh whose ranks (storage {view.key}) are missing")
    fd = os.open(archive.path, os.O_RDONLY)
    try:
        strides = tuple(step * width for step in view.strides)
        start = storage.offset + view.offset * width
        ranks = read_strided(fd, start, strides, view.sizes, numpy_dtype(view.dtype))
    finally:
        os.close(fd)
    return tuple(ranks.reshape(-1).tolist())


def _describe(value: Value) -> str:
    """Say in a few words what a value is that is not a tensor."""
    if isinstance(value, Record):
        return f"not a tensor: {value.callee}"
    return f"not a tensor: {type(value).__name__}"
