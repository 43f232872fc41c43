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

from unshard.convert.recipes import Take
from unshard.plan.layout import Layout, OutputTensor
from unshard.plan.operations import COPY_ROW, Cast, Gather, Plan
from unshard.tensors.boxes import Box, Ints, distinct, row_major_strides
from unshard.tensors.catalog import ChunkTable, TensorEntry

__all__ = ["LONG_RUN", "make_plan"]

LONG_RUN = 64 * 1024
"""Runs of this many bytes and more are copied one by one; shorter ones are gathered in memory."""

Copies = NDArray[np.void]


@dataclass(slots=True)
class _Draft:
    copies: list[Copies] = field(default_factory=list)
    tiled: list[Gather | Cast] = field(default_factory=list)
    bytes_read: int = 0


def make_plan(layout: Layout, paths: tuple[Path, ...]) -> Plan:
    """Return the operations that make every output file's tensors; headers are no operations.

    Args:
        layout: the files, with a recipe for every tensor.
        paths: the checkpoint's files, which every chunk table refers to.
    """
    draft = _Draft()
    for index, file in enumerate(layout.files):
        for tensor in file.tensors:
            if 0 not in tensor.shape:
                _plan_tensor(draft, index, len(file.header), tensor)
    copies = np.concatenate([np.empty(0, COPY_ROW), *draft.copies])
    return Plan(
        layout,
        paths,
        _coalesced(copies),
        tuple(draft.tiled),
        draft.bytes_read,
        sum(file.size for file in layout.files),
    )


def _plan_tensor(draft: _Draft, file: int, data_start: int, tensor: OutputTensor) -> None:
    match tensor.recipe:
        case Take(entry, box, None) if box == Box.whole(entry.shape):
            chunks = _first_replicas(entry)
        case _:
            raise NotImplementedError(f"{type(tensor.recipe).__name__} recipes are not made yet")
    target = data_start + tensor.data_offsets[0]
    draft.bytes_read += entry.size_bytes
    copies = None
    if entry.dtype is tensor.dtype and chunks.strides is None and not chunks.compressed.any():
        copies = _long_runs(file, target, entry, chunks)
    if copies is not None:
        draft.copies.append(copies)
        return
    gather = Gather(file, target, tensor.shape, entry.dtype, chunks)
    draft.tiled.append(gather if entry.dtype is tensor.dtype else Cast(gather, tensor.dtype))


def _first_replicas(entry: TensorEntry) -> ChunkTable:
    rows = distinct(entry.chunks.offsets, entry.chunks.sizes)
    return entry.chunks if len(rows) == len(entry.chunks) else entry.chunks.take(rows)


def _long_runs(file: int, target: int, entry: TensorEntry, chunks: ChunkTable) -> Copies | None:
    """Return one row per chunk if its runs are long and evenly spaced in the target, else None.

    A chunk whose last cut dimension is `cut` consists of runs of prod(sizes[cut:]) elements; they
    are evenly spaced if, of the dimensions before, only the first is cut.
    """
    shape = np.asarray(entry.shape, dtype=np.int64)
    cuts = np.flatnonzero((chunks.sizes != shape).any(axis=0))
    cut = int(cuts[-1]) if len(cuts) else 0
    if set(cuts.tolist()) - {_first_wide(entry.shape), cut}:
        return None
    length = chunks.sizes[:, cut:].prod(axis=1) * entry.dtype.itemsize
    if float(length.mean()) < LONG_RUN:
        return None
    strides: Ints = np.asarray(row_major_strides(entry.shape), dtype=np.int64)
    rows = np.zeros(len(chunks), COPY_ROW)
    rows["file"] = file
    rows["target"] = target + (chunks.offsets @ strides) * entry.dtype.itemsize
    rows["source"] = chunks.file
    rows["start"] = chunks.start
    rows["length"] = length
    rows["count"] = chunks.sizes[:, :cut].prod(axis=1)
    rows["target_stride"] = prod(entry.shape[cut:]) * entry.dtype.itemsize
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
