"""Objects of a bucket as files: sizes, and ranges of their bytes."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from unshard.stores.buckets import Bucket, Entry


_GAP = 256 * 1024
"""Ranges this close are read by one request."""
_WEIGHTS_GAP = 1 << 20
"""The same of weights, which are not kept in between."""
_LONGEST = 8 << 20
"""The most bytes that one request asks for."""
_IN_MEMORY = 16 << 20
"""The most bytes that are read together for many short ranges."""
_BLOCK = 64 * 1024
"""Short reads take this much, as the next one is often near."""
_BLOCKS = 4


class _Span(NamedTuple):
    """Neighbouring ranges (start, count), read by one request."""

    start: int
    length: int
    ranges: tuple[tuple[int, int], ...]


class RemoteFile:
    """An object, open for reading. Thread-safe.

    Attributes:
        name: its address.
        size: bytes.
        etag, status: as those of an `Entry`.
    """

    def __init__(self, bucket: "Bucket", key: str, entry: "Entry") -> None:
        self.name = f"{bucket.url}/{key}"
        self.size = entry.size
        self.etag = entry.etag
        self.status = entry.status
        self._bucket, self._key, self._entry = bucket, key, entry
        self._blocks: deque[tuple[int, bytearray]] = deque(maxlen=_BLOCKS)

    def read_into(self, start: int, out: memoryview) -> int:
        """Fill `out` with the bytes from `start` on; return how many there were.

        Raises:
            CorruptError: the object is gone, or is not the one that was opened.
            StoreError: the store cannot be reached.
        """
        from unshard.stores.at_once import all_at_once

        length = max(0, min(len(out), self.size - start))
        parts = [
            partial(self._fill, start + at, out[at : min(at + _LONGEST, length)])
            for at in range(0, length, _LONGEST)
        ]
        all_at_once(parts)
        return length

    def pread(self, count: int, start: int) -> bytes:
        """Return `count` bytes from `start` on, or those up to the end."""
        length = max(0, min(count, self.size - start))
        data = bytearray(length)
        if not 0 < length < _BLOCK:
            self.read_into(start, memoryview(data))
            return bytes(data)
        if (kept := self._kept(length, start)) is not None:
            return kept
        begin = max(0, min(start, self.size - _BLOCK))
        block = bytearray(min(_BLOCK, self.size - begin))
        self.read_into(begin, memoryview(block))
        self._blocks.append((begin, block))
        return bytes(block[start - begin : start - begin + length])

    def pread_many(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return what `pread` returns for each of many (count, start), with few requests."""
        from unshard.stores.at_once import all_at_once

        found = {one: kept for one in ranges if (kept := self._kept(*one)) is not None}
        absent = [(start, count) for count, start in ranges if (count, start) not in found]
        spans = _united(sorted(absent), gap=_GAP)
        while spans:
            batch = [spans.pop()]
            while spans and sum(one.length for one in (*batch, spans[-1])) <= _IN_MEMORY:
                batch.append(spans.pop())
            data = [bytearray(max(0, min(one.length, self.size - one.start))) for one in batch]
            parts = zip(batch, data, strict=True)
            all_at_once([partial(self._fill, one.start, memoryview(to)) for one, to in parts])
            for one, block in zip(batch, data, strict=True):
                for start, count in one.ranges:
                    at = start - one.start
                    found[count, start] = bytes(block[at : at + count])
        return [found[one] for one in ranges]

    def fills(self, ranges: Sequence[tuple[int, memoryview]]) -> Iterator[Callable[[], None]]:
        """Yield what fills each memory with the bytes from a place on, with few requests.

        All ranges are within the object. What is yielded may be called by several threads, and
        raises as `read_into` does.
        """
        parts = [
            (start + at, out[at : at + _LONGEST])
            for start, out in sorted(ranges, key=itemgetter(0))
            for at in range(0, len(out), _LONGEST)
        ]
        left = iter(parts)
        for span in _united([(start, len(out)) for start, out in parts], gap=_WEIGHTS_GAP):
            yield partial(self._scatter, span, list(islice(left, len(span.ranges))))

    def _scatter(self, span: _Span, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Read a span, and copy what arrives to where its parts go."""

        def write(at: int, block: memoryview) -> None:
            begin, end = span.start + at, span.start + at + len(block)
            for start, out in parts:
                low, high = max(start, begin), min(start + len(out), end)
                if low < high:
                    out[low - start : high - start] = block[low - begin : high - begin]

        self.stream_to(span.start, span.length, write)

    def close(self) -> None:
        """Forget the blocks that were read."""
        self._blocks.clear()

    def stream_to(self, start: int, length: int, write: Callable[[int, memoryview], None]) -> None:
        """Call `write(offset from start, bytes)` for all bytes of a range, in their order."""
        at = 0
        for block in self._bucket.chunks(self._key, self._entry, start, length):
            write(at, block)
            at += len(block)

    def _kept(self, count: int, start: int) -> bytes | None:
        for begin, block in list(self._blocks):
            if begin <= start and start + count <= begin + len(block):
                return bytes(block[start - begin : start - begin + count])
        return None

    def _fill(self, start: int, out: memoryview) -> None:
        def write(at: int, block: memoryview) -> None:
            out[at : at + len(block)] = block

        self.stream_to(start, len(out), write)


def _united(ranges: Iterable[tuple[int, int]], *, gap: int) -> list[_Span]:
    """Return ranges (start, count), which are sorted, as spans: those with small gaps together."""
    spans: list[_Span] = []
    for start, count in ranges:
        last = spans[-1] if spans else None
        end = start + count
        if (
            last
            and start - last.start - last.length <= gap
            and end - last.start <= max(_LONGEST, last.length)
        ):
            length = max(last.length, end - last.start)
            spans[-1] = _Span(last.start, length, (*last.ranges, (start, count)))
        else:
            spans.append(_Span(start, count, ((start, count),)))
    return spans
