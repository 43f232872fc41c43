"""The items of `.distcp` files: each a torch.save zip of one tensor, one after another in a file.

A checkpoint may have 10^5 of them. Zip headers are at the two ends of an item, and its end is next
to the start of the next item, so neighbours are read together, by several threads. Items of one
shape have the same pickle, byte for byte; each is decoded once. So is each directory: an item whose
headers equal those of an earlier one, but for checksums and values, has the same layout.

A compressed item can be read only from its start to its end. All are decompressed, one by one, into
one file in the output's staging directory; from then on they are read like any other items.
"""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from itertools import count
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from unshard.containers.open_files import Opened, OpenFiles, opened, pread, pread_many
from unshard.containers.torch_files.reader import unpickled
from unshard.containers.torch_files.zip import TorchZip, read_torch_zip
from unshard.containers.zstd import decompress
from unshard.errors import CheckpointError, CorruptError, UnshardError, raise_all
from unshard.read.torch_save.state_dict import ShortStorageError, start_of
from unshard.read.torch_save.values import StorageView, TensorFormError, read_view
from unshard.tensors.boxes import Ints
from unshard.tensors.catalog import ByteRange, Catalog, Chunk, TensorEntry
from unshard.tensors.chunk_rows import TensorDraft

_Window = tuple[int, int, int]
"""Offset and length of an item, and its row among the items to read."""

_HEAD, _TAIL = 2048, 2048  # bytes at the ends of an item, which have its headers
_GAP = 16 * 1024  # spans that are closer are read as one
_BATCH_BYTES = 4 * 1024 * 1024
_BATCH_ITEMS = 2048
_THREADS = 4
_MOST_PICKLES = 8192
_MOST_LAYOUTS = 4  # of items of one length
_SLACK = 1 << 16  # bytes of an item that torch.save writes next to the tensor, alignment included

_Pread = Callable[[int, int], bytes]
"""Reads a number of bytes at a position."""


class StoredItem(NamedTuple):
    """A stored tensor: its view of its storage, and the byte of the file where it starts."""

    view: StorageView
    start: int


class _ItemLayout(NamedTuple):
    """The layout of an item, to recognise others: every read of it, without the varying bytes."""

    reads: list[tuple[int, bytes, list[slice]]]
    view: int
    start: int

    def fits(self, pread: _Pread, offset: int) -> bool:
        """Return whether the item at `offset`, of the same length, has this layout."""
        for position, expected, varying in self.reads:
            data = pread(len(expected), offset + position)
            if data != expected and _without(data, varying) != _without(expected, varying):
                return False
        return True


def _without(data: bytes, varying: list[slice]) -> list[bytes]:
    starts = [0, *(part.stop for part in varying)]
    stops = [*(part.start for part in varying), len(data)]
    return [data[start:stop] for start, stop in zip(starts, stops, strict=True)]


@dataclass(slots=True)
class _Decoded:
    """Views by their pickle, and layouts of items by their length; the threads share it."""

    views: dict[bytes, StorageView] = field(default_factory=dict)
    layouts: dict[int, list[_ItemLayout]] = field(default_factory=dict)
    numbers: dict[StorageView, int] = field(default_factory=dict)
    next_number: Iterator[int] = field(default_factory=count)  # atomic: threads get different ones


class StoredItems(NamedTuple):
    """Many stored tensors, as columns.

    Attributes:
        views: the different views of storages, by number.
        view: the number of each tensor's view; -1 if it cannot be read.
        start: byte of its file where it starts.
        problems: the errors of tensors that cannot be read, by row.
    """

    views: dict[int, StorageView]
    view: Ints
    start: Ints
    problems: dict[int, UnshardError]

    def item(self, row: int) -> StoredItem | UnshardError:
        """Return a tensor, or why it cannot be read."""
        if (problem := self.problems.get(row)) is not None:
            return problem
        return StoredItem(self.views[int(self.view[row])], int(self.start[row]))


