"""Turn recipes and a layout into operations.

A tensor is copied run by run if its dtype stays and its runs are long; otherwise it is made in
tiles. Every region comes from its first replica, so a checkpoint has only one plan. A recipe of
boxes, permutations, stacks and concatenations is again a set of strided boxes in files, which
`table_of` computes for all chunks at once, without reading a byte.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unshard.convert.recipes import (
    BlockScales,
    Concat,
    Dequantized,
    LowRank,
    Quantized,
    Recipe,
    Stack,
    Take,
    WeightedSum,
    dtype_of,
    shape_of,
    takes,
)
from unshard.plan.layout import Layout, OutputTensor
from unshard.plan.operations import (
    COPY_ROW,
    Cast,
    Dequantize,
    FindScales,
    Fuse,
    Gather,
    Plan,
    Quantize,
    Reduce,
    StoredTensor,
    Target,
    Tiled,
)
from unshard.tensors.boxes import Box, Ints, distinct, row_major_strides
from unshard.tensors.catalog import ChunkTable
from unshard.tensors.dtypes import BY_NAME, DType

if TYPE_CHECKING:
    from unshard.tensors.selection import Grid

LONG_RUN = 64 * 1024
"""Runs of at least this many bytes are copied one by one; shorter runs are gathered in memory."""

_CACHED_TENSORS = 8  # the tensors of a layer and its neighbours
_CACHED_RUNS = 64
_LEAST = 1e-12
_LEAST_BFLOAT16 = float.fromhex("0x1.1ap-40")

Copies = NDArray[np.void]
_TensorKey = tuple[int, tuple[int, ...] | None]
"""A tensor, by identity, and the permutation of its parts."""
_RunsKey = tuple[int, int, tuple[int, ...], int]
"""The cut of a tensor: identities of its chunks' offsets and sizes; its shape; its item size."""


class _CutCache:
    """The chunks of the parts of tensors of which recipes take several parts.

    Cutting all parts of a tensor at once is fast; the tables of the last few tensors are kept.
    """

    def __init__(self, recipes: Iterable[Recipe] = ()) -> None:
        self._grids: dict[_TensorKey, dict[Grid, None]] = {}
        self._tables: dict[_TensorKey, dict[Grid, ChunkTable]] = {}
        for part in chain.from_iterable(map(takes, recipes)):
            if part.box != Box.whole(part.entry.shape):
                key = id(part.entry), part.permutation
                self._grids.setdefault(key, {})[_grid_of(part)] = None

    def get(self, part: Take) -> ChunkTable | None:
        """Return the distinct chunks of a part; None if its tensor has no other part."""
        key, grid = (id(part.entry), part.permutation), _grid_of(part)
        grids = self._grids.get(key, {})
        if len(grids) < 2 or grid not in grids:
            return None
        if key not in self._tables:
            if len(self._tables) == _CACHED_TENSORS:
                del self._tables[next(iter(self._tables))]
            tables = _cut_out(part, list(grids), _distinct(part.entry.chunks))
            self._tables[key] = dict(zip(grids, tables, strict=True))
        return self._tables[key][grid]


def _grid_of(part: Take) -> "Grid":
    starts, counts = part.box.offsets, part.box.sizes
    return starts, part.steps or (1,) * len(starts), counts


def _cut_out(part: Take, grids: "Sequence[Grid]", chunks: ChunkTable) -> list[ChunkTable]:
    """Return these grids of a tensor's chunks, with the permutation of the part."""
    from unshard.tensors.selection import cut_out

    order = range(len(part.entry.shape)) if part.permutation is None else part.permutation
    return cut_out(chunks, grids, part.entry.dtype.itemsize, order)


_EMPTY_CACHE = _CutCache()


class _LongRuns(NamedTuple):
    """The copies of the chunks of a tensor that starts at byte 0 of a file.

    Attributes:
        order: the chunks, by target.
        rows: their copies, without file, source and start.
    """

    order: Ints
    rows: Copies


