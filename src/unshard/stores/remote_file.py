"""Objects of a bucket as files: sizes, and ranges of their bytes."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from unshard.stores.buckets import Bucket, ObjectEntry


_GAP = 256 * 1024
"""Ranges with at most this gap are read by one request."""
_WEIGHTS_GAP = 1 << 20
"""The same for weights, whose gaps are dropped as they arrive."""
_LONGEST = 8 << 20
"""The most bytes of one request."""
_IN_MEMORY = 16 << 20
"""The most bytes that are read together for many short ranges."""
_BLOCK = 64 * 1024
"""The least bytes of a read, because the next read is often near."""
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
        etag, status: as of `ObjectEntry`.
    """

    def __init__(self, bucket: "Bucket", key: str, entry: "ObjectEntry") -> None:
        self.name = f"{bucket.url}/{key}"
        self.size = entry.size
        self.etag = entry.etag
        self.status = entry.status
        self._bucket, self._key, self._entry = bucket, key, entry
        self._blocks: deque[tuple[int, bytearray]] = deque(maxlen=_BLOCKS)

    def read_into(self, start: int, out: memoryview) -> int:
        """Fill `out` with the bytes from `start` on; return their number.

        Raises:
            CorruptError: the object is gone, or has changed since it was opened.
            StoreError: the store cannot be reached.
        """
        from unshard.stores.pool import all_at_once

        length = max(0, min(len(out), self.size - start))
        parts = [
            partial(self._fill, start + at, out[at : min(at + _LONGEST, length)])
            for at in range(0, length, _LONGEST)
        ]
        all_at_once(parts)
        return length

    def pread(self, count: int, start: int) -> bytes:
        """Return `count` bytes from `start` on, or fewer at the end."""
        length = max(0, min(count, self.size - start))
        data = bytearray(length)
        if not 0 < length < _BLOCK:
            self.read_into(start, memoryview(data))
            return bytes(data)
        if (cached := self._cached(length, start)) is not None:
            return cached
        begin = max(0, min(start, self.size - _BLOCK))
        block = bytearray(min(_BLOCK, self.size - begin))
        self.read_into(begin, memoryview(block))
        self._blocks.append((begin, block))
        return bytes(block[start - begin : start - begin + length])

    def pread_many(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of many ranges (count, start), as `pread` does, with few requests."""
        from unshard.stores.pool import all_at_once

        blocks = {own: data for own in ranges if (data := self._cached(*own)) is not None}
        absent = [(start, count) for count, start in ranges if (count, start) not in blocks]
        spans = _spans(sorted(absent), gap=_GAP)
        while spans:
            batch = [spans.pop()]
            while spans and sum(span.length for span in (*batch, spans[-1])) <= _IN_MEMORY:
                batch.append(spans.pop())
            buffers = [
                bytearray(max(0, min(span.length, self.size - span.start))) for span in batch
            ]
            pairs = list(zip(batch, buffers, strict=True))
            all_at_once([partial(self._fill, span.start, memoryview(to)) for span, to in pairs])
            for span, buffer in pairs:
                for start, count in span.ranges:
                    at = start - span.start
                    blocks[count, start] = bytes(buffer[at : at + count])
        return [blocks[own] for own in ranges]

    def fills(self, ranges: Sequence[tuple[int, memoryview]]) -> Iterator[Callable[[], None]]:
        """Yield functions that fill the memory of ranges (start, memory), with few requests.

        All ranges are within the object. Any thread may call the functions, whose errors are those
        of `read_into`.
        """
        parts = [
            (start + at, out[at : at + _LONGEST])
            for start, out in sorted(ranges, key=itemgetter(0))
            for at in range(0, len(out), _LONGEST)
        ]
        rest = iter(parts)
        for span in _spans([(start, len(out)) for start, out in parts], gap=_WEIGHTS_GAP):
            yield partial(self._scatter, span, list(islice(rest, len(span.ranges))))

    def _scatter(self, span: _Span, parts: Sequence[tuple[int, memoryview]]) -> None:
        """Read a span, and copy its parts into their memory as they arrive."""

        def write(at: int, block: memoryview) -> None:
            begin, end = span.start + at, span.start + at + len(block)
            for start, out in parts:
                low, high = max(start, begin), min(start + len(out), end)
                if low < high:
                    out[low - start : high - start] = block[low - begin : high - begin]

        self.stream_to(span.start, span.length, write)

    def close(self) -> None:
        """Drop the cached blocks."""
        self._blocks.clear()

    def stream_to(self, start: int, length: int, write: Callable[[int, memoryview], None]) -> None:
        """Call `write(offset from start, bytes)` for all bytes of a range, in order."""
        at = 0
        for block in self._bucket.chunks(self._key, self._entry, start, length):
            write(at, block)
            at += len(block)

    def _cached(self, count: int, start: int) -> bytes | None:
        for begin, block in list(self._blocks):
            if begin <= start and start + count <= begin + len(block):
                return bytes(block[start - begin : start - begin + count])
        return None

    def _fill(self, start: int, out: memoryview) -> None:
        def write(at: int, block: memoryview) -> None:
            out[at : at + len(block)] = block

        self.stream_to(start, len(out), write)


def _spans(ranges: Iterable[tuple[int, int]], *, gap: int) -> list[_Span]:
    """Return sorted ranges (start, count) as spans, which unite ranges with small gaps."""
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
