"""Plain tensors in rank files: copies of one tensor, or shards whose cut nobody recorded?

A DTensor says how it is cut; a plain tensor says nothing. The rules, the only heuristic of unshard:

* one rank only: it is the tensor;
* its shape is known (`--base`): what fits it, a copy or shards along dimension 0;
* the bytes differ between ranks: shards along dimension 0, but only if the user says so
  (`--assume-dim0`); otherwise refused;
* equal on all ranks: one copy. But where other plain tensors of the same files do differ, an equal
  one may be a shard too (an all-ones norm): refused, or taken as a copy under `--assume-dim0`;
  tensors without dimensions cannot be shards.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from unshard.containers.open_files import OpenFiles
from unshard.containers.strided import raw_dtype
from unshard.errors import NotMergeableError, UnshardError
from unshard.read.chunks import first_difference
from unshard.read.gathering import Draft
from unshard.tensors.catalog import ChunkTable, TensorEntry
from unshard.tensors.tiles import row_tile, tiles

__all__ = ["Resolved", "resolve_plain"]

_COMPARE_BYTES = 1 << 20
_HINT = (
    "save it as a DTensor or on one rank only; or, if plain tensors of this checkpoint are shards "
    "along dimension 0, say --assume-dim0"
)


@dataclass(frozen=True, slots=True)
class Resolved:
    """What the plain tensors of a checkpoint are, what is wrong with them, and what was assumed."""

    entries: dict[str, TensorEntry]
    problems: tuple[UnshardError, ...]
    notes: tuple[str, ...]


def resolve_plain(
    drafts: Iterable[Draft],
    paths: tuple[Path, ...],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    assume_dim0: bool,
) -> Resolved:
    """Decide what every plain tensor is, by its known shape or by comparing its bytes across ranks.

    Args:
        drafts: the plain tensors, each row one rank's whole tensor.
        paths: the files that the rows refer to.
        shapes: shapes that are known from elsewhere, by name.
        assume_dim0: take tensors that differ as shards along dimension 0.
    """
    tables = {draft.fqn: (draft, draft.rows.table(paths)) for draft in drafts}
    with OpenFiles(os.O_RDONLY, limit=16) as files:
        differing = {
            name for name, (draft, table) in tables.items() if _differ(draft, table, files)
        }
    entries: dict[str, TensorEntry] = {}
    problems: list[UnshardError] = []
    assumed: dict[str, list[str]] = {"as shards along dimension 0": [], "as copies": []}
    fitted: list[str] = []
    for name, (draft, table) in tables.items():
        known = shapes.get(name)
        if len(table) > 1 and known is not None and _joined_shape(draft, table) == known:
            entries[name] = _joined(draft, table)
            fitted.append(name)
            continue
        if name not in differing and known == draft.kind.shape:
            entries[name] = TensorEntry(name, draft.kind.dtype, draft.kind.shape, table)
            continue
        ambiguous = bool(differing) and len(table) > 1 and draft.rows.ndim > 0
        if name not in differing and not (ambiguous and not assume_dim0):
            entries[name] = TensorEntry(name, draft.kind.dtype, draft.kind.shape, table)
            if ambiguous:
                assumed["as copies"].append(name)
        elif name in differing and assume_dim0 and _joinable(table):
            entries[name] = _joined(draft, table)
            assumed["as shards along dimension 0"].append(name)
        else:
            problems.append(_refusal(draft, table, sorted(differing)))
    notes = tuple(
        f"--assume-dim0: {len(names)} plain tensors were taken {how}: {', '.join(names)}"
        for how, names in assumed.items()
        if names
    )
    if fitted:
        what = f"{len(fitted)} plain tensors were joined along dimension 0, to the base's shapes"
        notes = (*notes, f"{what}: {', '.join(fitted)}")
    return Resolved(entries, tuple(problems), notes)


def _differ(draft: Draft, table: ChunkTable, files: OpenFiles) -> bool:
    """Tell whether ranks hold different values (or shapes) of a plain tensor."""
    if len(table) < 2:
        return False
    if (table.sizes != table.sizes[0]).any():
        return True
    raw = raw_dtype(draft.kind.dtype)
    tile = row_tile(draft.kind.shape, _COMPARE_BYTES // raw.itemsize)
    return any(
        first_difference(table, (0, row), tiles(draft.kind.shape, tile), raw, files)
        for row in range(1, len(table))
    )


def _joinable(table: ChunkTable) -> bool:
    return table.sizes.shape[1] > 0 and not (table.sizes[:, 1:] != table.sizes[0, 1:]).any()


def _joined_shape(draft: Draft, table: ChunkTable) -> tuple[int, ...] | None:
    """Return the shape that the ranks' parts make when joined; None if they cannot be."""
    if not _joinable(table):
        return None
    return (int(table.sizes[:, 0].sum()), *draft.kind.shape[1:])


def _joined(draft: Draft, table: ChunkTable) -> TensorEntry:
    """Return the tensor that the ranks' parts make when joined along dimension 0, in rank order."""
    rows = table.sizes[:, 0]
    shape = _joined_shape(draft, table) or ()
    table.offsets[:, 0] = np.concatenate([[0], np.cumsum(rows)[:-1]])
    return TensorEntry(draft.fqn, draft.kind.dtype, shape, table)


def _refusal(draft: Draft, table: ChunkTable, differing: list[str]) -> NotMergeableError:
    ranks = f"ranks {', '.join(map(str, table.rank[:8].tolist()))}{' …' if len(table) > 8 else ''}"
    shapes = " and ".join(
        str(list(s)) for s in sorted({tuple(s) for s in table.sizes.tolist()})[:4]
    )
    if draft.fqn not in differing:
        what = f"{shapes}, equal on {ranks}, but {differing[0]} differs between them"
        return NotMergeableError(
            f"tensor {draft.fqn}: a plain tensor that may be a copy or a shard",
            expected="plain tensors that are all copies of one another",
            found=what,
            hint=_HINT,
        )
    joinable = _joinable(table)
    return NotMergeableError(
        f"tensor {draft.fqn}: a plain tensor that differs between ranks, cut nobody knows how",
        expected=f"equal bytes on {ranks}",
        found=f"different values of shape {shapes}",
        hint=_HINT
        if joinable
        else "it cannot be joined along dimension 0 either: each rank has its own",
    )
