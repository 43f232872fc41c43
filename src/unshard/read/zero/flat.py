"""Flat tensors as boxes: ZeRO lays tensors end to end and cuts the result at any element.

A range of a flattened tensor of N dimensions is at most 2N-1 boxes: the rest of a row, whole rows,
and the start of another, again in every dimension. A flat piece thus becomes ordinary chunks.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from unshard.tensors.boxes import Ints
from unshard.tensors.catalog import ChunkTable, TensorEntry
from unshard.tensors.dtypes import DType

_Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]


def flat_boxes(shape: Sequence[int], begin: int, end: int) -> _Boxes:
    """Return (offsets, sizes) of the boxes that elements `begin` to `end` of a tensor make.

    Elements are counted row-major; the boxes are in that order, each a run of elements.
    """
    if not shape:
        return [((), ())] if end > begin else []
    inner = shape[1:]
    row = prod(inner)
    if not inner or not row:
        return [((begin,), (end - begin,))] if row and end > begin else []
    (first, head), (last, tail) = divmod(begin, row), divmod(end, row)
    if first == last:
        return _in_row(first, flat_boxes(inner, head, tail))
    boxes = _in_row(first, flat_boxes(inner, head, row)) if head else []
    first += bool(head)
    if first < last:
        boxes.append(((first, *(0 for _ in inner)), (last - first, *inner)))
    return boxes + _in_row(last, flat_boxes(inner, 0, tail))


def _in_row(row: int, boxes: _Boxes) -> _Boxes:
    return [((row, *offsets), (1, *sizes)) for offsets, sizes in boxes]


class FlatRun(NamedTuple):
    """`elements` that rank `rank` stored in a row from byte `start` on, in file number `file`."""

    rank: int
    file: int
    start: int
    elements: int


class FlatTensor:
    """A flat tensor of one dtype: runs laid end to end."""

    def __init__(self, dtype: DType, runs: Sequence[FlatRun]) -> None:
        self.dtype = dtype
        self._runs = [run for run in runs if run.elements]
        self._ends = list(accumulate(run.elements for run in self._runs))

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self._ends[-1] if self._ends else 0

    def cut(self, begin: int, elements: int) -> list[FlatRun]:
        """Return the runs of `elements` from element `begin` on; the tensor must have them."""
        runs: list[FlatRun] = []
        at = bisect_right(self._ends, begin)
        while elements:
            run = self._runs[at]
            skipped = begin - (self._ends[at] - run.elements)
            size = min(run.elements - skipped, elements)
            start = run.start + skipped * self.dtype.itemsize
            runs.append(FlatRun(run.rank, run.file, start, size))
            begin, elements, at = begin + size, elements - size, at + 1
        return runs


class _RunBoxes(NamedTuple):
    """The boxes that the runs of one tensor make.

    Attributes:
        offsets, sizes: (boxes, dimensions).
        run: the number of the run that contains each box.
        before: the elements of that run before each box.
        elements: of each box.
    """

    offsets: Ints
    sizes: Ints
    run: Ints
    before: Ints
    elements: Ints


class FlatCuts:
    """Makes tensors of flat runs; tensors cut at the same elements share their arrays of boxes."""

    def __init__(self, paths: tuple[Path, ...]) -> None:
        self._paths = paths
        self._boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], _RunBoxes] = {}

    def entry(
        self, name: str, dtype: DType, shape: tuple[int, ...], runs: Sequence[FlatRun]
    ) -> TensorEntry:
        """Return the tensor that runs make: all its elements, row-major."""
        lengths = tuple(run.elements for run in runs)
        key = shape, lengths
        boxes = self._boxes.get(key)
        if boxes is None:
            boxes = self._boxes[key] = _boxes_of_runs(shape, lengths)
        columns = np.array([(run.rank, run.file, run.start) for run in runs], np.int64)
        rank, file, start = columns.reshape(-1, 3)[boxes.run].T
        table = ChunkTable(
            self._paths,
            boxes.offsets,
            boxes.sizes,
            None,
            file.astype(np.int32),
            start + boxes.before * dtype.itemsize,
            boxes.elements * dtype.itemsize,
            rank.astype(np.int32),
            np.zeros(len(boxes.run), np.bool_),
        )
        return TensorEntry(name, dtype, shape, table)


def _boxes_of_runs(shape: tuple[int, ...], lengths: Sequence[int]) -> _RunBoxes:
    rows: list[tuple[int, ...]] = []
    begin = 0
    for number, length in enumerate(lengths):
        before = 0
        for offsets, sizes in flat_boxes(shape, begin, begin + length):
            rows.append((number, before, prod(sizes), *offsets, *sizes))
            before += prod(sizes)
        begin += length
    ndim = len(shape)
    grid = np.array(rows, np.int64).reshape(-1, 3 + 2 * ndim)
    offsets_each, sizes_each = grid[:, 3 : 3 + ndim].copy(), grid[:, 3 + ndim :].copy()
    return _RunBoxes(offsets_each, sizes_each, *grid[:, :3].T.copy())
