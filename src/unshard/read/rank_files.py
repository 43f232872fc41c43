"""Reader for FSDP rank files: one torch.save per rank, named `model_world_size_W_rank_R.pt`.

Written by verl and lmms-engine. The world size is what the names say, never a count of files.
"""

import re
from array import array
from dataclasses import dataclass, field
from pathlib import Path

from unshard.errors import CorruptError, UnshardError
from unshard.read.chunk_rows import ChunkRows
from unshard.read.rank_table import Kind, RankTable
from unshard.tensors.catalog import Skipped

__all__ = ["Draft", "Gathering", "rank_file_name", "rank_files"]

_NAME = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")


def rank_file_name(world_size: int, rank: int) -> str:
    """Return the name of a rank's file."""
    return f"model_world_size_{world_size}_rank_{rank}.pt"


def rank_files(directory: Path) -> dict[int, dict[int, Path]]:
    """Return the rank files in a directory: world size -> rank -> path."""
    found: dict[int, dict[int, Path]] = {}
    for path in directory.iterdir():
        match = _NAME.fullmatch(path.name)
        if match:
            found.setdefault(int(match[1]), {})[int(match[2])] = path
    return {world: dict(sorted(ranks.items())) for world, ranks in sorted(found.items())}


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
    if first.dtype is not other.dtype:
        return False
    if first.sharding is None or other.sharding is None:
        return first.sharding is other.sharding and len(first.shape) == len(other.shape)
    return first.shape == other.shape


def _contradiction(draft: Draft, rank: int, kind: Kind) -> CorruptError:
    said = f"rank {draft.first_rank} says {draft.kind}"
    return CorruptError(f"tensor {draft.fqn}: rank {rank}: {kind}, but {said}")
