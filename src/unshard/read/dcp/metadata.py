"""The `.metadata` of torch.distributed.checkpoint (DCP): tensors, and the places of their items.

A pickle of a `Metadata` object: per name the shape, dtype and chunks (`state_dict_metadata`), the
path in the saved dict (`planner_data`), and per chunk the file, offset and length of its item
(`storage_data`). Without collectives every rank writes its own chunks to `__R.metadata`.

Source: `torch.distributed.checkpoint.metadata`, `.filesystem`; the files of torch 2.2 to 2.15.
"""

import re
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from unshard.containers.pickles.records import Record, Value
from unshard.containers.torch_files.metadata_rows import (
    METADATA_MODULES,
    STORAGE_INFO,
    ChunkBatch,
    ItemBatch,
)
from unshard.containers.torch_files.reader import unpickled_metadata
from unshard.errors import CorruptError, NotMergeableError
from unshard.read.dcp.item_table import Item, ItemDraft, ItemTable
from unshard.read.torch_save.values import (
    TensorFormError,
    dtype_named,
    ints,
    member,
    named,
    sizes_of,
    state_of,
)
from unshard.tensors.boxes import Ints, distinct
from unshard.tensors.dtypes import DType

_MAX_OFFSET = 1 << 62
# Metadata that also has the plans of all ranks, from Megatron-core 0.17 on.
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata"
_ZSTD = re.compile(r"stream\.zstd/1(\..*)?")

_SharedBoxes = dict[tuple[tuple[int, ...], bytes], Ints]
"""The boxes of tensors so far, by shape and bytes: tensors that are cut alike share them."""


class DescribedTensor(NamedTuple):
    """A tensor as the metadata describes it.

    Attributes:
        dtype: of its elements.
        shape: in elements.
        chunks: (count, 2, dimensions): offsets and sizes of each box, in elements; no box twice.
            Tensors that are cut alike share this array.
    """

    dtype: DType
    shape: tuple[int, ...]
    chunks: Ints


@dataclass(slots=True)
class DcpMetadata:
    """The union of one or several metadata files.

    Attributes:
        tensors: by flat name, in the order of the saved dict.
        objects: flat names of values that are not tensors, in the same order.
        paths: of flat names in the saved dict; empty if the save was not flattened.
        steps: the same, with the indices of lists as numbers, which keys of dicts never are.
        stored: the place of each chunk.
        items: the place of each object, by flat name.
    """

    tensors: dict[str, DescribedTensor] = field(default_factory=dict)
    objects: dict[str, None] = field(default_factory=dict)
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    steps: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    stored: ItemTable = field(default_factory=lambda: ItemDraft().table())
    items: dict[str, Item] = field(default_factory=dict)


def read_metadata(files: Iterable[Path]) -> DcpMetadata:
    """Read metadata files and unite them.

    Raises:
        IncompleteError: a file is empty.
        CorruptError: a file is not valid metadata, or contradicts another one.
        UnsafeError: its pickle would run commands.
        NotMergeableError: its items were transformed in an unknown way.
    """
    whole, draft = DcpMetadata(), ItemDraft()
    for path in files:
        try:
            _add(whole, draft, path, unpickled_metadata(path))
        except TensorFormError as error:
            raise CorruptError(f"{path}: not a valid DCP metadata file: {error}") from error
    whole.stored = draft.table()
    in_order = [name for name in whole.paths if name in whole.tensors]
    if len(in_order) == len(whole.tensors):
        whole.tensors = {name: whole.tensors[name] for name in in_order}
    objects = (name for name in whole.paths if name in whole.objects)
    whole.objects = dict.fromkeys((*objects, *whole.objects))
    return whole


