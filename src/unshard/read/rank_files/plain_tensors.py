"""Plain tensors in rank files: copies of one tensor, or shards whose cut is not recorded?

A DTensor states how it is cut; a plain tensor does not. The rules, the only heuristic of unshard:

* one rank only: it is the tensor;
* its shape is known (`--base`): what fits it, a copy or shards along dimension 0;
* the bytes differ between ranks: shards along dimension 0, but only if the user says so
  (`--assume-dim0`); otherwise refused;
* equal on all ranks: one copy. But where other plain tensors of the same files do differ, an equal
  one may be a shard too (an all-ones norm): refused, or taken as a copy under `--assume-dim0`;
  tensors without dimensions cannot be shards.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from unshard.containers.chunks import first_difference
from unshard.containers.open_files import OpenFiles
from unshard.containers.strided import raw_dtype
from unshard.errors import NotMergeableError, UnshardError
from unshard.read.format import shortened
from unshard.tensors.catalog import ChunkTable, TensorEntry
from unshard.tensors.tiles import row_tile, tiles

__all__ = ["Resolved", "resolve_plain"]

_COMPARE_BYTES = 1 << 20
_HINT = (
    "save it as a DTensor or on one rank only; or, if plain tensors of this checkpoint are shards "
    "along dimension 0: --assume-dim0"
)


@dataclass(frozen=True, slots=True)
class Resolved:
    """What the plain tensors of a checkpoint are, what is wrong with them, and what was assumed."""

    entries: dict[str, TensorEntry]
    problems: tuple[UnshardError, ...]
    notes: tuple[str, ...]


def resolve_plain(
    copies: Mapping[str, TensorEntry], shapes: Mapping[str, tuple[int, ...]], *, assume_dim0: bool
) -> Resolved:
    """Decide what every plain tensor is, by its known shape or by comparing its bytes across ranks.

    Args:
        copies: the plain tensors; each chunk is one rank's whole tensor.
        shapes: shapes that are known from elsewhere, by name.
        assume_dim0: take tensors that differ as shards along dimension 0.
    """
    with OpenFiles(os.O_RDONLY, limit=16) as files:
        differing = {name for name, entry in copies.items() if _differ(entry, files)}
    entries: dict[str, TensorEntry] = {}
    problems: list[UnshardError] = []
    assumed: dict[str, list[str]] = {}
    for name, entry in copies.items():
        verdict, why = _judge(
            entry,
            shapes.get(name),
            differs=name in differing,
            others_differ=bool(differing) and len(entry.chunks) > 1 and bool(entry.shape),
            assume_dim0=assume_dim0,
        )
        if verdict is _Verdict.REFUSED:
            problems.append(_refusal(entry, sorted(differing)))
            continue
        entries[name] = _joined(entry) if verdict is _Verdict.SHARDS else entry
        if why:
            assumed.setdefault(why, []).append(name)
    notes = tuple(
        f"{len(names)} plain tensors were taken {why}: {', '.join(names)}"
        for why, names in assumed.items()
    )
    return Resolved(entries, tuple(problems), notes)


class _Verdict(Enum):
    COPY = "copies of one tensor"
    SHARDS = "shards along dimension 0"
    REFUSED = "undecided"


def _judge(
    entry: TensorEntry,
    known: tuple[int, ...] | None,
    *,
    differs: bool,
    others_differ: bool,
    assume_dim0: bool,
) -> tuple[_Verdict, str]:
    """Return what a tensor is, and how that is known if it was not plain.

    It has the shape `known` in the base model. Where others differ, it may be cut like them.
    """
    table = entry.chunks
    if len(table) > 1 and known is not None and _joined_shape(entry) == known:
        return _Verdict.SHARDS, "as shards along dimension 0, whose joined shape the base has"
    if not differs and (known == entry.shape or not others_differ):
        return _Verdict.COPY, ""
    if assume_dim0 and not differs:
        return _Verdict.COPY, "as copies (--assume-dim0)"
    if assume_dim0 and _is_joinable(table):
        return _Verdict.SHARDS, "as shards along dimension 0 (--assume-dim0)"
    return _Verdict.REFUSED, ""


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


def _is_joinable(table: ChunkTable) -> bool:
    return table.sizes.shape[1] > 0 and not (table.sizes[:, 1:] != table.sizes[0, 1:]).any()


def _joined_shape(entry: TensorEntry) -> tuple[int, ...] | None:
    """Return the shape that the ranks' parts make when joined; None if they cannot be."""
    if not _is_joinable(entry.chunks):
        return None
    return (int(entry.chunks.sizes[:, 0].sum()), *entry.shape[1:])


def _joined(entry: TensorEntry) -> TensorEntry:
    """Return the tensor that the ranks' parts make when joined along dimension 0, in rank order."""
    rows, offsets = entry.chunks.sizes[:, 0], entry.chunks.offsets.copy()
    offsets[:, 0] = np.concatenate([[0], np.cumsum(rows)[:-1]])
    shape = _joined_shape(entry) or ()
    return replace(entry, shape=shape, chunks=replace(entry.chunks, offsets=offsets))


def _refusal(entry: TensorEntry, differing: list[str]) -> NotMergeableError:
    table = entry.chunks
    ranks = f"ranks {shortened([str(rank) for rank in table.rank.tolist()], 8)}"
    shapes = " and ".join(
        str(list(s)) for s in sorted({tuple(s) for s in table.sizes.tolist()})[:4]
    )
    if entry.fqn not in differing:
        what = f"{shapes}, equal on {ranks}, but {differing[0]} differs between them"
        return NotMergeableError(
            f"tensor {entry.fqn}: a plain tensor that may be a copy or a shard",
            expected="plain tensors that are all copies of one another",
            found=what,
            hint=_HINT,
        )
    joinable = _is_joinable(table)
    return NotMergeableError(
        f"tensor {entry.fqn}: a plain tensor that differs between ranks, cut in an unknown way",
        expected=f"equal bytes on {ranks}",
        found=f"different values of shape {shapes}",
        hint=_HINT
        if joinable
        else "it cannot be joined along dimension 0 either: each rank has its own",
    )
