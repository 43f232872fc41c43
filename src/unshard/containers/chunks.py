"""Read parts of stored chunks, and boxes of the tensors that consist of them."""

import threading
from collections.abc import Callable, Iterable, Iterator
from math import prod
from operator import add, sub
from types import EllipsisType
from typing import NamedTuple

import numpy as np

from unshard.containers.open_files import Opened, OpenFiles
from unshard.containers.strided import Elements, raw_dtype, read_exactly, read_strided
from unshard.stores.remote_file import RemoteFile
from unshard.tensors.boxes import Box, row_major_strides, row_tile, tiles
from unshard.tensors.catalog import ChunkTable, TensorEntry

_COMPARED = 1 << 20
_BLOCK = 256 * 1024  # bytes; a block is still in the CPU's cache when it is converted


class _Reused(threading.local):
    """A block of memory per thread: page faults in fresh memory cost more than filling it."""

    def __init__(self) -> None:
        self.block = np.empty(_BLOCK, np.uint8)


_reused = _Reused()


def chunk_part(
    table: ChunkTable, row: int, box: Box, dtype: np.dtype[np.generic], files: OpenFiles
) -> Elements:
    """Read a box of a chunk, relative to its start, as elements of the dtype `dtype`.

    Raises:
        CorruptError: the file is gone or ends early.
    """
    file, start, strides = _place(table, row, box, dtype, files)
    return read_strided(file, start, strides, box.sizes, dtype)


def _place(
    table: ChunkTable, row: int, box: Box, dtype: np.dtype[np.generic], files: OpenFiles
) -> tuple[Opened, int, tuple[int, ...]]:
    """Return a chunk's open file, and start and strides (bytes) of a box of the chunk in it."""
    if table.compressed[row]:
        raise RuntimeError("a compressed chunk has no bytes to read: inflate the catalog first")
    if table.strides is None:
        steps = row_major_strides(table.sizes[row].tolist())
    else:
        steps = tuple(table.strides[row].tolist())
    strides = tuple(step * dtype.itemsize for step in steps)
    skip = sum(at * step for at, step in zip(box.offsets, strides, strict=True))
    source = files.source(table.paths[table.file[row]])
    return source, int(table.start[row]) + skip, strides


def first_difference(
    table: ChunkTable,
    rows: tuple[int, int],
    boxes: Iterable[Box],
    dtype: np.dtype[np.generic],
    files: OpenFiles,
) -> Box | None:
    """Return the first box in which two chunks of equal size differ, or None."""
    for box in boxes:
        ours, theirs = (chunk_part(table, row, box, dtype, files) for row in rows)
        if ours.tobytes() != theirs.tobytes():
            return box
    return None


def fill_box(
    out: Elements, box: Box, table: ChunkTable, dtype: np.dtype[np.generic], files: OpenFiles
) -> None:
    """Read a box of a tensor from its chunks, and cast the values to the dtype of `out`.

    Raises:
        CorruptError: a file is gone or ends early.
    """
    gets: list[Callable[[], None]] = []
    for part in stored_parts(out, box, table, dtype, files):
        if isinstance(part.file, RemoteFile):
            gets.append(part.fill)
        else:
            part.fill()
    if gets:
        from unshard.stores.pool import all_at_once

        all_at_once(gets)


def box_blocks(
    out: Elements, box: Box, table: ChunkTable, dtype: np.dtype[np.generic], files: OpenFiles
) -> Iterator[tuple[Elements, Elements]]:
    """Yield views of `out` and the stored elements for them, as `StoredPart.blocks` does.

    `out` has the shape of the box, and is not written to.

    Raises:
        CorruptError: a file is gone or ends early.
    """
    parts = list(stored_parts(out, box, table, dtype, files))
    if any(isinstance(part.file, RemoteFile) for part in parts):
        whole = np.empty(box.sizes, dtype)
        fill_box(whole, box, table, dtype, files)  # with all requests in parallel
        yield out, whole
        return
    for part in parts:
        yield from part.blocks()


