"""The `.metadata` of torch.distributed.checkpoint (DCP): which items make which tensors, and where.

A pickle of a `Metadata` object: per name the shape, dtype and chunks (`state_dict_metadata`), the
path in the saved dict (`planner_data`), and per chunk the file, offset and length of its item
(`storage_data`). Without collectives every rank writes its own, `__R.metadata`, of its own chunks.

Source: `torch.distributed.checkpoint.metadata`, `.filesystem`; the files of torch 2.2 to 2.15.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from unshard.containers.pickles.records import Record, Value
from unshard.containers.torch_files.reader import read_metadata_file, unpickled
from unshard.errors import CorruptError, NotMergeableError
from unshard.read.torch_save.values import (
    TensorFormError,
    dtype_named,
    ints,
    member,
    named,
    sizes_of,
    state_of,
)
from unshard.tensors.dtypes import DType

_MAX_OFFSET = 1 << 62
_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed._shard.checkpoint.metadata")
# Metadata with the plans of all ranks in addition, from Megatron-core 0.17 on.
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata"
_STORAGE_INFO = (
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed._shard.checkpoint.filesystem._StorageInfo",
)
_ZSTD = re.compile(r"stream\.zstd/1(\..*)?")

_Chunk = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a box, in elements."""
_Index = tuple[str, tuple[int, ...] | None]
"""Flat name and offsets of an item; offsets None for objects."""


@dataclass(frozen=True, slots=True)
class Item:
    """The place of an item: a torch.save zip inside a file, perhaps compressed as a whole."""

    path: str
    offset: int
    length: int
    compressed: bool


@dataclass(frozen=True, slots=True)
class DescribedTensor:
    """A tensor as the metadata describes it."""

    dtype: DType
    shape: tuple[int, ...]
    chunks: list[_Chunk]


@dataclass(slots=True)
class DcpMetadata:
    """What one or several metadata files say together.

    Attributes:
        tensors: by flat name, in the order of the saved dict.
        objects: flat names of values that are not tensors, in the same order.
        paths: of flat names in the saved dict; empty if the save was not flattened.
        steps: the same, with the indices of lists as numbers, which keys of dicts never are.
        items: where each chunk and each object is stored.
    """

    tensors: dict[str, DescribedTensor] = field(default_factory=dict)
    objects: dict[str, None] = field(default_factory=dict)
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    steps: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    items: dict[_Index, Item] = field(default_factory=dict)


def read_metadata(files: Iterable[Path]) -> DcpMetadata:
    """Return what these metadata files say together.

    Raises:
        IncompleteError: a file is empty.
        CorruptError: it is not valid metadata, or contradicts another one.
        UnsafeError: its pickle names something that runs commands.
        NotMergeableError: its items were transformed in an unknown way.
    """
    whole = DcpMetadata()
    for path in files:
        try:
            _add(whole, path, unpickled(path, read_metadata_file(path)))
        except TensorFormError as error:
            raise CorruptError(f"{path}: not a valid DCP metadata file: {error}") from error
    named = [name for name in whole.paths if name in whole.tensors]
    if len(named) == len(whole.tensors):
        whole.tensors = {name: whole.tensors[name] for name in named}
    objects = (name for name in whole.paths if name in whole.objects)
    whole.objects = dict.fromkeys((*objects, *whole.objects))
    return whole


def _add(whole: DcpMetadata, path: Path, value: Value) -> None:
    fields = _metadata_fields(value)
    described = _named(member(fields, "state_dict_metadata"))
    for name, one in described.items():
        if _is(one, "BytesStorageMetadata"):
            whole.objects[name] = None
        elif _is(one, "TensorStorageMetadata"):
            tensor = _described_tensor(name, one)
            first = whole.tensors.setdefault(name, tensor)
            if (first.dtype, first.shape) != (tensor.dtype, tensor.shape):
                raise CorruptError(
                    f"{path}: tensor {name}: {tensor.dtype} {list(tensor.shape)}",
                    expected=f"{first.dtype} {list(first.shape)}, as the files of other ranks say",
                )
            if first is not tensor:
                first.chunks.extend(tensor.chunks)
        else:
            raise TensorFormError(f"metadata of unknown form for {name}")
    planned = member(fields, "planner_data")
    steps = _paths(planned, described)
    whole.steps |= steps
    whole.paths |= {name: tuple(map(str, path)) for name, path in steps.items()}
    storage = member(fields, "storage_data")
    if not isinstance(storage, dict):
        raise TensorFormError("storage data of unknown form")
    for index, info in storage.items():
        name, offsets = _index(index)
        if planned is None and name not in described:
            raise TensorFormError(f"storage data of {name!r}, which it does not describe")
        whole.items[name, offsets] = _item(path, info)


