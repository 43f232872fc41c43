"""The items of `.distcp` files: each a torch.save zip of one tensor, one after another in a file.

A checkpoint may have 10^5 of them. The two ends of an item have all that is needed, and the end of
one is next to the start of the next, so neighbours are read together, by several threads.
Items of one shape have the same pickle, byte for byte; each is decoded once. So is each directory:
an item of which the same bytes are read as of an earlier one (checksums and values aside) is what
that one is.

A compressed item can be read only from its start to its end. All are decompressed, one by one, into
one file in the output's staging directory; everything after that works as for any other checkpoint.
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

import numpy as np

from unshard.containers.open_files import Opened, OpenFiles, opened, pread, pread_many
from unshard.containers.torch_files.reader import unpickled
from unshard.containers.torch_files.zip import TorchZip, read_torch_zip
from unshard.containers.zstd import decompress
from unshard.errors import CheckpointError, CorruptError, UnshardError, raise_all
from unshard.read.torch_save.values import StorageView, TensorFormError, read_view
from unshard.tensors.boxes import Ints
from unshard.tensors.catalog import ByteRange, Catalog, Chunk, TensorEntry
from unshard.tensors.chunk_rows import TensorDraft

_Numbered = tuple[int, int, int]
"""Offset and length of an item, and its number among those to read."""

_HEAD, _TAIL = 2048, 2048
_GAP = 16 * 1024
_BATCH_BYTES = 4 * 1024 * 1024
_BATCH_ITEMS = 2048
_THREADS = 4
_KNOWN_PICKLES = 8192
_KNOWN_ALIKE = 4  # items of one length that are remembered
_SLACK = 1 << 16  # of an item, what torch.save writes next to the tensor, and aligns it by


@dataclass(frozen=True, slots=True)
class StoredItem:
    """A stored tensor: its view of its storage, and the byte of the file where it starts."""

    view: StorageView
    start: int


@dataclass(slots=True)
class _Reads:
    """Reads of an item, noted: where in the item, and which bytes."""

    pread: Callable[[int, int], bytes]
    offset: int
    done: list[tuple[int, bytes]] = field(default_factory=list)

    def __call__(self, count: int, position: int) -> bytes:
        data = self.pread(count, position)
        self.done.append((position - self.offset, data))
        return data


@dataclass(frozen=True, slots=True)
class _Seen:
    """An item that was read: every read of it, what is passed over in each, what it holds."""

    reads: list[tuple[int, bytes, list[slice]]]
    view: int
    start: int

    def is_again(self, pread: Callable[[int, int], bytes], offset: int) -> bool:
        """Return whether an item of the same length would be read just so."""
        for position, data, passed in self.reads:
            found = pread(len(data), offset + position)
            if found != data and _blanked(found, passed) != _blanked(data, passed):
                return False
        return True


def _blanked(data: bytes, passed: list[slice]) -> list[bytes]:
    starts = [0, *(one.stop for one in passed)]
    stops = [*(one.start for one in passed), len(data)]
    return [data[start:stop] for start, stop in zip(starts, stops, strict=True)]


@dataclass(slots=True)
class _Known:
    """Decoded tensors by their pickle, and items by their length."""

    views: dict[bytes, StorageView] = field(default_factory=dict)
    items: dict[int, list[_Seen]] = field(default_factory=dict)
    numbers: dict[StorageView, int] = field(default_factory=dict)
    next_number: Iterator[int] = field(default_factory=count)  # threads take different ones


@dataclass(frozen=True, slots=True, eq=False)
class StoredItems:
    """Many stored tensors, as columns.

    Attributes:
        views: the different views of storages, by number.
        view: the number of each tensor's view; -1 for what cannot be read.
        start: byte of its file where it starts.
        problems: of what cannot be read, by row.
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
    """Return what items hold: of each the number of its path, and offset and length in bytes."""
    order = np.lexsort((length, offset, file))
    files, firsts = np.unique(file[order], return_index=True)
    jobs = [
        (paths[number], rows[part])
        for number, rows in zip(files.tolist(), np.split(order, firsts[1:]), strict=False)
        for part in _batches(np.minimum(length[rows], _HEAD + _TAIL))
    ]
    known, found = _Known(), StoredItems({}, np.full(len(file), -1), np.zeros_like(offset), {})

    def read(path: Path, rows: Ints) -> None:
        batch = list(zip(offset[rows].tolist(), length[rows].tolist(), rows.tolist(), strict=True))
        _read_batch(path, batch, known, found)

    contexts = [copy_context() for _ in jobs]  # they have what notes the files that are opened
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda here, job: here.run(read, *job), contexts, jobs))
    found.views.update((number, view) for view, number in known.numbers.items())
    return found


