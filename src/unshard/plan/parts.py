"""Divide an output file into parts that are uploaded, or copied within the store. Pure.

A store copies a byte range of one object into a part of another. All parts but the last have a
minimum size. So a long run is a part of its own, and the bytes between two long runs are made on
this machine, together with the beginning of the second run if they are too few.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from unshard.plan.pieces import Contents, StoredRun

_LONGEST = 256 << 20
"""Longer runs are copied as several concurrent parts, if the minimum size allows it."""


@dataclass(frozen=True, slots=True)
class UploadPart:
    """The bytes of an output file from `start` up to `end`.

    `copied` is the run that the store copies; None if the bytes are made on this machine.
    """

    start: int
    end: int
    copied: StoredRun | None = None

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.end - self.start


def parts_of(
    contents: Contents, *, least: int, made_bytes: int, can_copy: Callable[[Path], bool]
) -> Iterator[UploadPart]:
    """Yield the parts of a file in order; no slab is divided between parts.

    Args:
        contents: the contents of the file.
        least: the minimum size of all parts but the last, bytes.
        made_bytes: the size of parts that are made here, at least twice `least`: a run that is too
            short to copy once it has filled up a part is then added whole, and the next one is
            copied. A slab, which is not cut, makes a part longer.
        can_copy: returns whether the store can copy from a source file.
    """
    start = at = 0  # the bytes between them are made here
    while at < contents.size:
        piece, skip = contents.find(at)
        rest = (len(piece) if isinstance(piece, memoryview) else piece.length) - skip
        pending = at - start
        padding = max(0, least - pending) if pending else 0
        if isinstance(piece, StoredRun) and rest - padding >= least and can_copy(piece.source):
            if pending:
                yield UploadPart(start, at + padding)
            first, end = at + padding, at + rest
            yield from _copies(piece, first, end, piece.start + skip + padding - first, least)
            start = at = end
            continue
        at += rest if not isinstance(piece, StoredRun) else min(rest, made_bytes - pending)
        if at - start >= made_bytes:
            yield UploadPart(start, at)
            start = at
    if start < at:
        yield UploadPart(start, at)


def _copies(run: StoredRun, start: int, end: int, offset: int, least: int) -> Iterator[UploadPart]:
    """Yield the copies of a run to `start`; source positions are `offset` bytes further on."""
    size = end - start
    count = -(-size // max(_LONGEST, 2 * least))  # each has at least half of that
    ends = [start + size * number // count for number in range(count + 1)]
    for first, last in itertools.pairwise(ends):
        yield UploadPart(first, last, StoredRun(run.source, first + offset, last - first))