def _paths(planned: Value, described: dict[str, Value]) -> dict[str, tuple[str | int, ...]]:
    """Return the path of every name; none where the saved dict was not flattened."""
    if planned is None:
        return {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for name, parts in _named(planned).items():
        match parts:
            case [_, *_] if all(
                isinstance(part, str) or (type(part) is int and 0 <= part < _MAX_OFFSET)
                for part in parts  # keys of dicts and indices of lists
            ):
                paths[name] = tuple(part if isinstance(part, str | int) else "" for part in parts)
        if name in described and ".".join(map(str, paths.get(name, ()))) != name:
            raise TensorFormError(f"a plan that gives {name!r} another path")
    lost = [name for name in described if name not in paths]
    if lost:
        raise TensorFormError(f"a plan in which {len(lost)} names are missing: {lost[0]!r}")
    return paths


def _metadata_fields(value: Value) -> dict[str, Value]:
    if isinstance(value, Record) and (_is(value, "Metadata") or value.is_call_of(_MEGATRON)):
        return state_of(value)
    callee = named(value.callee) if isinstance(value, Record) else named(value)
    raise TensorFormError(f"{callee}, not torch's Metadata")


def _is(value: Value, name: str) -> bool:
    return isinstance(value, Record) and value.is_call_of(*(f"{m}.{name}" for m in _MODULES))


def _named(value: Value) -> dict[str, Value]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise TensorFormError("a dict by name was expected")
    return value


def _described_tensor(name: str, described: Value) -> DescribedTensor:
    fields = state_of(described)
    properties = member(fields, "properties")
    chunks = member(fields, "chunks")
    shape = sizes_of(member(fields, "size"))
    if not isinstance(chunks, list) or not isinstance(properties, Record):
        raise TensorFormError(f"metadata of unknown form for tensor {name}")
    match properties.state:
        case (dtype, *_) | {"dtype": dtype}:
            pass
        case _:
            raise TensorFormError(f"properties of unknown form for tensor {name}")
    boxes = []
    for chunk in chunks:
        box = state_of(chunk)
        offsets, sizes = ints(member(box, "offsets")), ints(member(box, "sizes"))
        inside = len(offsets) == len(sizes) == len(shape) and all(
            at >= 0 and n >= 0 and at + n <= max(size, at)
            for at, n, size in zip(offsets, sizes, shape, strict=True)
        )
        if not inside or min(shape, default=0) < 0:
            raise TensorFormError(
                f"tensor {name}, whose chunk of {list(sizes)} at {list(offsets)} is outside its "
                f"shape {list(shape)}"
            )
        boxes.append((offsets, sizes))
    return DescribedTensor(dtype_named(dtype), shape, boxes)


def _index(index: Value) -> _Index:
    fields = state_of(index)
    name, offset = member(fields, "fqn"), fields.get("offset")
    if not isinstance(name, str):
        raise TensorFormError("an index without a name")
    return name, None if offset is None else ints(offset)


def _item(source: Path, info: Value) -> Item:
    if not isinstance(info, Record) or not info.is_call_of(*_STORAGE_INFO):
        raise TensorFormError("storage data of unknown form")
    match state_of(info):
        case {"relative_path": str(path), "offset": int(offset), "length": int(length)} as fields:
            pass
        case _:
            raise TensorFormError("storage data of unknown form")
    if _leaves(path):
        raise CorruptError(
            f"{source}: refers to {path[:200]!r}, which is not a file in this directory",
            hint="the metadata was damaged, or made to point elsewhere",
        )
    if not 0 <= offset < _MAX_OFFSET or not 0 <= length < _MAX_OFFSET:
        raise TensorFormError(f"an item of impossible size or place in {path}")
    return Item(
        path, offset, length, _read_compression(source, fields.get("transform_descriptors"))
    )


def _leaves(path: str) -> bool:
    """Return whether a relative path is anything but that of a file inside the directory."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or not path.isprintable():
        return True
    return len(path) > 1024 or any(len(part.encode()) > 255 for part in parts)


def _read_compression(source: Path, transforms: Value) -> bool:
    """Return whether an item is compressed; raise if it was transformed in any other way."""
    match transforms:
        case None | []:
            return False
        case [str(one)] if _ZSTD.fullmatch(one):
            return True
    shown = ", ".join(map(named, transforms[:4])) if isinstance(transforms, list) else "something"
    raise NotMergeableError(
        f"{source}: its items were transformed by {shown}, which unshard does not know",
        expected="plain items, or stream.zstd/1",
        hint="load it with torch and the extension that wrote it, and save it again",
    )
