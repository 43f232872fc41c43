"""How an output file is divided into parts that are uploaded, or copied within the store. Pure.

A store copies a range of one object into a part of another one. All parts but the last need a
least size, so a long run is a part of its own, and what is between two long runs is made here, with
the beginning of the second one if it is shorter than that.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from unshard.plan.pieces import Contents, Piece, Run

_LONGEST = 256 << 20
"""Longer runs are copied as several parts at the same time, if they may be so short."""


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes of an output file from `start` to `end`.

    Attributes:
        start: the first byte.
        end: the first byte after them.
        copied: what the store copies; None if they are made here.
    """

    start: int
    end: int
    copied: Run | None = None

    @property
    def size(self) -> int:
        """How many bytes."""
        return self.end - self.start


def parts_of(
    contents: Contents, *, least: int, made_bytes: int, can_copy: Callable[[Path], bool]
) -> Iterator[Part]:
    """Yield the parts of a file, in their order; every slab is in one of them.

    Args:
        contents: what the file consists of.
        least: the least size of all parts but the last, bytes.
        made_bytes: how long parts are that are made here, at least twice `least`: a long run that
            is too short once it has filled a part is then added whole, and the next one is copied.
            A slab, which is not cut, makes them longer.
        can_copy: returns whether the store can copy from a source file.
    """
    start = at = 0  # what is between them is made here
    while at < contents.size:
        piece, skip = contents.find(at)
        left = _length(piece) - skip
        begun = at - start
        padding = max(0, least - begun) if begun else 0
        if isinstance(piece, Run) and left - padding >= least and can_copy(piece.source):
            if begun:
                yield Part(start, at + padding)
            first, end = at + padding, at + left
            yield from _copies(piece, first, end, piece.start + skip + padding - first, least)
            start = at = end
            continue
        at += left if not isinstance(piece, Run) else min(left, made_bytes - begun)
        if at - start >= made_bytes:
            yield Part(start, at)
            start = at
    if start < at:
        yield Part(start, at)


def _copies(run: Run, start: int, end: int, offset: int, least: int) -> Iterator[Part]:
    """Yield what copies a run to `start`; its bytes are `offset` further on in the source."""
    size = end - start
    count = -(-size // max(_LONGEST, 2 * least))  # each has at least half of that
    ends = [start + size * number // count for number in range(count + 1)]
    for first, last in itertools.pairwise(ends):
        yield Part(first, last, Run(run.source, first + offset, last - first))


def _length(piece: Piece) -> int:
    return len(piece) if isinstance(piece, memoryview) else piece.length
