"""Experts whose rank in expert parallelism is not recorded (verl's VeOmni engine).

There every expert group saves its own experts as a DTensor of the *local* experts' shape, on a mesh
of its own ranks. The files then hold several different tensors under one name, each whole according
to itself. Copies that no `Replicate` explains also arise honestly (parameters outside the plan of
tensor parallelism), so their bytes decide: where samples of them differ, they are experts.

With `--ep-size` they are joined along dimension 0, the groups in the order of their lowest ranks,
which is how VeOmni numbers them.
"""

import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from math import prod

import numpy as np

from unshard.containers.chunks import first_difference
from unshard.containers.open_files import OpenFiles
from unshard.containers.strided import raw_dtype
from unshard.errors import NotMergeableError, UsageError, raise_all
from unshard.noted import Noted
from unshard.read.format import Location, ReadOptions
from unshard.tensors.boxes import Box
from unshard.tensors.catalog import ChunkTable, TensorEntry
from unshard.tensors.placements import Replicate
from unshard.tensors.tiles import row_tile

__all__ = ["resolve_experts"]

_SAMPLE_BYTES = 16 * 1024


def resolve_experts(
    tensors: Mapping[str, TensorEntry], location: Location, options: ReadOptions
) -> Noted[Mapping[str, TensorEntry]]:
    """Join, or refuse, tensors that are different experts under one name; return all tensors.

    Raises:
        NotMergeableError: there are some, and `--ep-size` was not given or does not fit.
        UsageError: `--ep-size` was given, and there are none.
    """
    copied = {name: entry for name, entry in tensors.items() if _unexplained_copies(entry) > 1}
    with OpenFiles(os.O_RDONLY, limit=16) as files:
        differing = {name for name, entry in copied.items() if _differ(entry, files)}
    if not differing:
        if options.ep_size is not None:
            raise UsageError(
                f"--ep-size {options.ep_size}: {location.weights_dir} has no experts that differ "
                "between ranks under one name",
                hint="leave it out: the files state how their tensors are cut",
            )
        return Noted(tensors)
    if options.ep_size is None:
        raise _refusal(location, copied, differing)
    experts = [name for name in copied if name in differing or ".experts." in name]
    problems = [
        problem
        for name in experts
        if (problem := _misfit(tensors[name], options.ep_size)) is not None
    ]
    raise_all(NotMergeableError, f"--ep-size {options.ep_size} does not fit", problems)
    joined = {name: _joined(tensors[name], options.ep_size) for name in experts}
    note = (
        f"--ep-size {options.ep_size}: {len(joined)} tensors were joined along dimension 0, their "
        f"groups in the order of their lowest ranks: {', '.join(joined)}"
    )
    return Noted({**tensors, **joined}, (note,))


def _unexplained_copies(entry: TensorEntry) -> int:
    """Return how many times as often as its `Replicate` placements say some region is stored."""
    if entry.sharding is None or len(entry.chunks) < 2:
        return 1
    mesh = zip(entry.sharding.mesh.shape, entry.sharding.placements, strict=True)
    explained = prod(size for size, placement in mesh if isinstance(placement, Replicate))
    most = max(map(len, _regions(entry.chunks)), default=1)
    return -(-most // explained)  # rounded up: of a group that lacks a rank there are fewer


def _regions(table: ChunkTable) -> list[list[int]]:
    """Return the rows of each region, in rank order; empty chunks left out."""
    rows: dict[bytes, list[int]] = defaultdict(list)
    for row, box in enumerate(np.concatenate([table.offsets, table.sizes], axis=1)):
        if table.length[row]:
            rows[box.tobytes()].append(row)
    return list(rows.values())


def _differ(entry: TensorEntry, files: OpenFiles) -> bool:
    """Return whether samples of the copies of any region differ."""
    table, raw = entry.chunks, raw_dtype(entry.dtype)
    for first, *others in _regions(table):
        sizes = tuple(table.sizes[first].tolist())
        samples = _samples(sizes, _SAMPLE_BYTES // raw.itemsize)
        if any(first_difference(table, (first, row), samples, raw, files) for row in others):
            return True
    return False


def _samples(sizes: tuple[int, ...], elements: int) -> list[Box]:
    """Return boxes of that many elements at the start, in the middle and at the end."""
    tile = row_tile(sizes, elements)
    free = [size - side for size, side in zip(sizes, tile, strict=True)]
    return [Box(tuple(room * third // 2 for room in free), tile) for third in range(3)]


def _misfit(entry: TensorEntry, ep_size: int) -> NotMergeableError | None:
    copies = {len(rows) for rows in _regions(entry.chunks)}
    if copies == {ep_size} and entry.shape:
        return None
    return NotMergeableError(
        f"tensor {entry.fqn}: its {list(entry.shape)} is stored {min(copies)} times",
        expected=f"one group of ranks for each of {ep_size} parts",
    )


def _joined(entry: TensorEntry, ep_size: int) -> TensorEntry:
    table, rows = entry.chunks, entry.shape[0]
    offsets = table.offsets.copy()
    for region in _regions(table):
        offsets[region, 0] += np.arange(ep_size) * rows
    shape = (rows * ep_size, *entry.shape[1:])
    return replace(entry, shape=shape, chunks=replace(table, offsets=offsets))


def _refusal(
    location: Location, copied: Mapping[str, TensorEntry], differing: set[str]
) -> NotMergeableError:
    name = next(name for name in copied if name in differing)
    entry = copied[name]
    copies = _unexplained_copies(entry)
    whole = Box.whole(entry.shape)
    return NotMergeableError(
        f"{location.weights_dir}: {len(differing)} tensors are stored {copies} times with "
        f"different values, the first: {name} {list(entry.shape)}",
        expected="equal copies",
        found=f"different values of {whole} on different ranks, and no record of which is which: "
        "experts of verl's VeOmni engine?",
        hint=f"if they are parts of one tensor along dimension 0: --ep-size {copies}; else merge "
        "it with the engine that wrote it",
    )