def read_items(paths: Sequence[Path], file: Ints, offset: Ints, length: Ints) -> StoredItems:
    """Read items: `file` numbers the path of each; offset and length are in bytes."""
    order = np.lexsort((length, offset, file))
    files, firsts = np.unique(file[order], return_index=True)
    jobs = [
        (paths[number], rows[part])
        for number, rows in zip(files.tolist(), np.split(order, firsts[1:]), strict=False)
        for part in _batches(np.minimum(length[rows], _HEAD + _TAIL))
    ]
    decoded, items = _Decoded(), StoredItems({}, np.full(len(file), -1), np.zeros_like(offset), {})

    def read(path: Path, rows: Ints) -> None:
        windows = zip(offset[rows].tolist(), length[rows].tolist(), rows.tolist(), strict=True)
        _read_batch(path, list(windows), decoded, items)

    # The contexts carry the record of opened files (`file_states`) into the threads.
    contexts = [copy_context() for _ in jobs]
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda context, job: context.run(read, *job), contexts, jobs))
    items.views.update((number, view) for view, number in decoded.numbers.items())
    return items


def _batches(needed: Ints) -> Iterator[slice]:
    """Yield slices of neighbours whose `needed` bytes are a few megabytes together."""
    ends, at = np.cumsum(needed), 0
    while at < len(ends):
        most = _BATCH_BYTES + int(ends[at] - needed[at])
        stop = max(int(np.searchsorted(ends, most, "right")), at + 1)
        yield slice(at, min(stop, at + _BATCH_ITEMS))
        at = min(stop, at + _BATCH_ITEMS)


def _read_batch(
    path: Path, windows: Sequence[_Window], decoded: _Decoded, items: StoredItems
) -> None:
    """Read items of a file into their rows, which no other thread writes."""
    with opened(path) as file:
        blocks = _Blocks(file, windows)
        for offset, length, row in windows:
            try:
                place = _read_item(path, offset, length, blocks.pread, decoded)
                items.view[row], items.start[row] = place
            except CheckpointError as error:
                items.problems[row] = error


def _read_item(
    path: Path, offset: int, length: int, pread: _Pread, decoded: _Decoded
) -> tuple[int, int]:
    """Return the number of an item's view, and the byte of the file where its tensor starts."""
    layouts = decoded.layouts.get(length, [])
    for layout in layouts:
        if layout.fits(pread, offset):
            return layout.view, offset + layout.start
    reads: list[tuple[int, bytes]] = []

    def recorded(count: int, position: int) -> bytes:
        data = pread(count, position)
        reads.append((position - offset, data))
        return data

    archive = read_torch_zip(path, offset=offset, length=length, pread=recorded)
    item = _stored(archive, decoded)
    number = decoded.numbers.setdefault(item.view, next(decoded.next_number))
    if len(layouts) < _MOST_LAYOUTS and len(decoded.layouts) < _MOST_PICKLES:
        varying = sorted(archive.passed_over.tolist())
        parts = [
            [slice(max(0, b - at), e - at) for b, e in varying if b < at + len(data) and at < e]
            for at, data in reads
        ]
        # Each varying part must be in exactly one read: that of a header or of the directory.
        if sum(map(len, parts)) == len(varying):
            headers = [(at, data, own) for (at, data), own in zip(reads, parts, strict=True)]
            layout = _ItemLayout(headers, number, item.start - offset)
            decoded.layouts.setdefault(length, []).append(layout)
    return number, item.start


class _Blocks:
    """The ends of some items of a file, in memory; everything else is read from the file."""

    def __init__(self, file: Opened, windows: Sequence[_Window]) -> None:
        self._file = file
        spans: list[list[int]] = []
        for offset, length, _ in windows:
            end, head, tail = offset + length, offset + _HEAD, offset + length - _TAIL
            ends = [(offset, end)] if head >= tail else [(offset, head), (tail, end)]
            for start, end in ends:
                if spans and start - spans[-1][1] <= _GAP:
                    spans[-1][1] = max(spans[-1][1], end)
                else:
                    spans.append([start, end])
        self._starts = [start for start, _ in spans]
        self._data = pread_many(file, [(end - start, start) for start, end in spans])

    def pread(self, count: int, position: int) -> bytes:
        at = bisect_right(self._starts, position) - 1
        if at >= 0:
            skip = position - self._starts[at]
            if skip + count <= len(self._data[at]):
                return self._data[at][skip : skip + count]
        return pread(self._file, count, position)


