"""The places of DCP's items, as columns: a checkpoint of many ranks has 10^6 of them."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unshard.containers.torch_files.metadata_rows import ItemBatch
from unshard.tensors.boxes import Ints


class Item(NamedTuple):
    """The place of an item: a torch.save zip inside a file, perhaps compressed as a whole."""

    path: str
    offset: int
    length: int
    compressed: bool


class ItemTable(NamedTuple):
    """The items of a checkpoint, as columns of equal length.

    Attributes:
        names: flat names, by number.
        paths: files, by number, relative to the checkpoint.
        keys: (count, 2 + dimensions): number of the name, number of dimensions (-1 for an object),
            and the offsets in elements, padded with zeros.
        file: index into `paths`.
        start: byte of the file where the item starts.
        length: in bytes.
        compressed: whether the item is compressed as a whole.
    """

    names: dict[str, int]
    paths: tuple[str, ...]
    keys: Ints
    file: Ints
    start: Ints
    length: Ints
    compressed: NDArray[np.bool_]

    def rows_of(self, keys: Ints) -> Ints:
        """Return the row of each of these keys; -1 if no item has it."""
        width = max(keys.shape[1], self.keys.shape[1])
        both = np.zeros((len(keys) + len(self.keys), width), np.int64)
        both[: len(keys), : keys.shape[1]] = keys
        both[len(keys) :, : self.keys.shape[1]] = self.keys
        order, is_last = _sorted(both)
        group: Ints = np.cumsum(is_last) - is_last
        last = order[is_last][group]  # among equal keys: the item's, if there is one
        rows = np.empty(len(both), np.int64)
        rows[order] = np.where(last < len(keys), -1, last - len(keys))
        return rows[: len(keys)]


def _sorted(keys: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Return a stable order of rows of integers, and whether each is the last of equal rows."""
    order = np.lexsort(keys.T[::-1])
    ordered = keys[order]
    is_last = np.ones(len(keys), np.bool_)
    is_last[:-1] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return order, is_last


@dataclass(slots=True)
class ItemDraft:
    """The growing items of a checkpoint; numbers in arrays, so that millions stay small."""

    names: dict[str, int] = field(default_factory=dict)
    paths: dict[str, int] = field(default_factory=dict)
    name: "array[int]" = field(default_factory=lambda: array("q"))
    ndim: "array[int]" = field(default_factory=lambda: array("q"))
    offsets: "array[int]" = field(default_factory=lambda: array("q"))
    file: "array[int]" = field(default_factory=lambda: array("q"))
    spans: "array[int]" = field(default_factory=lambda: array("q"))
    compressed: list[int] = field(default_factory=list)

    def add(self, name: str, offsets: tuple[int, ...] | None, item: Item) -> None:
        """Add an item; offsets are None for an object."""
        if item.compressed:
            self.compressed.append(len(self.name))
        self.name.append(self.names.setdefault(name, len(self.names)))
        self.ndim.append(-1 if offsets is None else len(offsets))
        self.offsets.extend(offsets or ())
        self.file.append(self.paths.setdefault(item.path, len(self.paths)))
        self.spans.extend((item.offset, item.length))

    def add_places(self, places: ItemBatch, check_file: Callable[[str], object]) -> None:
        """Add many items; `check_file` raises for a path that is not allowed."""
        names, paths = self.names, self.paths
        for path in dict.fromkeys(places.files):
            check_file(path)
        self.name.extend([names.setdefault(name, len(names)) for name in places.names])
        self.file.extend([paths.setdefault(path, len(paths)) for path in places.files])
        self.ndim.frombytes(places.ndim.tobytes())
        self.offsets.frombytes(places.offsets.tobytes())
        self.spans.frombytes(places.spans.tobytes())

    def table(self) -> ItemTable:
        """Return the items; if several have one key, the last."""
        ndim = np.array(self.ndim)
        count = np.maximum(ndim, 0)
        keys = np.zeros((len(ndim), 2 + int(count.max(initial=0))), np.int64)
        keys[:, 0], keys[:, 1] = self.name, ndim
        keys[:, 2:][np.arange(keys.shape[1] - 2) < count[:, None]] = self.offsets
        spans = np.array(self.spans).reshape(-1, 2)
        compressed = np.zeros(len(ndim), np.bool_)
        compressed[self.compressed] = True
        order, is_last = _sorted(keys)
        last = np.sort(order[is_last])
        return ItemTable(
            self.names,
            tuple(self.paths),
            keys[last],
            np.array(self.file)[last],
            spans[last, 0],
            spans[last, 1],
            compressed[last],
        )
