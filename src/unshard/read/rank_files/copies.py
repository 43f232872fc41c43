"""Tensors that several ranks store under one name: copies of one tensor, shards, or experts?

A DTensor records how it is cut; a plain tensor does not. The rules for plain tensors, the only
heuristic of unshard:

* only one rank has it: it is the tensor;
* a buffer that differs (`buffers`): the first rank's, unless all tensors of the files are plain;
* its shape is known (`--base`): a copy or shards along dimension 0, whichever has that shape;
* the bytes differ between ranks: shards along dimension 0, but only if the user asks for it
  (`--assume-dim0`); otherwise refused;
* equal on all ranks: one copy. But if other plain tensors of the same files differ, an equal tensor
  may be a shard too (an all-ones norm): refused, or taken as a copy under `--assume-dim0`; tensors
  without dimensions cannot be shards.

verl's VeOmni engine does not record a rank's place in expert parallelism: every expert group saves
its own experts as a DTensor of the *local* experts' shape, on a mesh of its own ranks. The files
then have several different tensors under one name, each whole on its own mesh. Copies that no
`Replicate` explains also arise otherwise (parameters outside the plan of tensor parallelism), so
their bytes decide: if samples differ, they are experts. With `--ep-size` they are joined along
dimension 0, the groups in the order of their lowest ranks, as VeOmni numbers them.
"""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

from unshard.console import counted
from unshard.containers.chunks import first_difference
from unshard.containers.open_files import OpenFiles
from unshard.containers.strided import raw_dtype
from unshard.errors import NotMergeableError, UnshardError, UsageError, raise_all
from unshard.fronts import Text
from unshard.read.format import Location, ReadOptions, shortened
from unshard.read.rank_files.buffers import find_buffers, is_of_experts, settle
from unshard.read.torch_save.gathering import Gathering
from unshard.tensors.boxes import Box, row_tile, tiles
from unshard.tensors.catalog import ByteRange, Catalog, ChunkTable, TensorEntry
from unshard.tensors.placements import Replicate
from unshard.with_notes import WithNotes

_COMPARE_BYTES = 1 << 20
_SAMPLE_BYTES = 16 * 1024
_HINT = (
    "save it as a DTensor or on one rank only; or, if plain tensors of this checkpoint are shards "
    "along dimension 0: ⟦+--assume-dim0⟧"
)


def catalog_of(  # noqa: PLR0913, PLR0917 (what was read, and where)
    gathered: Gathering,
    files: Mapping[int, Path],
    world: int,
    location: Location,
    options: ReadOptions,
    trained: Callable[..., Collection[str]] | None = None,
) -> Catalog:
    """Return the union of ranks' files, which are by rank, in the order in which they were read.

    `trained` returns the parameters among some plain tensors; without it none is a buffer.

    Raises:
        NotMergeableError: a tensor cannot be read, or its kind is unknown.
    """
    paths = tuple(files.values())
    tensors = gathered.entries(paths)
    trained_here = None if trained is None else partial(trained, location, world)
    plain = _resolve_plain(tensors, gathered.plain, trained_here, options)
    decided = () if options.selects else plain.value.items()
    summary = f"{location.weights_dir}: the rank files cannot be merged"
    buffers = settle(decided, (), gathered.problems, summary)
    missing = tuple(rank for rank in range(world) if rank not in files)
    ranks = ", ".join(map(str, missing))
    note = f"the file of rank {ranks} is missing; other ranks have copies of its tensors"
    experts = _resolve_experts({**tensors, **plain.value}, location, options)
    return Catalog(
        writer="unknown",
        world_size=world,
        tensors=experts.value,
        skipped=tuple(gathered.skipped.values()),
        archives=tuple(
            ByteRange(path, 0, path.stat().st_size)
            for path in paths
            if path.suffix != ".safetensors"
        ),
        missing=tuple(
            location.weights_dir / re.sub(r"\d+(?=\.\w+$)", str(rank), paths[0].name)
            for rank in missing
        ),
        missing_ranks=missing,
        notes=(*((note,) if missing else ()), *buffers, *plain.notes, *experts.notes),
    )


