"""Write the `.metadata` of torch.distributed.checkpoint (DCP), as a save by several ranks does.

It is the pickle of torch's `Metadata`, byte for byte: also which strings are one object is as it is
after the ranks have sent their plans and results to the first one. What differs between versions
of torch is decided where it differs.

Sources: `torch.distributed.checkpoint.metadata`, `.filesystem`, `.default_planner`; the files of
torch 2.4 to 2.13.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from sys import intern
from typing import TypeVar

from unshard.containers.pickles.pickler import Call, Text, pickled
from unshard.containers.pickles.records import Global, Value
from unshard.tensors.dtypes import DType

ItemPath = tuple[str | int, ...]
"""Where an item is in the saved dict: keys of dicts and indices of lists."""


@dataclass(frozen=True, slots=True)
class SavedObject:
    """What is not a tensor: `data` is a file of `torch.save`."""

    path: ItemPath
    data: bytes


@dataclass(frozen=True, slots=True)
class SavedPart:
    """A box of a tensor, as one item.

    Attributes:
        path: of the tensor.
        dtype: of its elements.
        shape: of the whole tensor.
        offsets: of the box, in elements.
        sizes: of the box, in elements.
    """

    path: ItemPath
    dtype: DType
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


SavedItem = SavedObject | SavedPart


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What is saved, and by which rank.

    Attributes:
        paths: of everything in the saved dict, in its order.
        ranks: the items of each rank, in the order of the saved dict.
    """

    paths: Sequence[ItemPath]
    ranks: Sequence[Sequence[SavedItem]]


@dataclass(frozen=True, slots=True)
class Place:
    """Where an item is stored: offset and length are in bytes of the file."""

    file: str
    offset: int
    length: int


_METADATA = "torch.distributed.checkpoint.metadata"
_STORAGE_INFO = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_TORCH = "torch"  # of dtypes
_SIZE = Global(b"torch".decode(), "Size")  # whose module is a string of its own, as in torch
_LAYOUT = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
_CONTIGUOUS = Call(Global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
_FORMAT_VERSION = "1.0.0"
_WITH_MODULES = (2, 8)
_WITH_VERSION = (2, 9)


def metadata_pickle(
    plan: SavePlan,
    places: Sequence[Sequence[Place]],
    version: tuple[int, int],
    *,
    checkpoint_id: PurePosixPath,
    save_id: str,
) -> bytes:
    """Return what `.metadata` contains.

    Args:
        plan: what is saved.
        places: of its items, by rank.
        version: of the torch that is to read it.
        checkpoint_id: the directory that was saved to.
        save_id: a UUID.

    Raises:
        ValueError: an object is in the plan twice.
    """
    strings = _Strings(len(plan.ranks))
    parts = tuple(intern(part) for part in checkpoint_id.parts)  # as pathlib does
    storage_meta: dict[Value, Value] = {
        "checkpoint_id": Call(Global("pathlib", "PosixPath"), parts),
        "save_id": Text(save_id),
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
    """Which strings are one object.

    Each rank sends one pickle with its names, in which a name is one object; of the names of the
    saved dict the last rank's are kept, and of their paths the first one's.
    """

    def __init__(self, ranks: int) -> None:
        self._last = max(ranks - 1, 0)
        self._known: dict[tuple[int, str, str], Text] = {}

    def name(self, rank: int, path: ItemPath) -> Text:
        return self._one(rank, "name", flat_name(path))

    def planned(self, path: ItemPath) -> Text:
        return self.name(self._last, path)

    def part(self, path: ItemPath, part: str | int) -> Text | int:
        if isinstance(part, int):
            return part
        # The name of a path of one part is that part.
        return self._one(0, "part" if len(path) > 1 else "name", part)

    def _one(self, rank: int, kind: str, value: str) -> Text:
        return self._known.setdefault((rank, kind, value), Text(value))


def flat_name(path: ItemPath) -> str:
    """Return the name under which DCP saves what is at this path."""
    return ".".join(map(str, path))


def _described(plan: SavePlan, strings: _Strings) -> dict[Value, Value]:
    """Return `state_dict_metadata`."""
    described: dict[str, tuple[Text, Call]] = {}
    chunks: dict[str, list[Value]] = {}
    for rank, items in enumerate(plan.ranks):
        for item in items:
            name, key = flat_name(item.path), strings.name(rank, item.path)
            match item:
                case SavedObject():
                    if name in described:
                        raise ValueError(f"{name} is saved twice, and is not a tensor")
                    described[name] = key, _made("BytesStorageMetadata", None)
                case SavedPart():
                    boxes = chunks.setdefault(name, [])
                    described.setdefault(name, (key, _tensor(item, boxes)))
                    box = {"offsets": _size(item.offsets), "sizes": _size(item.sizes)}
                    boxes.append(_made("ChunkStorageMetadata", box))
    return dict(described.values())


def _tensor(part: SavedPart, chunks: list[Value]) -> Call:
    dtype = Global(_TORCH, part.dtype.name)
    properties = (dtype, _LAYOUT, False, _CONTIGUOUS, False)
    fields: dict[Value, Value] = {
        "properties": _made("TensorProperties", properties),
        "size": _size(part.shape),
        "chunks": chunks,
    }
    return _made("TensorStorageMetadata", fields)


def _stored(plan: SavePlan, places: Sequence[Sequence[Place]]) -> Iterator[tuple[Call, Call]]:
    """Yield `storage_data`: of each rank its objects first, as they are in its file."""
    counts: dict[str, int] = {}
    for items, at in zip(plan.ranks, places, strict=True):
        files: dict[str, Text] = {}
        for item, place in in_file_order(zip(items, at, strict=True)):
            name = flat_name(item.path)
            index: dict[Value, Value] = {"fqn": Text(name), "index": None}
            if isinstance(item, SavedPart):
                index["index"] = counts[name] = counts.get(name, -1) + 1
                index["offset"] = _size(item.offsets)
            info: dict[Value, Value] = {
                "relative_path": files.setdefault(place.file, Text(place.file)),
                "offset": place.offset,
                "length": place.length,
            }
            yield _made("MetadataIndex", index), Call(_STORAGE_INFO, state=info, is_new=True)


_Placed = TypeVar("_Placed")


def in_file_order(
    items: Iterable[tuple[SavedItem, _Placed]],
) -> Iterator[tuple[SavedItem, _Placed]]:
    """Yield the items of a rank as they follow one another in its file: objects come first."""
    known = list(items)
    for kind in (SavedObject, SavedPart):
        yield from (pair for pair in known if isinstance(pair[0], kind))


def _size(sizes: tuple[int, ...]) -> Call:
    return Call(_SIZE, ((*sizes,),))


def _made(name: str, state: Value) -> Call:
    return Call(Global(_METADATA, name), state=state, is_new=True)