def _batches(needed: Ints) -> Iterator[slice]:
    """Yield neighbours: as many as have ends of a few megabytes; `needed` are bytes of each."""
    ends, at = np.cumsum(needed), 0
    while at < len(ends):
        most = _BATCH_BYTES + int(ends[at] - needed[at])
        stop = max(int(np.searchsorted(ends, most, "right")), at + 1)
        yield slice(at, min(stop, at + _BATCH_ITEMS))
        at = min(stop, at + _BATCH_ITEMS)


def _read_batch(path: Path, batch: Sequence[_Numbered], known: _Known, found: StoredItems) -> None:
    """Read items of a file into their rows; each is its thread's alone."""
    with opened(path) as file:
        blocks = _Blocks(file, batch)
        for offset, length, row in batch:
            try:
                found.view[row], found.start[row] = _read_item(
                    path, (offset, length), blocks.pread, known
                )
            except CheckpointError as error:
                found.problems[row] = error


def _read_item(
    path: Path, window: tuple[int, int], pread: Callable[[int, int], bytes], known: _Known
) -> tuple[int, int]:
    """Return the number of an item's view, and the byte of the file where its tensor starts."""
    offset, length = window
    alike = known.items.get(length, [])
    for seen in alike:
        if seen.is_again(pread, offset):
            return seen.view, offset + seen.start
    reads = _Reads(pread, offset)
    archive = read_torch_zip(path, offset=offset, length=length, pread=reads)
    item = _stored(archive, known)
    number = known.numbers.setdefault(item.view, next(known.next_number))
    if len(alike) < _KNOWN_ALIKE and len(known.items) < _KNOWN_PICKLES:
        places = sorted(archive.passed_over.tolist())
        noted = [
            (
                at,
                data,
                [slice(max(0, b - at), e - at) for b, e in places if b < at + len(data) and at < e],
            )
            for at, data in reads.done
        ]
        # Each place is in one read, that of a header or of the directory: of nothing else.
        if sum(len(inside) for *_, inside in noted) == len(places):
            known.items.setdefault(length, []).append(_Seen(noted, number, item.start - offset))
    return number, item.start


class _Blocks:
    """The ends of some items of a file, in memory; everything else is read from the file."""

    def __init__(self, file: Opened, batch: Sequence[_Numbered]) -> None:
        self._file = file
        spans: list[list[int]] = []
        for offset, length, _ in batch:
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


def _stored(archive: TorchZip, known: _Known) -> StoredItem:
    view = known.views.get(archive.pickle)
    if view is None:
        try:
            view = read_view(unpickled(archive.path, archive.pickle))
        except TensorFormError as error:
            raise CorruptError(f"{archive.path}: an item cannot be read: {error}") from error
        if len(known.views) < _KNOWN_PICKLES:
            known.views[archive.pickle] = view
    storage = archive.storages.get(view.key)
    size = 0 if storage is None else storage.size
    needed = view.storage_elements * view.dtype.itemsize
    if size < needed and 0 not in view.sizes:
        raise CorruptError(
            f"{archive.path}: an item's storage has {size} bytes, its pickle says {needed}"
        )
    start = 0 if storage is None else storage.offset
    return StoredItem(view, start + view.offset * view.dtype.itemsize)


def inflated_bytes(catalog: Catalog) -> int:
    """Return how many bytes `inflate` writes at most; 0 if nothing is compressed."""
    return sum(limit for entry in catalog.tensors.values() for _, limit in _limits(entry))


def _limits(entry: TensorEntry) -> Iterator[tuple[int, int]]:
    """Yield the compressed chunks of a tensor, and how many bytes each may have: its box's."""
    for row in np.flatnonzero(entry.chunks.compressed).tolist():
        yield row, prod(entry.chunks.sizes[row].tolist()) * entry.dtype.itemsize + _SLACK


def inflate(catalog: Catalog, path: Path) -> Catalog:
    """Return the catalog with every chunk decompressed into `path`; itself if none is compressed.

    Raises:
        CorruptError: an item cannot be decompressed, or is not what the metadata declares. Of one
            that holds more, no more is written than is declared for it.
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
                what = f"tensor {name}: {chunk.path}"
                size = decompress(what, files.source(chunk.path), window, out, limit)
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
    spans = np.array([(0, window.offset, window.length) for window in windows.values()])
    found = read_items([path], *spans.T)
    items = {row: found.item(at) for at, row in enumerate(windows)}
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
        what = item.subject.rpartition(": ")[2]
        return CorruptError(
            f"{where} is compressed, and does not contain a tensor of torch: {what}"
        )
    return CorruptError(
        f"{where} is not what is stored for it",
        expected=f"{entry.dtype} {list(chunk.box.sizes)}, as the metadata declares",
        found=f"{item.view.dtype} {list(item.view.sizes)}",
    )