def _resolve_plain(
    tensors: Mapping[str, TensorEntry],
    plain: Sequence[str],
    trained: Callable[..., Collection[str]] | None,
    options: ReadOptions,
) -> WithNotes[dict[str, TensorEntry]]:
    """Decide the kind of every plain tensor, by its known shape or by comparing bytes across ranks.

    Each chunk of a plain tensor is one rank's whole tensor. A tensor without a decision gets a
    doubt, and so do buffers; `trained` returns the parameters among these.
    """
    with OpenFiles(os.O_RDONLY, limit=16) as files:
        differing = {name for name in plain if _differ(tensors[name], files)}
    is_mixed = trained is not None and len(plain) < len(tensors)
    # Differing tensors may be deselected later. If all are plain, equal ones may be parts as well.
    equal_are_copies = options.selects and is_mixed and not options.assume_dim0
    buffers = find_buffers(differing, tensors, options.shapes) if is_mixed else {}
    for name in trained({name: tensors[name] for name in buffers}) if trained and buffers else ():
        del buffers[name]
    cut = differing - buffers.keys()
    entries: dict[str, TensorEntry] = {}
    assumed: dict[str, list[str]] = defaultdict(list)
    for name, entry in [(name, tensors[name]) for name in plain]:
        shape, joined = options.shapes.get(name), _joined_shape(entry)
        has_copies = len(entry.chunks) > 1
        may_be_cut = bool(cut) and has_copies and bool(entry.shape)  # like the others
        if has_copies and shape is not None and joined == shape:
            entries[name] = _shards_joined(entry, joined)
            assumed["as shards along dimension 0, whose joined shape the base has"].append(name)
        elif name not in differing and (
            shape == entry.shape or not may_be_cut or (equal_are_copies and not is_of_experts(name))
        ):
            entries[name] = entry
        elif options.assume_dim0 and name not in differing:
            entries[name] = entry
            assumed["as copies (⟦--assume-dim0⟧)"].append(name)
        elif options.assume_dim0 and joined is not None and name not in buffers:
            entries[name] = _shards_joined(entry, joined)
            assumed["as shards along dimension 0 (⟦--assume-dim0⟧)"].append(name)
        else:
            first = replace(entry, chunks=entry.chunks.take(np.arange(1)))
            error = _plain_refused(entry, {name} if name in buffers else cut)
            entries[name] = replace(first, doubt=error, is_buffer=buffers.get(name, False))
    return WithNotes(entries, tuple(_note(names, kind) for kind, names in assumed.items()))


def _note(names: Sequence[str], kind: str) -> Text:
    return Text(f"{counted(len(names), 'plain tensor')} taken {kind}: {', '.join(names)}")


