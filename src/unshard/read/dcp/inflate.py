"""Decompress the items of a compressed DCP checkpoint, so that they have bytes at known places.

A compressed item can be read only from its start to its end. All are written, one by one, into one
file in the output's staging directory; everything after that works as for any other checkpoint.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np

from unshard.containers.open_files import OpenFiles
from unshard.containers.zstd import decompress
from unshard.errors import CorruptError, UnshardError, raise_all
from unshard.read.dcp.items import StoredItem, read_items
from unshard.read.drafts import TensorDraft
from unshard.tensors.catalog import ByteRange, Catalog, Chunk, TensorEntry

__all__ = ["inflate", "inflated_bytes"]

_SLACK = 1 << 16  # of an item, what torch.save writes next to the tensor, and aligns it by


def inflated_bytes(catalog: Catalog) -> int:
    """Return how many bytes `inflate` writes at most; 0 if nothing is compressed."""
    return sum(limit for entry in catalog.tensors.values() for _, limit in _limits(entry))


def _limits(entry: TensorEntry) -> Iterator[tuple[int, int]]:
    """Yield the compressed chunks of a tensor, and how many bytes each may have: its box's."""
    for row in np.flatnonzero(entry.chunks.compressed).tolist():
        yield row, prod(entry.chunks.sizes[row].tolist()) * entry.dtype.itemsize + _SLACK


def inflate(catalog: Catalog, path: Path) -> Catalog:
    """Return the catalog with every chunk decompressed; itself if there is nothing to do.

    Args:
        catalog: the checkpoint.
        path: the file to write.

    Raises:
        CorruptError: an item cannot be decompressed, or is not what the metadata declares. Of one
            that holds more, no more is written than is declared for it.
        UsageError: no zstd library is installed.
    """
    if not inflated_bytes(catalog):
        return catalog
    archives: list[ByteRange] = list(catalog.archives)
    windows: dict[str, dict[int, ByteRange]] = {}
    with OpenFiles(os.O_RDONLY, limit=16) as files, path.open("xb") as out:
        at = 0
        for name, entry in catalog.tensors.items():
            for row, limit in _limits(entry):
                chunk = entry.chunks[row].source
                window = (chunk.offset, chunk.length)
                what = f"tensor {name}: {chunk.path}"
                size = decompress(what, files.fd(chunk.path), window, out, limit)
                archives.append(ByteRange(path, at, size))
                windows.setdefault(name, {})[row] = archives[-1]
                at += size
    problems: list[UnshardError] = []
    tensors = {
        name: _inflated(entry, windows.get(name, {}), path, problems)
        for name, entry in catalog.tensors.items()
    }
    raise_all(CorruptError, "the items do not fit the metadata", problems)
    return replace(catalog, tensors=tensors, archives=tuple(archives))


def _inflated(
    entry: TensorEntry, windows: dict[int, ByteRange], path: Path, problems: list[UnshardError]
) -> TensorEntry:
    """Return a tensor whose compressed chunks are in `windows` of the file `path`, by row."""
    if not windows:
        return entry
    table = entry.chunks
    found = read_items([(w.path, w.offset, w.length) for w in windows.values()])
    items = dict(zip(windows, found, strict=True))
    draft = TensorDraft(entry.fqn, entry.dtype, entry.shape, entry.sharding)
    for row, chunk in enumerate(table):
        file, start, strides = int(table.file[row]), chunk.source.offset, chunk.strides
        item = items.get(row)
        if isinstance(item, UnshardError) or (item is not None and not _fits(entry, chunk, item)):
            problems.append(_misfit(entry, chunk, item))
            continue
        if item is not None:
            file, start, strides = len(table.paths), item.start, item.view.strides
        draft.add(
            rank=chunk.rank,
            file=file,
            start=start,
            offsets=chunk.box.offsets,
            sizes=chunk.box.sizes,
            strides=strides,
        )
    return draft.entry((*table.paths, path))


def _fits(entry: TensorEntry, chunk: Chunk, item: StoredItem) -> bool:
    return (item.view.sizes, item.view.dtype) == (chunk.box.sizes, entry.dtype)


def _misfit(entry: TensorEntry, chunk: Chunk, item: StoredItem | UnshardError) -> CorruptError:
    at = list(chunk.box.offsets)
    where = f"tensor {entry.fqn}: {chunk.source.path.name}: its chunk {at}"
    if isinstance(item, UnshardError):
        what = item.subject.rpartition(": ")[2]
        return CorruptError(
            f"{where} is compressed, and does not contain a tensor of torch: {what}"
        )
    return CorruptError(
        f"{where} is not what is stored for it",
        expected=f"{entry.dtype} {list(chunk.box.sizes)}, as the metadata declares",
        found=f"{item.view.dtype} {list(item.view.sizes)}",
    )
