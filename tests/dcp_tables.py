"""What the columns of DCP's readers say, item by item."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from unshard.errors import UnshardError
from unshard.read.dcp import items as dcp_items
from unshard.read.dcp.item_table import Item
from unshard.read.dcp.items import StoredItem
from unshard.read.dcp.metadata import DcpMetadata, DescribedTensor
from unshard.tensors.dtypes import DType

Chunk = tuple[tuple[int, ...], tuple[int, ...]]
Tensor = tuple[DType, tuple[int, ...], list[Chunk]]
Index = tuple[str, tuple[int, ...] | None]


def plain(one: DescribedTensor) -> Tensor:
    chunks = [(tuple(offsets), tuple(sizes)) for offsets, sizes in one.chunks.tolist()]
    return one.dtype, one.shape, chunks


def items_of(found: DcpMetadata) -> dict[Index, Item]:
    table, names = found.stored, list(found.stored.names)
    rows = zip(table.keys.tolist(), table.file, table.start, table.length, strict=True)
    return {
        (names[name], None if ndim < 0 else tuple(offsets[:ndim])): Item(
            table.paths[file], int(start), int(length), compressed=bool(table.compressed[row])
        )
        for row, ((name, ndim, *offsets), file, start, length) in enumerate(rows)
    }


Window = tuple[Path, int, int]
"""The place of an item: file, offset and length in bytes."""


def read_items(items: Sequence[Window]) -> list[StoredItem | UnshardError]:
    """Return what every item holds; a problem in place of what cannot be read."""
    paths = list(dict.fromkeys(path for path, *_ in items))
    windows = [(paths.index(path), offset, length) for path, offset, length in items]
    found = dcp_items.read_items(paths, *np.array(windows, np.int64).reshape(-1, 3).T)
    return [found.item(row) for row in range(len(items))]