def _differ(entry: TensorEntry, files: OpenFiles) -> bool:
    """Return whether ranks have different values (or shapes) of a plain tensor."""
    table = entry.chunks
    if len(table) < 2:
        return False
    if (table.sizes != table.sizes[0]).any():
        return True
    raw = raw_dtype(entry.dtype)
    tile = row_tile(entry.shape, _COMPARE_BYTES // raw.itemsize)
    return any(
        first_difference(table, (0, row), tiles(entry.shape, tile), raw, files)
        for row in range(1, len(table))
    )


def _joined_shape(entry: TensorEntry) -> tuple[int, ...] | None:
    """Return the shape of the ranks' parts joined along dimension 0; None if they do not fit."""
    sizes = entry.chunks.sizes
    if not entry.shape or (sizes[:, 1:] != sizes[:1, 1:]).any():
        return None
    return (int(sizes[:, 0].sum()), *entry.shape[1:])


def _shards_joined(entry: TensorEntry, shape: tuple[int, ...]) -> TensorEntry:
    """Return the ranks' parts joined along dimension 0, in rank order."""
    rows, offsets = entry.chunks.sizes[:, 0], entry.chunks.offsets.copy()
    offsets[:, 0] = np.concatenate([[0], np.cumsum(rows)[:-1]])
    return replace(entry, shape=shape, chunks=replace(entry.chunks, offsets=offsets))


def _plain_refused(entry: TensorEntry, differing: set[str]) -> NotMergeableError:
    table = entry.chunks
    ranks = f"ranks {shortened([str(rank) for rank in table.rank.tolist()], 8)}"
    shapes = " and ".join(
        str(list(s)) for s in sorted({tuple(s) for s in table.sizes.tolist()})[:4]
    )
    if entry.fqn not in differing:
        return NotMergeableError(
            f"tensor {entry.fqn}: a plain tensor that may be a copy or a shard",
            expected="plain tensors that are all copies of one another",
            found=f"{shapes}, equal on {ranks}, but {min(differing)} differs between them",
            hint=_HINT,
        )
    return NotMergeableError(
        f"tensor {entry.fqn}: a plain tensor that differs between ranks, cut in an unknown way",
        expected=f"equal bytes on {ranks}",
        found=f"different values of shape {shapes}",
        hint=_HINT
        if _joined_shape(entry) is not None
        else "it cannot be joined along dimension 0 either: each rank has its own",
    )


def _resolve_experts(
    tensors: Mapping[str, TensorEntry], location: Location, options: ReadOptions
) -> WithNotes[Mapping[str, TensorEntry]]:
    """Join, or refuse, tensors that are different experts under one name; return all tensors.

    Raises:
        NotMergeableError: there are some, and `--ep-size` is missing or does not fit.
        UsageError: `--ep-size` was given, and there are none.
    """
    most: dict[tuple[int, int], int] = {}
    copied = {name: entry for name, entry in tensors.items() if _copies(entry, most) > 1}
    with OpenFiles(os.O_RDONLY, limit=16) as files:
        differing = {name for name, entry in copied.items() if _samples_differ(entry, files)}
    if not differing:
        if options.ep_size is not None:
            raise UsageError(
                f"⟦--ep-size {options.ep_size}⟧: {location.weights_dir} has no experts that differ "
                "between ranks under one name",
                hint="leave it out: the files record how their tensors are cut",
            )
        return WithNotes(tensors)
    if options.ep_size is None:
        raise _experts_refused(location, copied, differing)
    experts = [name for name in copied if name in differing or ".experts." in name]
    problems: list[UnshardError] = []
    for entry in (tensors[name] for name in experts):
        copies = {len(rows) for rows in _regions(entry.chunks)}
        if copies != {options.ep_size} or not entry.shape:
            problem = NotMergeableError(
                f"tensor {entry.fqn}: its {list(entry.shape)} is stored {min(copies)} times",
                expected=f"one group of ranks for each of {options.ep_size} parts",
            )
            problems.append(problem)
    raise_all(NotMergeableError, f"⟦--ep-size {options.ep_size}⟧ does not fit", problems)
    joined = {name: _experts_joined(tensors[name], options.ep_size) for name in experts}
    note = Text(
        f"⟦--ep-size {options.ep_size}⟧: {counted(len(joined), 'tensor')} joined along dimension "
        f"0, their groups in the order of their lowest ranks: {', '.join(joined)}"
    )
    return WithNotes({**tensors, **joined}, (note,))


def _copies(entry: TensorEntry, most: dict[tuple[int, int], int]) -> int:
    """Return the factor by which a region is stored more often than its placements imply.

    `most` caches the highest count of a region by the arrays of boxes, which tensors share.
    """
    if entry.sharding is None or len(entry.chunks) < 2:
        return 1
    mesh = zip(entry.sharding.mesh.shape, entry.sharding.placements, strict=True)
    explained = prod(size for size, placement in mesh if isinstance(placement, Replicate))
    key = id(entry.chunks.offsets), id(entry.chunks.sizes)
    if key not in most:
        most[key] = max(map(len, _regions(entry.chunks)), default=1)
    return -(-most[key] // explained)  # rounded up: a group without one of its ranks has fewer


def _regions(table: ChunkTable) -> list[list[int]]:
    """Return the rows of each region, in rank order; empty chunks left out."""
    rows: dict[bytes, list[int]] = defaultdict(list)
    for row, box in enumerate(np.concatenate([table.offsets, table.sizes], axis=1)):
        if table.length[row]:
            rows[box.tobytes()].append(row)
    return list(rows.values())


def _samples_differ(entry: TensorEntry, files: OpenFiles) -> bool:
    """Compare copies of every region at their start, in the middle and at the end."""
    table, raw = entry.chunks, raw_dtype(entry.dtype)
    for first, *others in _regions(table):
        sizes = table.sizes[first].tolist()
        tile = row_tile(sizes, _SAMPLE_BYTES // raw.itemsize)
        free = [size - side for size, side in zip(sizes, tile, strict=True)]
        samples = [Box(tuple(room * half // 2 for room in free), tile) for half in range(3)]
        if any(first_difference(table, (first, row), samples, raw, files) for row in others):
            return True
    return False


def _experts_joined(entry: TensorEntry, ep_size: int) -> TensorEntry:
    table, rows = entry.chunks, entry.shape[0]
    offsets = table.offsets.copy()
    for region in _regions(table):
        offsets[region, 0] += np.arange(ep_size) * rows
    shape = (rows * ep_size, *entry.shape[1:])
    return replace(entry, shape=shape, chunks=replace(table, offsets=offsets))


def _experts_refused(
    location: Location, copied: Mapping[str, TensorEntry], differing: set[str]
) -> NotMergeableError:
    name = next(name for name in copied if name in differing)
    entry = copied[name]
    copies = _copies(entry, {})
    whole = Box.whole(entry.shape)
    return NotMergeableError(
        f"{location.weights_dir}: stores {counted(len(differing), 'tensor')} {copies} times with "
        f"different values, the first: {name} {list(entry.shape)}",
        expected="equal copies",
        found=f"different values of {whole} on different ranks, and no record of which is which: "
        "experts of verl's VeOmni engine?",
        hint=f"if they are parts of one tensor along dimension 0: ⟦+--ep-size {copies}⟧; else "
        "merge it with the engine that wrote it",
    )