@dataclass(slots=True)
class _Operations:
    """The operations planned so far, and the source files that they refer to by number."""

    copies: list[Copies] = field(default_factory=list)
    tiled: list[Tiled] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    bases: dict[int, tuple[int, tuple[Path, ...]]] = field(default_factory=dict)
    runs: dict[_RunsKey, tuple[_LongRuns | None, ChunkTable]] = field(default_factory=dict)
    cuts: _CutCache = _EMPTY_CACHE
    bytes_read: int = 0

    def base(self, paths: tuple[Path, ...]) -> int:
        """Return the number of the first of these files."""
        # The tables of a checkpoint share one tuple, which is compared by identity: hashing
        # thousands of paths for every tensor would be slow.
        if id(paths) not in self.bases:
            self.bases[id(paths)] = len(self.paths), paths
            self.paths += paths
        return self.bases[id(paths)][0]

    def copies_of(self, target: Target, source: StoredTensor) -> Copies | None:
        """Return the copies that make a tensor, if its runs are long."""
        chunks = source.chunks
        if chunks.strides is not None or chunks.compressed.any():
            return None
        key = id(chunks.offsets), id(chunks.sizes), target.shape, source.dtype.itemsize
        if key not in self.runs:  # tensors that are cut alike share these arrays
            if len(self.runs) == _CACHED_RUNS:
                del self.runs[next(iter(self.runs))]
            self.runs[key] = _long_runs(target.shape, chunks, source.dtype.itemsize), chunks
        runs = self.runs[key][0]
        if runs is None:
            return None
        rows = runs.rows.copy()
        rows["file"] = target.file
        rows["target"] += target.start
        rows["source"] = chunks.file[runs.order] + self.base(chunks.paths)
        rows["start"] = chunks.start[runs.order]
        return rows


def make_plan(layout: Layout) -> Plan:
    """Return the operations that make the tensors of every output file, without the headers."""
    filled = [
        (Target(index, len(file.header) + tensor.data_offsets[0], tensor.shape), tensor)
        for index, file in enumerate(layout.files)
        for tensor in file.tensors
        if 0 not in tensor.shape
    ]
    operations = _Operations(cuts=_CutCache(tensor.recipe for _, tensor in filled))
    for target, tensor in filled:
        _plan_tensor(operations, target, tensor)
    copies = np.concatenate([np.empty(0, COPY_ROW), *operations.copies], dtype=COPY_ROW)
    return Plan(
        layout,
        tuple(operations.paths),
        _coalesced(copies),
        _scales_first(operations.tiled),
        operations.bytes_read,
        sum(file.size for file in layout.files),
    )


def _distinct(chunks: ChunkTable) -> ChunkTable:
    rows = distinct(chunks.offsets, chunks.sizes)
    return chunks if len(rows) == len(chunks) else chunks.take(rows)


def _plan_tensor(operations: _Operations, target: Target, tensor: OutputTensor) -> None:
    operations.bytes_read += sum(
        part.box.volume * part.entry.dtype.itemsize for part in takes(tensor.recipe)
    )
    operation = make_operation(target, tensor.recipe, tensor.dtype, operations.cuts)
    copies = None
    if isinstance(operation, Gather):
        copies = operations.copies_of(target, operation.source)
    if copies is not None:
        operations.copies.append(copies)
    else:
        operations.tiled.append(operation)


def make_operation(
    target: Target, recipe: Recipe, to: DType, cuts: _CutCache = _EMPTY_CACHE
) -> Tiled:
    """Return the operation that makes a recipe's tensor in memory, tile by tile."""
    match recipe:
        case WeightedSum(terms):
            summed = tuple((weight, _source(part, cuts)) for weight, part in terms)
            return Reduce(target, summed, to)
        case LowRank(base, a, b, scale):
            sources = (_source(base, cuts), _source(a, cuts), _source(b, cuts))
            return Fuse(target, *sources, shape_of(a)[-2], scale, to)
        case Quantized(values, name):
            return Quantize(target, *_in_float32(values, cuts), name)
        case BlockScales(values, name):
            return FindScales(target, *_in_float32(values, cuts), name)
        case Dequantized(weight, scales, block):
            return Dequantize(target, _source(weight, cuts), _source(scales, cuts), block, to)
        case _:
            source = _source(recipe, cuts)
            return Gather(target, source) if source.dtype is to else Cast(target, source, to)


def _in_float32(values: Recipe, cuts: _CutCache) -> tuple[Tiled, float]:
    """Return the operation that makes a matrix to quantise, and `least` of `Quantize`.

    slime, whose files are the model for ours, clamps in the dtype of the checkpoint, where 1e-12 is
    rounded.
    """
    nowhere = Target(0, 0, shape_of(values))
    least = _LEAST_BFLOAT16 if dtype_of(values) is BY_NAME["bfloat16"] else _LEAST
    return make_operation(nowhere, values, BY_NAME["float32"], cuts), least


def _scales_first(tiled: Sequence[Tiled]) -> tuple[Tiled, ...]:
    """Return the operations with the scales of a matrix just before its elements.

    Both read the same bytes, and the second read then comes from the page cache.
    """
    scales = {made.name: made for made in tiled if isinstance(made, FindScales)}
    ordered: list[Tiled] = []
    for operation in tiled:
        if isinstance(operation, Quantize) and operation.name in scales:
            ordered.append(scales.pop(operation.name))
        if not isinstance(operation, FindScales):
            ordered.append(operation)
    return (*scales.values(), *ordered)


def _source(recipe: Recipe, cuts: _CutCache) -> StoredTensor:
    return StoredTensor(dtype_of(recipe), table_of(recipe, cuts))


