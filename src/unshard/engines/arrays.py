"""Make tensors, or parts of them, in the memory of this process: tile by tile into the result.

At most `TILE_BYTES` per thread that reads, and for at most `AT_ONCE` of them, are needed in
addition to the results, whatever is read. Arrays have raw bits; the caller knows their dtype.
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

Place = tuple[slice | EllipsisType, ...]
Part = tuple[Place, Elements]
Empty = Callable[[tuple[int, ...], np.dtype[np.generic]], Elements]
"""Returns an array of a shape and a dtype, its values whatever they are."""


class TensorReader:
    """Reads tensors of a checkpoint; several threads may, and `AT_ONCE` tiles are made at a time.

    Args:
        path: that of the checkpoint, for errors.
        empty: makes the arrays that it fills.
        states: the files of the checkpoint as they were when it was opened.
    """

    def __init__(
        self, path: Path, empty: Empty = np.empty, states: FileStates | None = None
    ) -> None:
        self._empty = empty
        what = f"{path}: the checkpoint was closed"
        self._files = LentFiles(what, states=states)

    def close(self) -> None:
        """Close all files once the tiles that are being made are done; nothing can be read then."""
        self._files.close()

    def read(self, operation: Tiled, selection: Selection) -> Elements:
        """Return what a selection takes of the tensor that an operation makes.

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
            for place, bits in self._computed_parts(operation, selection):
                forward[place] = bits
        return out.reshape(selection.shape)

    def parts(self, operation: Tiled, selection: Selection) -> Iterator[Part]:
        """Yield what `read` returns in parts, for a caller that has other memory for it.

        A place is that in an array of the selection's counts, of which no dimension is turned. The
        bits of a part change when the next one is asked for.

        Raises:
            CorruptError: as by `read`.
            UsageError: as by `read`.
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

    def _computed_parts(self, operation: Tiled, selection: Selection) -> Iterator[Part]:
        """Yield parts of the tiles that a merge makes: sums depend on how tiles are cut."""
        shape, bits = operation.target.shape, raw_dtype(operation.to)
        for part in tile_parts(shape, tile_shape(operation, TILE_BYTES), selection):
            with self._files.borrow() as files:
                made = make_tile(Tile(operation, part.tile), files)
            taken: Place = (*part.taken, ...)  # an array also of a tensor without dimensions
            yield part.place, made.view(bits)[taken]


def _stored_parts(gather: Gather, selection: Selection) -> Iterator[tuple[Box, ChunkTable]]:
    """Yield boxes of what a selection takes, which one tile holds, and the chunks of all of it."""
    if 0 in selection.counts:
        return
    itemsize = gather.to.itemsize
    table = sliced(gather.source.chunks, selection, itemsize)
    elements, cut = TILE_BYTES // itemsize, row_tile
    if table.strides is not None:  # runs are short: reading one takes more than its elements
        elements, cut = elements // SLACK, square_tile if _is_turned(table) else row_tile
    for box in tiles(selection.counts, cut(selection.counts, elements)):
        yield box, table


def _is_turned(table: ChunkTable) -> bool:
    """Return whether neighbours in a row are stored further apart than those in a column."""
    strides = np.where(table.sizes > 1, strides_of(table), np.iinfo(np.int64).max)
    return bool((strides[:, :-1] < strides[:, -1:]).any())
