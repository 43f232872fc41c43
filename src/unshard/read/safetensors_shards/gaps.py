"""Which file of a rank is missing though the pieces that are there leave no hole.

A tensor ends where its last piece ends, so the loss of a last piece leaves a smaller tensor that
looks whole. Where a rank lacks a file that others have, what it would hold follows from the other
tensors: FSDP cuts all of them into as many pieces, and gives the same place in them to the same
ranks (of each replica). torch saves empty pieces too, so a tensor with fewer pieces ends with an
empty one, or with one that is smaller than the first.

A tensor that lacks a piece is distinguished from one that never had it (a replicated tensor, of
which torch saves one copy) by the tensors of other layers: they have the same shape, unless pieces
are missing.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unshard.errors import IncompleteError
from unshard.read.safetensors_shards.names import ShardSet
from unshard.tensors.catalog import TensorEntry

__all__ = ["gap_problems"]

_NUMBER = re.compile(r"\d+")
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class _Row:
    """A tensor that is cut along one dimension at most, each piece on a rank of its own.

    Attributes:
        entry: the tensor.
        index: of the files that hold it.
        ranks: that hold its pieces, in the order of the pieces.
        may_go_on: the pieces leave no hole, and neither an empty nor a smaller one ends the tensor.
    """

    entry: TensorEntry
    index: int
    ranks: tuple[int, ...]
    may_go_on: bool


@dataclass(frozen=True, slots=True)
class _Cut:
    """How tensors of so many pieces are spread, and one of them.

    Attributes:
        example: the name of a tensor that is cut so.
        places: for each place in the order of pieces, the ranks that hold such a piece.
    """

    example: str
    places: tuple[set[int], ...]


def gap_problems(chosen: ShardSet, tensors: Mapping[str, TensorEntry]) -> list[IncompleteError]:
    """Return which files of ranks are missing, as tensors show that lack pieces at their end.

    Args:
        chosen: the files of the save.
        tensors: what they hold; the tables of chunks have those files, in their order.
    """
    if chosen.is_complete:
        return []
    numbered = list(chosen.files)
    rows = [row for one in tensors.values() if (row := _row(one, numbered)) is not None]
    lacking, cuts = _lacking(chosen), _cuts(rows)
    like: dict[str, list[_Row]] = defaultdict(list)
    for row in rows:
        like[_NUMBER.sub("#", row.entry.fqn)].append(row)
    lost: dict[tuple[int, int], list[str]] = defaultdict(list)
    for row in rows:
        others = [o for o in like[_NUMBER.sub("#", row.entry.fqn)] if o.index != row.index]
        for rank, told in _missing_pieces(row, lacking[row.index], cuts, others):
            lost[row.index, rank].append(told)
    return [_problem(chosen, place, told) for place, told in sorted(lost.items())]


def _row(entry: TensorEntry, numbered: Sequence[tuple[int, int]]) -> _Row | None:
    table = entry.chunks
    cut = np.flatnonzero((table.offsets != table.offsets[:1]).any(axis=0))
    if not entry.shape or len(cut) > 1 or len(set(table.rank.tolist())) < len(table):
        return None
    dim = int(cut[0]) if len(cut) else 0
    order = np.argsort(table.offsets[:, dim])
    starts, sizes = table.offsets[order, dim], table.sizes[order, dim]
    has_hole = (starts != np.cumsum(sizes) - sizes).any()
    ends = (table.sizes == 0).any() or sizes[-1] < sizes[0]
    index, _ = numbered[int(table.file[0])]
    return _Row(entry, index, tuple(table.rank[order].tolist()), not has_hole and not ends)


def _lacking(chosen: ShardSet) -> dict[int, set[int]]:
    """Return, by index, the ranks that have files but not that one."""
    ranks = {rank for _, rank in chosen.files}
    return {
        index: {rank for rank in ranks if (index, rank) not in chosen.files}
        for index in range(1, chosen.count + 1)
    }


def _cuts(rows: Sequence[_Row]) -> list[_Cut]:
    """Return the ways in which tensors are cut into several pieces, none of them empty."""
    cuts: dict[int, _Cut] = {}
    for row in rows:
        count = len(row.ranks)
        if count > 1 and (row.entry.chunks.sizes > 0).all():
            cut = cuts.setdefault(count, _Cut(row.entry.fqn, tuple(set() for _ in row.ranks)))
            for place, rank in zip(cut.places, row.ranks, strict=True):
                place.add(rank)
    return list(cuts.values())


def _missing_pieces(
    row: _Row, lacking: set[int], cuts: Sequence[_Cut], others: Sequence[_Row]
) -> Iterator[tuple[int, str]]:
    """Yield the ranks that lack the file with the tensor's next pieces, and the evidence.

    `others` are tensors whose names differ in numbers only, in files of another index.
    """
    larger = next((one.entry for one in others if _is_larger(one.entry, row.entry)), None)
    alike = any(one.entry.shape == row.entry.shape for one in others)
    if not row.may_go_on or not lacking or (alike and larger is None):
        return
    have = len(row.ranks)
    for cut in cuts:
        lost = cut.places[have:]
        fits = all(rank in place for rank, place in zip(row.ranks, cut.places, strict=False))
        if 0 < len(lost) <= have and fits and all(place & lacking for place in lost):
            like = f"{cut.example} has {len(cut.places)}" if larger is None else _form(larger)
            told = f"{_form(row.entry)} has {_pieces(have)}, {like}"
            yield from ((rank, told) for place in lost for rank in sorted(place & lacking))
            return


def _is_larger(one: TensorEntry, other: TensorEntry) -> bool:
    if len(one.shape) != len(other.shape) or one.shape == other.shape:
        return False
    return all(a >= b for a, b in zip(one.shape, other.shape, strict=True))


def _pieces(count: int) -> str:
    return "1 piece" if count == 1 else f"{count} pieces"


def _form(entry: TensorEntry) -> str:
    return f"{entry.fqn} {list(entry.shape)}"


def _problem(chosen: ShardSet, place: tuple[int, int], told: Sequence[str]) -> IncompleteError:
    index, rank = place
    more = f"; and {len(told) - _SHOWN} more tensors" if len(told) > _SHOWN else ""
    return IncompleteError(
        f"{chosen.path(index, rank)}: missing; rank {rank} has other files, and tensors that other "
        f"ranks have in file {index} lack its pieces",
        found="; ".join(told[:_SHOWN]) + more,
        hint="copy the file here from where it was written, or take another checkpoint",
    )