class StoredPart(NamedTuple):
    """The part of a tensor's box that one chunk contains.

    Attributes:
        place: a view of the box, to be filled.
        file: the open file of the chunk.
        start: the byte of the first element in the file.
        strides: bytes between elements in the file, per dimension.
        dtype: the stored dtype.
    """

    place: Elements
    file: Opened
    start: int
    strides: tuple[int, ...]
    dtype: np.dtype[np.generic]

    def run(self) -> memoryview | None:
        """Return the bytes to be filled if they are contiguous in the file; else None."""
        place = self.place
        if place.dtype != self.dtype or place.strides != self.strides:
            return None
        return place.reshape(-1).view(np.uint8).data if place.flags.c_contiguous else None

    def fill(self) -> None:
        """Read the elements from the file."""
        run = self.run()
        if run is not None:  # no copy: it is read into its place
            read_exactly(self.file, self.start, run)
            return
        with np.errstate(all="ignore"):
            for place, part in self.blocks():
                if part.dtype == np.float64 and place.itemsize == 2:
                    # torch rounds twice: its cast from float64 to 16 bits goes through float32.
                    part = part.astype(np.float32)  # noqa: PLW2901
                np.copyto(place, part, casting="unsafe")

    def blocks(self) -> Iterator[tuple[Elements, Elements]]:
        """Yield views of the place and their elements, which are valid until the next iteration.

        Contiguous elements of a local file come in blocks that fit into the CPU's cache.
        """
        whole = self.place.reshape(-1) if self.place.flags.c_contiguous else self.place
        steps = row_major_strides(self.place.shape)
        row, itemsize = prod(whole.shape[1:]), self.dtype.itemsize
        count = _BLOCK // (row * itemsize)
        is_run = self.strides == tuple(step * itemsize for step in steps)
        if not is_run or not count or isinstance(self.file, RemoteFile):
            yield (
                self.place,
                read_strided(self.file, self.start, self.strides, self.place.shape, self.dtype),
            )
            return
        for first in range(0, len(whole), count):
            place = whole[first : first + count]
            data = _reused.block[: place.size * itemsize]
            read_exactly(self.file, self.start + first * row * itemsize, data.data)
            yield place, data.view(self.dtype).reshape(place.shape)


def stored_parts(
    out: Elements, box: Box, table: ChunkTable, dtype: np.dtype[np.generic], files: OpenFiles
) -> Iterator[StoredPart]:
    """Yield the part of a box that each chunk contains; `out` has the box's shape.

    Raises:
        CorruptError: a file is gone.
    """
    starts = table.offsets < np.asarray(box.ends, dtype=np.int64)
    ends = table.offsets + table.sizes > np.asarray(box.offsets, dtype=np.int64)
    for row in np.flatnonzero((starts & ends).all(axis=1)).tolist():
        # Plain integers take a quarter of the time of such small arrays.
        first, sizes = table.offsets[row].tolist(), table.sizes[row].tolist()
        lo = tuple(map(max, first, box.offsets))
        hi = tuple(map(min, map(add, first, sizes), box.ends))
        inside = Box(tuple(map(sub, lo, first)), tuple(map(sub, hi, lo)))
        place = view(out, Box(tuple(map(sub, lo, box.offsets)), inside.sizes))
        yield StoredPart(place, *_place(table, row, inside, dtype, files), dtype)


def view(array: Elements, box: Box) -> Elements:
    """Return a box of an array as a view, even of an array without dimensions."""
    return array[place_of(box)]


def place_of(box: Box) -> tuple[slice | EllipsisType, ...]:
    """Return the index of a box in an array; its ellipsis makes a view of a 0-d array, too."""
    return (*(slice(lo, hi) for lo, hi in zip(box.offsets, box.ends, strict=True)), ...)


def equal_tensors(first: TensorEntry, second: TensorEntry, files: OpenFiles) -> bool:
    """Return whether two tensors have the same dtype, shape and bytes, in any chunks."""
    if first.dtype is not second.dtype or first.shape != second.shape:
        return False
    if _are_same_bytes(first.chunks, second.chunks):
        return True
    raw = raw_dtype(first.dtype)
    for box in tiles(first.shape, row_tile(first.shape, _COMPARED // raw.itemsize)):
        ours, theirs = np.empty(box.sizes, raw), np.empty(box.sizes, raw)
        fill_box(ours, box, first.chunks, raw, files)
        fill_box(theirs, box, second.chunks, raw, files)
        if ours.tobytes() != theirs.tobytes():
            return False
    return True


def _are_same_bytes(first: ChunkTable, second: ChunkTable) -> bool:
    """Return whether two tables refer to the same bytes: FSDP2 saves tied weights like that."""
    if first.paths is not second.paths or len(first) != len(second):
        return False
    columns = ("offsets", "sizes", "file", "start", "length")
    same = all((getattr(first, name) == getattr(second, name)).all() for name in columns)
    return same and first.strides is None and second.strides is None


def replicas(table: ChunkTable) -> Iterator[tuple[int, int]]:
    """Yield the rows of the first copy and another for every chunk that is stored repeatedly."""
    seen: dict[bytes, int] = {}
    for row, box in enumerate(np.concatenate([table.offsets, table.sizes], axis=1)):
        first = seen.setdefault(box.tobytes(), row)
        if first != row and table.length[row]:
            yield first, row


def equal_chunks(entry: TensorEntry, first: int, other: int, files: OpenFiles) -> bool:
    """Return whether two chunks of equal size have the same bytes."""
    raw, sizes = raw_dtype(entry.dtype), entry.chunks.sizes[first].tolist()
    boxes = tiles(sizes, row_tile(sizes, _COMPARED // raw.itemsize))
    return first_difference(entry.chunks, (first, other), boxes, raw, files) is None
