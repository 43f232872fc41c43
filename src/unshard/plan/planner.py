"""Turn recipes and a layout into operations.

A tensor is copied run by run if its dtype stays and its runs are long; else it is made in tiles.
Every region is taken from the first of its replicas, so that the plan is the same whatever executes
it.
"""

from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unshard.convert.recipes import LowRank, Recipe, WeightedSum, dtype_of, shape_of
from unshard.plan.layout import Layout, OutputTensor
from unshard.plan.operations import (
    COPY_ROW,
    Cast,
    Fuse,
    Gather,
    Plan,
    Reduce,
    Source,
    Target,
    Tiled,
)
from unshard.plan.tables import table_of
from unshard.tensors.boxes import Ints, row_major_strides
from unshard.tensors.dtypes import DType

__all__ = ["LONG_RUN", "make_plan", "tiled"]

LONG_RUN = 64 * 1024
"""Runs of this many bytes and more are copied one by one; shorter ones are gathered in memory."""

Copies = NDArray[np.void]


@dataclass(slots=True)
class _Draft:
    copies: list[Copies] = field(default_factory=list)
    tiled: list[Tiled] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    bases: dict[int, tuple[int, tuple[Path, ...]]] = field(default_factory=dict)
    bytes_read: int = 0

    def base(self, paths: tuple[Path, ...]) -> int:
        """Return where these files begin among all; tables of one checkpoint share their paths."""
        if id(paths) not in self.bases:
            self.bases[id(paths)] = len(self.paths), paths
            self.paths += paths
        return self.bases[id(paths)][0]


def make_plan(layout: Layout) -> Plan:
    """Return the operations that make every output file's tensors; headers are no operations.

    Args:
        layout: the files, with a recipe for every tensor.
    """
    draft = _Draft()
    for index, file in enumerate(layout.files):
        for tensor in file.tensors:
            if 0 not in tensor.shape:
                start = len(file.header) + tensor.data_offsets[0]
                _plan_tensor(draft, Target(index, start, tensor.shape), tensor)
    copies = np.concatenate([np.empty(0, COPY_ROW), *draft.copies])
    return Plan(
        layout,
        tuple(draft.paths),
        _coalesced(copies),
        tuple(draft.tiled),
        draft.bytes_read,
        sum(file.size for file in layout.files),
    )


def _plan_tensor(draft: _Draft, target: Target, tensor: OutputTensor) -> None:
    draft.bytes_read += _bytes_read(tensor.recipe)
    made = tiled(target, tensor.recipe, tensor.dtype)
    copies = None
    if isinstance(made, Gather):
        chunks = made.source.chunks
        if chunks.strides is None and not chunks.compressed.any():
            copies = _long_runs(target, made.source, draft.base(chunks.paths))
    if copies is not None:
        draft.copies.append(copies)
    else:
        draft.tiled.append(made)


def tiled(target: Target, recipe: Recipe, to: DType) -> Tiled:
    """Return the operation that makes a recipe's tensor in memory, tile by tile."""
    match recipe:
        case WeightedSum(terms):
            return Reduce(target, tuple((weight, _source(part)) for weight, part in terms), to)
        case LowRank(base, a, b, scale):
            sources = (_source(base), _source(a), _source(b))
            return Fuse(target, *sources, shape_of(a)[-2], scale, to)
        case _:
            source = _source(recipe)
            return Gather(target, source) if source.dtype is to else Cast(target, source, to)


def _source(recipe: Recipe) -> Source:
    return Source(dtype_of(recipe), table_of(recipe))


def _bytes_read(recipe: Recipe) -> int:
    """Return how many bytes of tensors a recipe reads, each once."""
    match recipe:
        case WeightedSum(terms):
            return sum(_bytes_read(part) for _, part in terms)
        case LowRank(base, a, b):
            return _bytes_read(base) + _bytes_read(a) + _bytes_read(b)
        case _:
            return prod(shape_of(recipe)) * dtype_of(recipe).itemsize


def _long_runs(target: Target, source: Source, base: int) -> Copies | None:
    """Return one row per chunk if its runs are long and evenly spaced in the target, else None.

    A chunk whose last cut dimension is `cut` consists of runs of prod(sizes[cut:]) elements; they
    are evenly spaced if, of the dimensions before, only the first is cut.
    """
    chunks, itemsize = source.chunks, source.dtype.itemsize
    shape = np.asarray(target.shape, dtype=np.int64)
    cuts = np.flatnonzero((chunks.sizes != shape).any(axis=0))
    cut = int(cuts[-1]) if len(cuts) else 0
    if set(cuts.tolist()) - {_first_wide(target.shape), cut}:
        return None
    length = chunks.sizes[:, cut:].prod(axis=1) * itemsize
    if float(length.mean()) < LONG_RUN:
        return None
    strides: Ints = np.asarray(row_major_strides(target.shape), dtype=np.int64)
    rows = np.zeros(len(chunks), COPY_ROW)
    rows["file"] = target.file
    rows["target"] = target.start + (chunks.offsets @ strides) * itemsize
    rows["source"] = chunks.file + base
    rows["start"] = chunks.start
    rows["length"] = length
    rows["count"] = chunks.sizes[:, :cut].prod(axis=1)
    rows["target_stride"] = prod(target.shape[cut:]) * itemsize
    return rows[np.argsort(rows["target"], kind="stable")]


def _first_wide(shape: tuple[int, ...]) -> int:
    """Return the first dimension that can be cut at all."""
    return next((dim for dim, size in enumerate(shape) if size > 1), 0)


def _coalesced(copies: Copies) -> Copies:
    """Join copies whose sources and targets both follow on from one another."""
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
