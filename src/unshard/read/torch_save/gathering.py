"""Uniting what the files of several ranks hold into tensors."""

from array import array
from dataclasses import dataclass, field
from pathlib import Path

from unshard.errors import CorruptError, UnshardError
from unshard.read.torch_save.table import Kind, RankTable
from unshard.tensors.catalog import Skipped, TensorEntry
from unshard.tensors.chunk_rows import ChunkRows
from unshard.tensors.placements import Sharding

__all__ = ["Draft", "Gathering"]


@dataclass(slots=True)
class Draft:
    """A tensor while its chunks are being gathered.

    Of a plain tensor, each row is one rank's whole tensor; `plain_tensors` decides what they are
    together. `kind` is as the first rank that has it sees it.
    """

    fqn: str
    kind: Kind
    rows: ChunkRows
    first_rank: int
    ranks: "array[int]" = field(default_factory=lambda: array("i"))

    def entry(self, paths: tuple[Path, ...]) -> TensorEntry:
        """Return the tensor; `paths` are the files that its rows refer to."""
        kind = self.kind
        return TensorEntry(self.fqn, kind.dtype, kind.shape, self.rows.table(paths), kind.sharding)


class Gathering:
    """Unites the tables of rank files, taken in rank order."""

    def __init__(self) -> None:
        self.drafts: dict[str, Draft] = {}
        self.skipped: dict[str, Skipped] = {}
        self.problems: list[UnshardError] = []

    def add(self, table: RankTable) -> None:
        """Add what one file holds; contradictions to earlier files go to `problems`."""
        self.problems.extend(table.problems)
        for name, reason in table.skipped.items():
            self.skipped.setdefault(name, Skipped(name, reason))
        at = chunk = 0
        for name, number, count in zip(table.names, table.kinds, table.counts, strict=True):
            kind = table.kind_table[number]
            draft = self.drafts.get(name)
            if draft is None:
                draft = Draft(name, kind, ChunkRows(len(kind.shape)), table.rank)
                self.drafts[name] = draft
            end = at + count * (4 + 2 * len(kind.shape))
            if _agree(draft.kind, kind):
                draft.ranks.append(table.rank)
                odd = _numbered(table.odd_strides, chunk, count) if table.odd_strides else {}
                draft.rows.extend(table.rows[at:end], odd)
            else:
                self.problems.append(_contradiction(draft, table.rank, kind))
            at, chunk = end, chunk + count


def _numbered(
    odd_strides: dict[int, tuple[int, ...]], first: int, count: int
) -> dict[int, tuple[int, ...]]:
    return {n: odd_strides[first + n] for n in range(count) if first + n in odd_strides}


def _agree(first: Kind, other: Kind) -> bool:
    """Tell whether ranks agree. Plain tensors may differ in size: they may be shards themselves."""
    if first.dtype is not other.dtype or first.is_plain is not other.is_plain:
        return False
    if first.is_plain:
        return len(first.shape) == len(other.shape)
    return first.shape == other.shape and _cut_alike(first.sharding, other.sharding)


def _cut_alike(first: Sharding | None, other: Sharding | None) -> bool:
    """Tell whether two ranks speak of the same kind of mesh; their places on it differ."""
    if first is None or other is None:
        return first is other
    same_mesh = first.mesh.shape == other.mesh.shape
    return same_mesh and first.placements == other.placements


def _contradiction(draft: Draft, rank: int, kind: Kind) -> CorruptError:
    said = f"rank {draft.first_rank} says {draft.kind}"
    return CorruptError(f"tensor {draft.fqn}: rank {rank}: {kind}, but {said}")