def _add(whole: DcpMetadata, draft: ItemDraft, path: Path, value: Value) -> None:
    fields = _metadata_fields(value)
    described = _dict_by_name(member(fields, "state_dict_metadata"))
    shared: _SharedBoxes = {}
    for name, description in described.items():
        if _is(description, "BytesStorageMetadata"):
            whole.objects[name] = None
        elif _is(description, "TensorStorageMetadata"):
            _add_tensor(whole, path, name, _described_tensor(name, description, shared))
        else:
            raise TensorFormError(f"metadata of unknown form for {name}")
    planned = member(fields, "planner_data")
    steps = {} if planned is None else _paths(_dict_by_name(planned), described)
    whole.steps |= steps
    whole.paths |= {name: tuple(map(str, path)) for name, path in steps.items()}
    storage = member(fields, "storage_data")
    if not isinstance(storage, dict):
        raise TensorFormError("storage data of unknown form")
    allowed = described.keys() if planned is None else None
    for index, info in storage.items():
        if isinstance(index, ItemBatch):
            _check_described(index.names, allowed)
            draft.add_places(index, lambda file: _check_file(path, file))
            continue
        name, offsets = _index(index)
        _check_described([name], allowed)
        item = _item(path, info)
        draft.add(name, offsets, item)
        if offsets is None:
            whole.items[name] = item


def _add_tensor(whole: DcpMetadata, path: Path, name: str, tensor: DescribedTensor) -> None:
    first = whole.tensors.setdefault(name, tensor)
    if (first.dtype, first.shape) != (tensor.dtype, tensor.shape):
        raise CorruptError(
            f"{path}: tensor {name}: {tensor.dtype} {list(tensor.shape)}",
            expected=f"{first.dtype} {list(first.shape)}, as in the files of other ranks",
        )
    if first is not tensor:
        chunks = _distinct(np.concatenate([first.chunks, tensor.chunks]))
        whole.tensors[name] = first._replace(chunks=chunks)


def _check_described(names: Iterable[str], allowed: Collection[str] | None) -> None:
    for name in names:
        if allowed is not None and name not in allowed:
            raise TensorFormError(f"storage data of {name!r}, which is not described")


def _paths(
    planned: dict[str, Value], described: dict[str, Value]
) -> dict[str, tuple[str | int, ...]]:
    """Return the path of every name in the saved dict."""
    paths: dict[str, tuple[str | int, ...]] = {}
    for name, parts in planned.items():
        match parts:
            case [_, *_] if all(
                isinstance(part, str) or (type(part) is int and 0 <= part < _MAX_OFFSET)
                for part in parts  # keys of dicts, and indices of lists
            ):
                paths[name] = tuple(part if isinstance(part, str | int) else "" for part in parts)
        if name in described and ".".join(map(str, paths.get(name, ()))) != name:
            raise TensorFormError(f"a plan that gives {name!r} another path")
    if missing := [name for name in described if name not in paths]:
        raise TensorFormError(f"a plan without {len(missing)} names: {missing[0]!r}")
    return paths


def _metadata_fields(value: Value) -> dict[str, Value]:
    if isinstance(value, Record) and (_is(value, "Metadata") or value.is_call_of(_MEGATRON)):
        return state_of(value)
    callee = named(value.callee) if isinstance(value, Record) else named(value)
    raise TensorFormError(f"{callee}, not torch's Metadata")


def _is(value: Value, name: str) -> bool:
    return isinstance(value, Record) and value.is_call_of(
        *(f"{m}.{name}" for m in METADATA_MODULES)
    )


def _dict_by_name(value: Value) -> dict[str, Value]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise TensorFormError("a dict by name was expected")
    return value


def _described_tensor(name: str, described: Value, shared: _SharedBoxes) -> DescribedTensor:
    fields = state_of(described)
    properties = member(fields, "properties")
    chunks = member(fields, "chunks")
    shape = sizes_of(member(fields, "size"))
    if not isinstance(chunks, list) or not isinstance(properties, Record):
        raise TensorFormError(f"metadata of unknown form for tensor {name}")
    match properties.state:
        case (dtype, *_) | {"dtype": dtype}:
            boxes = _chunks(name, shape, chunks, shared)
            return DescribedTensor(dtype_named(dtype), shape, boxes)
    raise TensorFormError(f"properties of unknown form for tensor {name}")


