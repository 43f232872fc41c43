"""Read tensors, or parts of them, into memory, tile by tile.

In addition to the result, at most `TILE_BYTES` per reading thread, for at most `AT_ONCE` threads,
are needed. Arrays have raw bits; the caller knows their dtype.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import EllipsisType

import numpy as np

from unshard.containers.chunks import fill_box, place_of, view
from unshard.containers.file_states import FileStates
from unshard.containers.open_files import LentFiles
from unshard.containers.strided import SLACK, Elements, raw_dtype
from unshard.plan.operations import Gather, Tiled
from unshard.plan.work import Tile, tile_parts, tile_shape
from unshard.tensors.boxes import Box, row_tile, square_tile, tiles
from unshard.tensors.catalog import ChunkTable
from unshard.tensors.selection import Selection, sliced, strides_of
from unshard.write.execute import make_tile

TILE_BYTES = 4 * 1024 * 1024

Index = tuple[slice | EllipsisType, ...]
IndexedBits = tuple[Index, Elements]
Empty = Callable[[tuple[int, ...], np.dtype[np.generic]], Elements]
"""Returns an uninitialised array of a shape and a dtype."""


class TensorReader:
    """Reads tensors of a checkpoint, for several threads; `AT_ONCE` tiles are made at a time.

    Args:
        path: the path of the checkpoint, for errors.
        empty: allocates the arrays.
        states: the states of the checkpoint's files when it was opened.
    """

    def __init__(
        self, path: Path, empty: Empty = np.empty, states: FileStates | None = None
    ) -> None:
        self._empty = empty
        self._files = LentFiles(f"{path}: the checkpoint was closed", states=states)

    def close(self) -> None:
        """Close all files after the current tiles; afterwards nothing can be read."""
        self._files.close()

    def read(self, operation: Tiled, selection: Selection) -> Elements:
        """Return a selection of the tensor that an operation makes.

        Returns:
            Raw bits, row-major, in the selection's shape; the array shares no memory.

        Raises:
            CorruptError: a file is gone, has changed, or ends early.
            UsageError: the reader is closed.
        """
        self._files.check()
        out = self._empty(selection.counts, raw_dtype(operation.to))
        forward = np.flip(out, selection.turned) if selection.turned else out
        if isinstance(operation, Gather):
            for box, table in _stored_parts(operation, selection):
                with self._files.borrow() as files:
                    fill_box(view(forward, box), box, table, out.dtype, files)
        else:
            for index, bits in self._computed_parts(operation, selection):
                forward[index] = bits
        return out.reshape(selection.shape)

    def parts(self, operation: Tiled, selection: Selection) -> Iterator[IndexedBits]:
        """Yield the result of `read` in parts, for callers with their own memory.

        An index applies to an array of the selection's counts, with no dimension turned. The bits
        are valid until the next part is requested.
        """
        self._files.check()
        if not isinstance(operation, Gather):
            yield from self._computed_parts(operation, selection)
            return
        memory = self._empty((0,), raw_dtype(operation.to))
        for box, table in _stored_parts(operation, selection):
            if memory.size < box.volume:
                memory = self._empty((box.volume,), memory.dtype)
            bits = memory[: box.volume].reshape(box.sizes)
            with self._files.borrow() as files:
                fill_box(bits, box, table, bits.dtype, files)
            yield place_of(box), bits

    def _computed_parts(self, operation: Tiled, selection: Selection) -> Iterator[IndexedBits]:
        """Yield parts of a merge's own tiles, because sums depend on how tiles are cut."""
        shape, bits = operation.target.shape, raw_dtype(operation.to)
        for part in tile_parts(shape, tile_shape(operation, TILE_BYTES), selection):
            with self._files.borrow() as files:
                elements = make_tile(Tile(operation, part.tile), files)
            index: Index = (*part.taken, ...)  # an array even for a tensor without dimensions
            yield part.place, elements.view(bits)[index]


def _stored_parts(gather: Gather, selection: Selection) -> Iterator[tuple[Box, ChunkTable]]:
    """Yield boxes of at most a tile that cover a selection, each with the chunks of all of it."""
    if 0 in selection.counts:
        return
    itemsize = gather.to.itemsize
    table = sliced(gather.source.chunks, selection, itemsize)
    elements, cut = TILE_BYTES // itemsize, row_tile
    if table.strides is not None:  # runs are short, so that reads take more bytes than the elements
        strides = np.where(table.sizes > 1, strides_of(table), np.iinfo(np.int64).max)
        # Neighbours in a row are stored further apart than neighbours in a column.
        is_turned = (strides[:, :-1] < strides[:, -1:]).any()
        elements, cut = elements // SLACK, square_tile if is_turned else row_tile
    for box in tiles(selection.counts, cut(selection.counts, elements)):
        yield box, table