def table_of(recipe: Recipe, cuts: _CutCache = _EMPTY_CACHE) -> ChunkTable:
    """Return the distinct chunks that make a recipe's tensor; every region from its first replica.

    Raises:
        TypeError: the recipe computes values, which are not stored.
    """
    if isinstance(recipe, Take):
        return _chunks_of(recipe, cuts)
    from unshard.tensors.selection import joined, strides_of, unless_row_major

    match recipe:
        case Stack(dim, parts):
            tables = [table_of(part, cuts) for part in parts]
            table = joined(tables)
            index = np.repeat(np.arange(len(parts)), list(map(len, tables)))
            offsets = np.insert(table.offsets, dim, index, axis=1)
            sizes = np.insert(table.sizes, dim, 1, axis=1)
            strides = unless_row_major(sizes, np.insert(strides_of(table), dim, 0, axis=1))
            return replace(table, offsets=offsets, sizes=sizes, strides=strides)
        case Concat(dim, parts):
            tables, start = [], 0
            for part in parts:
                table = table_of(part, cuts)
                offsets = table.offsets.copy()
                offsets[:, dim] += start
                tables.append(replace(table, offsets=offsets))
                start += shape_of(part)[dim]
            return joined(tables)
        case _:
            raise TypeError(f"the values of a {type(recipe).__name__} are computed")


def _chunks_of(part: Take, cuts: _CutCache) -> ChunkTable:
    """Return the distinct chunks of a part of a tensor."""
    chunks = part.entry.chunks
    if part.permutation is None and part.box == Box.whole(part.entry.shape):
        return _distinct(chunks)
    cached = cuts.get(part)
    if cached is not None:
        return cached
    # A part overlaps few of a tensor's chunks, so it is cut before replicas are removed.
    return _distinct(_cut_out(part, [_grid_of(part)], chunks)[0])


def _long_runs(shape: tuple[int, ...], chunks: ChunkTable, itemsize: int) -> _LongRuns | None:
    """Return one row per chunk if its runs are long and evenly spaced in the target, else None.

    A chunk whose last cut dimension is `cut` consists of runs of prod(sizes[cut:]) elements. They
    are evenly spaced if only the first of the dimensions before `cut` is cut. Chunks that are one
    run each, such as those of a flattened tensor, count as cut along the first dimension alone.
    """
    cuts = np.flatnonzero((chunks.sizes != np.asarray(shape, dtype=np.int64)).any(axis=0))
    cut = int(cuts[-1]) if len(cuts) and not _are_runs(shape, chunks.sizes) else 0
    first = next((dim for dim, size in enumerate(shape) if size > 1), 0)
    if cut and set(cuts.tolist()) - {first, cut}:
        return None
    length = chunks.sizes[:, cut:].prod(axis=1) * itemsize
    if float(length.mean()) < LONG_RUN:  # the mean: the last chunk may be short
        return None
    strides: Ints = np.asarray(row_major_strides(shape), dtype=np.int64)
    rows = np.zeros(len(chunks), COPY_ROW)
    rows["target"] = (chunks.offsets @ strides) * itemsize
    rows["length"] = length
    rows["count"] = chunks.sizes[:, :cut].prod(axis=1)
    rows["target_stride"] = prod(shape[cut:]) * itemsize
    order = np.argsort(rows["target"], kind="stable")
    return _LongRuns(order, rows[order])


def _are_runs(shape: tuple[int, ...], sizes: Ints) -> bool:
    """Return whether every box is one run of the tensor's elements, in row-major order.

    For some dimension, all sizes before it must be 1, and all dimensions after it whole.
    """
    ones = np.ones((len(sizes), 1), np.bool_)
    single, whole = sizes == 1, sizes == np.asarray(shape, dtype=np.int64)
    before = np.logical_and.accumulate(np.concatenate([ones, single[:, :-1]], axis=1), axis=1)
    after = np.logical_and.accumulate(np.concatenate([ones, whole[:, :0:-1]], axis=1), axis=1)
    return bool((before & after[:, ::-1]).any(axis=1).all())


def _coalesced(copies: Copies) -> Copies:
    """Join copies that are adjacent in both source and target."""
    if len(copies) < 2:
        return copies
    before, after = copies[:-1], copies[1:]
    joined = (
        (before["file"] == after["file"])
        & (before["source"] == after["source"])
        & (before["count"] == 1)
        & (after["count"] == 1)
        & (before["target"] + before["length"] == after["target"])
        & (before["start"] + before["length"] == after["start"])
    )
    first = np.flatnonzero(np.concatenate([[True], ~joined]))
    merged = copies[first].copy()
    merged["length"] = np.add.reduceat(copies["length"], first)
    return merged