def _chunks(name: str, shape: tuple[int, ...], chunks: list[Value], shared: _SharedBoxes) -> Ints:
    """Return the boxes of a tensor; see `DescribedTensor`."""
    numbers, count, size = array("q"), 0, np.array(shape, np.int64)
    for chunk in chunks:
        if isinstance(chunk, ChunkBatch):
            offsets, sizes = chunk.values[0].tolist()
            numbers.frombytes(chunk.values.tobytes())
            count += len(chunk.values)
        else:
            box = state_of(chunk)
            offsets, sizes = ints(member(box, "offsets")), ints(member(box, "sizes"))
            numbers.extend((*offsets, *sizes))
            count += 1
        if not len(offsets) == len(sizes) == len(shape):
            raise _outside(name, shape, offsets, sizes)
    equal = shared.get((shape, numbers.tobytes()))
    if equal is not None and len(equal) == count:
        return equal
    boxes = np.frombuffer(numbers, np.int64).reshape(count, 2, len(shape))
    at, n = boxes[:, 0], boxes[:, 1]
    inside = ((at >= 0) & (n >= 0) & (at + n <= np.maximum(size, at))).all(axis=1)
    if not inside.all():
        raise _outside(name, shape, *boxes[inside.argmin()].tolist())
    return shared.setdefault((shape, numbers.tobytes()), _distinct(boxes))


def _distinct(boxes: Ints) -> Ints:
    """Return boxes without repetitions."""
    empty = np.flatnonzero((boxes[:, 1] == 0).any(axis=1))
    return boxes[np.sort(np.append(distinct(boxes[:, 0], boxes[:, 1]), empty))]


def _outside(
    name: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> TensorFormError:
    return TensorFormError(
        f"tensor {name}, whose chunk of {list(sizes)} at {list(offsets)} is outside its "
        f"shape {list(shape)}"
    )


def _index(index: Value) -> tuple[str, tuple[int, ...] | None]:
    """Return the flat name of an item, and its offsets; None for an object."""
    fields = state_of(index)
    name, offset = member(fields, "fqn"), fields.get("offset")
    if not isinstance(name, str):
        raise TensorFormError("an index without a name")
    return name, None if offset is None else ints(offset)


def _item(source: Path, info: Value) -> Item:
    if not isinstance(info, Record) or not info.is_call_of(*STORAGE_INFO):
        raise TensorFormError("storage data of unknown form")
    match state_of(info):
        case {"relative_path": str(path), "offset": int(offset), "length": int(length)} as fields:
            _check_file(source, path)
            if not 0 <= offset < _MAX_OFFSET or not 0 <= length < _MAX_OFFSET:
                raise TensorFormError(f"an item of impossible size or place in {path}")
            transforms = fields.get("transform_descriptors")
            return Item(path, offset, length, _is_compressed(source, transforms))
    raise TensorFormError("storage data of unknown form")


@lru_cache(maxsize=65536)
def _check_file(source: Path, path: str) -> None:
    parts = PurePosixPath(path).parts
    is_inside = parts and not path.startswith("/") and ".." not in parts and path.isprintable()
    if not is_inside or len(path) > 1024 or any(len(part.encode()) > 255 for part in parts):
        raise CorruptError(
            f"{source}: refers to {path[:200]!r}, which is not a file in this directory",
            hint="the metadata was damaged, or made to point elsewhere",
        )


def _is_compressed(source: Path, transforms: Value) -> bool:
    """Return whether an item is compressed; raise if it was transformed in any other way."""
    match transforms:
        case None | []:
            return False
        case [str(transform)] if _ZSTD.fullmatch(transform):
            return True
    shown = ", ".join(map(named, transforms[:4])) if isinstance(transforms, list) else "something"
    raise NotMergeableError(
        f"{source}: its items were transformed by {shown}, which unshard cannot undo",
        expected="plain items, or stream.zstd/1",
        hint="load it with torch and the extension that wrote it, and save it again",
    )
