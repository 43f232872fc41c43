"""Make tensors, or parts of them, in the memory of this process: tile by tile into the result.

At most `TILE_BYTES` are needed in addition to the result, whatever is read. Arrays have raw bits;
the caller knows their dtype.
"""

import os
from collections.abc import Callable
from pathlib import Path
from threading import Lock

import numpy as np

from unshard.containers.chunks import fill_box, view
from unshard.containers.open_files import OpenFiles
from unshard.containers.strided import SLACK, Elements, raw_dtype
from unshard.errors import UsageError
from unshard.plan.operations import Gather, Tiled
from unshard.plan.work import Tile, tile_parts, tile_shape
from unshard.tensors.boxes import row_tile, square_tile, tiles
from unshard.tensors.catalog import ChunkTable
from unshard.tensors.selection import Selection, sliced, strides_of
from unshard.write.execute import make_tile

__all__ = ["TILE_BYTES", "Empty", "TensorReader"]

TILE_BYTES = 4 * 1024 * 1024
_OPEN_FILES = 64

Empty = Callable[[tuple[int, ...], np.dtype[np.generic]], Elements]
"""Returns an array of a shape and a dtype, its values whatever they are."""


class TensorReader:
    """Reads tensors of a checkpoint; several threads may, and one tile is made at a time.

    `path` is that of the checkpoint, for errors; `empty` makes the arrays that it fills.
    """

    def __init__(self, path: Path, empty: Empty = np.empty) -> None:
        self._path = path
        self._empty = empty
        self._lock = Lock()
        self._files = OpenFiles(os.O_RDONLY, limit=_OPEN_FILES)
        self._closed = False

    def close(self) -> None:
        """Close all files; nothing can be read afterwards."""
        with self._lock:
            self._closed = True
            self._files.close()

    def read(self, operation: Tiled, selection: Selection) -> Elements:
        """Return what a selection takes of the tensor that an operation makes.

        Returns:
            Raw bits, row-major, in the selection's shape; the array shares no memory.

        Raises:
            CorruptError: a file is gone or ends early.
            UsageError: the reader is closed.
        """
        self._check()
        out = self._empty(selection.counts, raw_dtype(operation.to))
        forward = np.flip(out, selection.turned) if selection.turned else out
        if out.size:
            if isinstance(operation, Gather):
                self._gather(forward, operation, selection)
            else:
                self._compute(forward, operation, selection)
        return out.reshape(selection.shape)

    def _gather(self, out: Elements, gather: Gather, selection: Selection) -> None:
        """Fill `out` with stored values; only what is taken is read."""
        table = sliced(gather.source.chunks, selection, out.itemsize)
        elements, cut = TILE_BYTES // out.itemsize, row_tile
        if table.strides is not None:  # runs are short: reading one takes more than its elements
            elements, cut = elements // SLACK, square_tile if _is_turned(table) else row_tile
        for box in tiles(out.shape, cut(out.shape, elements)):
            with self._lock:
                self._check()
                fill_box(view(out, box), box, table, out.dtype, self._files)

    def _compute(self, out: Elements, operation: Tiled, selection: Selection) -> None:
        """Fill `out` from the same tiles that a merge makes: sums depend on how tiles are cut."""
        shape = operation.target.shape
        for part in tile_parts(shape, tile_shape(operation, TILE_BYTES), selection):
            with self._lock:
                self._check()
                made = make_tile(Tile(operation, part.tile), self._files)
            out[part.place] = made.view(out.dtype)[part.taken]

    def _check(self) -> None:
        if self._closed:
            raise UsageError(f"{self._path}: the checkpoint was closed", hint="open it again")


def _is_turned(table: ChunkTable) -> bool:
    """Return whether neighbours in a row are stored further apart than those in a column."""
    strides = np.where(table.sizes > 1, strides_of(table), np.iinfo(np.int64).max)
    return bool((strides[:, :-1] < strides[:, -1:]).any())
