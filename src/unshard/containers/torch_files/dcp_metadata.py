"""Write the `.metadata` of torch.distributed.checkpoint (DCP), as a save by several ranks does.

It is the pickle of torch's `Metadata`, byte for byte, including the identity of strings after the
ranks have sent their plans and results to the first rank.

Sources: `torch.distributed.checkpoint.metadata`, `.filesystem`, `.default_planner`; the files of
torch 2.4 to 2.13.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from sys import intern
from typing import TypeVar

from unshard.containers.pickles.pickler import PickledCall, UniqueText, pickled
from unshard.containers.pickles.records import Global, Value
from unshard.tensors.dtypes import DType

ItemPath = tuple[str | int, ...]
"""The path of an item in the saved dict: keys of dicts and indices of lists."""


@dataclass(frozen=True, slots=True)
class SavedObject:
    """An item that is not a tensor: `data` is a file of `torch.save`."""

    path: ItemPath
    data: bytes


@dataclass(frozen=True, slots=True)
class SavedPart:
    """An item that is a box of a tensor.

    Attributes:
        path: path of the tensor.
        dtype: dtype of its elements.
        shape: shape of the whole tensor.
        offsets: offsets of the box, in elements.
        sizes: sizes of the box, in elements.
    """

    path: ItemPath
    dtype: DType
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


SavedItem = SavedObject | SavedPart


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The items that each rank saves.

    Attributes:
        paths: all paths in the saved dict, in its order.
        ranks: the items of each rank, in the order of the saved dict.
    """

    paths: Sequence[ItemPath]
    ranks: Sequence[Sequence[SavedItem]]


@dataclass(frozen=True, slots=True)
class ItemPlace:
    """The place of an item; offset and length are bytes of the file."""

    file: str
    offset: int
    length: int


_METADATA = "torch.distributed.checkpoint.metadata"
_STORAGE_INFO = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_TORCH = "torch"  # the module of dtypes
_SIZE = Global(b"torch".decode(), "Size")  # its module is a separate string object, as in torch
_LAYOUT = PickledCall(Global("torch.serialization", "_get_layout"), ("torch.strided",))
_CONTIGUOUS = PickledCall(Global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
_FORMAT_VERSION = "1.0.0"
_WITH_MODULES = (2, 8)
_WITH_VERSION = (2, 9)


def metadata_pickle(
    plan: SavePlan,
    places: Sequence[Sequence[ItemPlace]],
    version: tuple[int, int],
    *,
    checkpoint_id: PurePosixPath,
    save_id: str,
) -> bytes:
    """Return the contents of `.metadata`; arguments as of `dcp_files.lay_out_dcp`.

    `places` are the places of the plan's items, by rank.

    Raises:
        ValueError: an object is in the plan twice.
    """
    strings = _Strings(len(plan.ranks))
    parts = tuple(intern(part) for part in checkpoint_id.parts)  # as pathlib does
    storage_meta: dict[Value, Value] = {
        "checkpoint_id": PickledCall(Global("pathlib", "PosixPath"), parts),
        "save_id": UniqueText(save_id),
        "load_id": None,
    }
    fields: dict[Value, Value] = {
        "state_dict_metadata": _described(plan, strings),
        "planner_data": {
            strings.planned(path): tuple(strings.part(path, part) for part in path)
            for path in plan.paths
        },
        "storage_data": dict(_stored(plan, places)),
        "storage_meta": _made("StorageMeta", storage_meta),
    }
    if version >= _WITH_MODULES:
        storage_meta["modules"] = []
    if version >= _WITH_VERSION:
        fields["version"] = _FORMAT_VERSION
    return pickled(_made("Metadata", fields), protocol=4)


class _Strings:
    """The identity of strings, which decides where the pickle refers to an earlier string.

    Each rank sends one pickle with its names, in which equal names are one object. The names of the
    saved dict are the last rank's objects, the parts of their paths the first rank's.
    """

    def __init__(self, ranks: int) -> None:
        self._last = max(ranks - 1, 0)
        self._texts: dict[tuple[int, str, str], UniqueText] = {}

    def name(self, rank: int, path: ItemPath) -> UniqueText:
        return self._one(rank, "name", flat_name(path))

    def planned(self, path: ItemPath) -> UniqueText:
        return self.name(self._last, path)

    def part(self, path: ItemPath, part: str | int) -> UniqueText | int:
        if isinstance(part, int):
            return part
        # The name of a path of one part is that part.
        return self._one(0, "part" if len(path) > 1 else "name", part)

    def _one(self, rank: int, kind: str, value: str) -> UniqueText:
        return self._texts.setdefault((rank, kind, value), UniqueText(value))


def flat_name(path: ItemPath) -> str:
    """Return DCP's name of an item."""
    return ".".join(map(str, path))


def _described(plan: SavePlan, strings: _Strings) -> dict[Value, Value]:
    """Return `state_dict_metadata`."""
    described: dict[str, tuple[UniqueText, PickledCall]] = {}
    chunks: dict[str, list[Value]] = {}
    for rank, items in enumerate(plan.ranks):
        for item in items:
            name, key = flat_name(item.path), strings.name(rank, item.path)
            match item:
                case SavedObject():
                    if name in described:
                        raise ValueError(f"{name} is saved twice, but is not a tensor")
                    described[name] = key, _made("BytesStorageMetadata", None)
                case SavedPart():
                    boxes = chunks.setdefault(name, [])
                    described.setdefault(name, (key, _tensor(item, boxes)))
                    box = {"offsets": _size(item.offsets), "sizes": _size(item.sizes)}
                    boxes.append(_made("ChunkStorageMetadata", box))
    return dict(described.values())


def _tensor(part: SavedPart, chunks: list[Value]) -> PickledCall:
    dtype = Global(_TORCH, part.dtype.name)
    properties = (dtype, _LAYOUT, False, _CONTIGUOUS, False)
    fields: dict[Value, Value] = {
        "properties": _made("TensorProperties", properties),
        "size": _size(part.shape),
        "chunks": chunks,
    }
    return _made("TensorStorageMetadata", fields)


def _stored(
    plan: SavePlan, places: Sequence[Sequence[ItemPlace]]
) -> Iterator[tuple[PickledCall, PickledCall]]:
    """Yield `storage_data`, rank by rank in the order of its file."""
    counts: dict[str, int] = {}
    for items, at in zip(plan.ranks, places, strict=True):
        files: dict[str, UniqueText] = {}
        for item, place in in_file_order(zip(items, at, strict=True)):
            name = flat_name(item.path)
            index: dict[Value, Value] = {"fqn": UniqueText(name), "index": None}
            if isinstance(item, SavedPart):
                index["index"] = counts[name] = counts.get(name, -1) + 1
                index["offset"] = _size(item.offsets)
            info: dict[Value, Value] = {
                "relative_path": files.setdefault(place.file, UniqueText(place.file)),
                "offset": place.offset,
                "length": place.length,
            }
            yield _made("MetadataIndex", index), PickledCall(_STORAGE_INFO, state=info, is_new=True)


_Placed = TypeVar("_Placed")


def in_file_order(
    items: Iterable[tuple[SavedItem, _Placed]],
) -> list[tuple[SavedItem, _Placed]]:
    """Return the items of a rank in the order of its file: first objects, then tensors."""
    return sorted(items, key=lambda pair: isinstance(pair[0], SavedPart))


def _size(sizes: tuple[int, ...]) -> PickledCall:
    return PickledCall(_SIZE, ((*sizes,),))


def _made(name: str, state: Value) -> PickledCall:
    return PickledCall(Global(_METADATA, name), state=state, is_new=True)
