"""Tensors that were flattened, laid end to end and cut at any element, as boxes.

A range of a flattened tensor of N dimensions is at most 2N-1 boxes: the rest of a row, whole rows,
and the start of another, again in every dimension. So a flat piece is chunks like any others.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path

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


@dataclass(frozen=True, slots=True)
class Run:
    """`count` elements that follow one another in a file.

    Attributes:
        rank: the rank that wrote them.
        file: number of the file.
        start: its byte where they begin.
        count: elements.
    """

    rank: int
    file: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of one dtype that are one flat tensor when they are laid end to end."""

    dtype: DType
    runs: tuple[Run, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, dtype: DType, runs: Sequence[Run]) -> "Runs":
        """Return these runs; empty ones are left out."""
        kept = tuple(run for run in runs if run.count)
        return cls(dtype, kept, tuple(accumulate(run.count for run in kept)))

    @property
    def count(self) -> int:
        """Elements of all."""
        return self.ends[-1] if self.ends else 0

    def cut(self, begin: int, count: int) -> list[Run]:
        """Return the runs of `count` elements from `begin` on, which must be there."""
        found: list[Run] = []
        at = bisect_right(self.ends, begin)
        while count:
            run = self.runs[at]
            skipped = begin - (self.ends[at] - run.count)
            taken = min(run.count - skipped, count)
            start = run.start + skipped * self.dtype.itemsize
            found.append(Run(run.rank, run.file, start, taken))
            begin, count, at = begin + taken, count - taken, at + 1
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """The boxes of a tensor that is cut at the same elements as others of its shape.

    Attributes:
        offsets, sizes: of all boxes.
        run: of each box, the number of the run that it is in.
        before: of each box, the elements of that run before it.
        elements: of each box.
    """

    offsets: Ints
    sizes: Ints
    run: Ints
    before: Ints
    elements: Ints


class FlatCuts:
    """Makes tensors of flat runs; those that are cut alike share their arrays of boxes."""

    def __init__(self, paths: tuple[Path, ...]) -> None:
        self._paths = paths
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], _Cut] = {}

    def entry(
        self, name: str, dtype: DType, shape: tuple[int, ...], runs: Sequence[Run]
    ) -> TensorEntry:
        """Return the tensor that runs make: all its elements, row-major."""
        counts = tuple(run.count for run in runs)
        key = shape, counts
        cut = self._known.get(key)
        if cut is None:
            cut = self._known[key] = _cut(shape, counts)
        columns = np.array([(one.rank, one.file, one.start) for one in runs], np.int64)
        rank, file, start = columns.reshape(-1, 3)[cut.run].T
        table = ChunkTable(
            self._paths,
            cut.offsets,
            cut.sizes,
            None,
            file.astype(np.int32),
            start + cut.before * dtype.itemsize,
            cut.elements * dtype.itemsize,
            rank.astype(np.int32),
            np.zeros(len(cut.run), np.bool_),
        )
        return TensorEntry(name, dtype, shape, table)


def _cut(shape: tuple[int, ...], counts: Sequence[int]) -> _Cut:
    rows: list[tuple[int, ...]] = []
    begin = 0
    for number, count in enumerate(counts):
        before = 0
        for offsets, sizes in flat_boxes(shape, begin, begin + count):
            elements = prod(sizes)
            rows.append((number, before, elements, *offsets, *sizes))
            before += elements
        begin += count
    ndim = len(shape)
    grid = np.array(rows, np.int64).reshape(-1, 3 + 2 * ndim)
    run, before_each, elements_each = grid[:, :3].T.copy()
    offsets_each, sizes_each = grid[:, 3 : 3 + ndim].copy(), grid[:, 3 + ndim :].copy()
    return _Cut(offsets_each, sizes_each, run, before_each, elements_each)