def _stored(archive: TorchZip, decoded: _Decoded) -> StoredItem:
    view = decoded.views.get(archive.pickle)
    try:
        if view is None:
            view = read_view(unpickled(archive.path, archive.pickle))
            if len(decoded.views) < _MOST_PICKLES:
                decoded.views[archive.pickle] = view
        return StoredItem(view, start_of(archive, view))
    except (TensorFormError, ShortStorageError) as error:
        raise CorruptError(f"{archive.path}: an item cannot be read: {error}") from error


def inflated_bytes(catalog: Catalog) -> int:
    """Return the most bytes that `inflate` writes; 0 if nothing is compressed."""
    return sum(limit for entry in catalog.tensors.values() for _, limit in _limits(entry))


def _limits(entry: TensorEntry) -> Iterator[tuple[int, int]]:
    """Yield the compressed chunks of a tensor, and the most bytes of each: its declared box."""
    for row in np.flatnonzero(entry.chunks.compressed).tolist():
        yield row, prod(entry.chunks.sizes[row].tolist()) * entry.dtype.itemsize + _SLACK


def inflate(catalog: Catalog, path: Path) -> Catalog:
    """Return the catalog with every chunk decompressed into `path`; itself if none is compressed.

    Raises:
        CorruptError: an item cannot be decompressed, or is not the declared tensor. No more is
            written of an item than is declared.
        UsageError: no zstd library is installed.
    """
    if not inflated_bytes(catalog):
        return catalog
    archives = list(catalog.archives)
    windows: dict[str, dict[int, ByteRange]] = {}
    with OpenFiles(os.O_RDONLY, limit=16) as files, path.open("xb") as out:
        at = 0
        for name, entry in catalog.tensors.items():
            for row, limit in _limits(entry):
                chunk = entry.chunks[row].source
                window = (chunk.offset, chunk.length)
                name_of_chunk = f"tensor {name}: {chunk.path}"
                size = decompress(name_of_chunk, files.source(chunk.path), window, out, limit)
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
    """Return a tensor whose compressed chunks are now in `windows` of the file `path`, by row."""
    if not windows:
        return entry
    table = entry.chunks
    spans = np.array([(0, window.offset, window.length) for window in windows.values()])
    stored = read_items([path], *spans.T)
    items = {row: stored.item(at) for at, row in enumerate(windows)}
    draft = TensorDraft(entry.fqn, entry.dtype, entry.shape, entry.sharding)
    for row, chunk in enumerate(table):
        file, start, strides = int(table.file[row]), chunk.source.offset, chunk.strides
        if (item := items.get(row)) is not None:
            declared = (chunk.box.sizes, entry.dtype)
            if isinstance(item, UnshardError) or (item.view.sizes, item.view.dtype) != declared:
                problems.append(_misfit(entry, chunk, item))
                continue
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


def _misfit(entry: TensorEntry, chunk: Chunk, item: StoredItem | UnshardError) -> CorruptError:
    at = list(chunk.box.offsets)
    where = f"tensor {entry.fqn}: {chunk.source.path.name}: its chunk {at}"
    if isinstance(item, UnshardError):
        reason = item.subject.rpartition(": ")[2]
        return CorruptError(
            f"{where} is compressed, and does not contain a tensor of torch: {reason}"
        )
    return CorruptError(
        f"{where} is stored as another tensor",
        expected=f"{entry.dtype} {list(chunk.box.sizes)}, as the metadata declares",
        found=f"{item.view.dtype} {list(item.view.sizes)}",
    )
