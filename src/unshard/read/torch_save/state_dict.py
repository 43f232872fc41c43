"""Reads the state dict of a torch.save file: the place of every tensor, but no weights."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from math import prod
from operator import mul

import numpy as np

from unshard.containers.open_files import opened
from unshard.containers.pickles.records import Persistent, Record, Value
from unshard.containers.strided import read_strided
from unshard.containers.torch_files.reader import TorchFile
from unshard.containers.torch_files.zip import TorchZip
from unshard.errors import CorruptError, NotMergeableError, UnshardError
from unshard.read.torch_save.table import Cut, RankTable, StoredBox, TensorForm
from unshard.read.torch_save.tensors import LocalTensor, TensorDecoder
from unshard.read.torch_save.values import StorageView, TensorFormError, is_tensor, items_of, named
from unshard.read.wrapper_names import refuse_flat_parameters
from unshard.tensors.boxes import is_row_major
from unshard.tensors.dtypes import numpy_dtype
from unshard.tensors.placements import Piece, PlacementError, Sharding, place

_MOST_VISITED = 1_000


def rank_table(archive: TorchFile, *, rank: int, file: int, allowed: frozenset[str]) -> RankTable:
    """Return the table of a rank's file, which is number `file` among those being read.

    Raises:
        CheckpointError: the file as a whole cannot be read. Problems of single tensors are in the
            table.
    """
    items = items_of(archive.value)
    if items is None:
        raise NotMergeableError(
            f"{archive.path}: not a state dict",
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
    """Return the table of the tensors among some pickled values; the others are skipped.

    Args:
        archive: the file that has the storages.
        items: its state dict, or a part of it.
        rank: the rank that wrote it.
        file_number: its number among the files being read.
        allowed: names of tensor subclasses that the user vouches for.

    Raises:
        NotMergeableError: the values are FSDP1's flat parameters, whose cuts only the model has.
    """
    refuse_flat_parameters(archive.path, items)
    decoder = TensorDecoder(rank, partial(read_integers, archive), allowed)
    tensors = {
        name: partial(decoder.decode, value)
        for name, value in items.items()
        if is_tensor(value) or (_has_storage(value) and not name.endswith("_extra_state"))
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
    """Return the table of some tensors of a file; `tensors` has a decoder of each, by name."""
    problems: list[UnshardError] = []
    names: list[str] = []
    cuts: list[int] = []
    starts: list[int] = []
    distinct: dict[Cut, int] = {}
    for name, decode in tensors.items():
        try:
            cut, begins = _cut_of(archive, decode())
        except (TensorFormError, PlacementError, ShortStorageError) as error:
            where = f"tensor {name}: rank {rank} ({archive.path.name})"
            problems.append(_problem(error, where))
            continue
        except CorruptError as error:
            problems.append(error)
            continue
        names.append(name)
        cuts.append(distinct.setdefault(cut, len(distinct)))
        starts += begins
    return RankTable(
        rank,
        file_number,
        names,
        list(distinct),
        np.array(cuts, np.int32),
        np.array(starts, np.int64),
        problems=problems,
    )


class ShortStorageError(ValueError):
    """A storage has fewer bytes than its pickle needs."""


def _problem(error: ValueError, where: str) -> UnshardError:
    if isinstance(error, ShortStorageError):
        return CorruptError(f"{where}: {error}")
    how = "cannot be read: " if isinstance(error, TensorFormError) else ""
    return NotMergeableError(f"{where}: {how}" + error.args[0])


def start_of(archive: TorchFile | TorchZip, view: StorageView) -> int:
    """Return the byte where a view starts.

    Raises:
        ShortStorageError: its storage has fewer bytes than the pickle needs.
    """
    storage = archive.storages.get(view.key)
    size = 0 if storage is None else storage.size
    needed = view.storage_elements * view.dtype.itemsize
    if size < needed and 0 not in view.sizes:
        raise ShortStorageError(
            f"its storage {view.key} has {size} bytes, but its pickle needs {needed}"
        )
    return view.offset * view.dtype.itemsize + (0 if storage is None else storage.offset)


def _cut_of(archive: TorchFile, tensor: LocalTensor) -> tuple[Cut, list[int]]:
    """Return the stored boxes of a local tensor, and the first byte of each.

    Raises:
        PlacementError: the placement is unknown, or makes another local shape than the stored one.
    """
    form, starts = tensor.form, [start_of(archive, view) for view in tensor.parts]
    boxes: list[StoredBox] = []
    if form.boxed:
        begins = []
        for start, offsets, view in zip(starts, tensor.offsets, tensor.parts, strict=True):
            if 0 not in view.sizes:
                boxes.append(_box(form, offsets, view.sizes, view.strides))
                begins.append(start)
        return Cut(form, tuple(boxes)), begins
    ((start,), (view,)) = starts, tensor.parts
    if form.sharding is None:
        return Cut(form, (_box(form, (0,) * len(view.sizes), view.sizes, view.strides),)), starts
    placed = placed_pieces(form, form.sharding, view.sizes)
    steps = [step * form.dtype.itemsize for step in view.strides]
    boxes = [_box(form, piece.box.offsets, piece.box.sizes, view.strides) for piece in placed]
    begins = [start + sum(map(mul, piece.local_offsets, steps)) for piece in placed]
    return Cut(form, tuple(boxes)), begins


def placed_pieces(
    form: TensorForm, sharding: Sharding, stored: tuple[int, ...]
) -> tuple[Piece, ...]:
    """Return the pieces of a local tensor of the stored sizes; none if it is empty.

    Raises:
        PlacementError: the placement is unknown, or makes another local shape than the stored one.
    """
    local, placed = place(form.shape, sharding)
    if local != stored and not (0 in local and 0 in stored):
        mesh, placements = sharding.mesh, ", ".join(map(str, sharding.placements))
        raise PlacementError(
            f"its local shape is {list(stored)}, but ({placements}) at coordinates "
            f"{mesh.coordinates} of mesh {mesh.shape} makes {list(local)} of the global shape "
            f"{list(form.shape)}"
        )
    return () if 0 in local else placed


def _box(
    form: TensorForm, offsets: tuple[int, ...], sizes: tuple[int, ...], strides: tuple[int, ...]
) -> StoredBox:
    last = sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
    length = 0 if 0 in sizes else (last + 1) * form.dtype.itemsize
    return StoredBox(offsets, sizes, None if is_row_major(sizes, strides) else strides, length)


def read_integers(archive: TorchFile, view: StorageView) -> tuple[int, ...]:
    """Read the integers of a small tensor (the ranks of a device mesh)."""
    storage = archive.storages.get(view.key)
    width = view.dtype.itemsize
    if storage is None or view.storage_elements * width > storage.size:
        raise TensorFormError(f"a mesh whose ranks (storage {view.key}) are missing")
    if prod(view.sizes) > view.storage_elements:
        raise TensorFormError("a mesh that lists ranks several times")
    with opened(archive.path) as file:
        strides = tuple(step * width for step in view.strides)
        start = storage.offset + view.offset * width
        ranks = read_strided(file, start, strides, view.sizes, numpy_dtype(view.dtype))
    return tuple(ranks.reshape(-1).tolist())


def _has_storage(value: Value) -> bool:
    """Return whether an object or a tuple has a storage inside, as quantised weights have.

    Visits a limited number of values inside: they may refer to each other, and to themselves.
    """
    if not isinstance(value, Record | tuple) or items_of(value) is not None:
        return False
    waiting: list[Value] = [value]
    for item in islice(waiting, _MOST_VISITED):  # the list grows meanwhile
        match item:
            case Persistent():
                return True
            case Record():
                waiting += (*item.args, item.state, *(inner for _, inner in item.items))
            case dict():
                waiting += item.values()
            case list() | tuple():
                waiting += item
    return False


def _describe(value: Value) -> str:
    """Return a few words for a value that is not a tensor."""
    if isinstance(value, Record):
        return f"not a tensor: {named(value.callee)}"
    return f"not a tensor: {type(value).__name__}"
