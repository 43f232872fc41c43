"""A log of bounded size, which keeps its first and its last part.

The file has the first half of the bound as it was written, then, if bytes were left out, one
line of fixed width with their number, then the end. An offset into a log counts all bytes
that were written, so it means the same before and after some were left out.
"""

import codecs
import os
import re
from pathlib import Path
from typing import Self

LOG_BYTES = 10_000_000

_LINE = b"\n[... %020d bytes left out ...]\n"
_LINE_PATTERN = re.compile(rb"\n\[\.\.\. ([0-9]{20}) bytes left out \.\.\.\]\n")
_WIDTH = len(_LINE % 0)
_TEXT_BYTES = 1 << 18


class BoundedLog:
    """A log file that is appended to, of `LOG_BYTES` and a few bytes more at most."""

    def __init__(self, path: Path) -> None:
        self._size = 0
        self._left_out = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def write(self, data: bytes) -> None:
        """Append to the log."""
        rest = memoryview(data)
        while rest:
            if self._size >= LOG_BYTES:
                self._cut()
            part = rest[: LOG_BYTES - self._size]
            self._append(part)
            rest = rest[len(part) :]

    def _append(self, data: bytes | memoryview) -> None:
        while data:
            written = os.pwrite(self._fd, data, self._size)
            self._size += written
            data = data[written:]

    def _cut(self) -> None:
        """Leave out the older half of the bytes after the first part."""
        head, tail_size = LOG_BYTES // 2, LOG_BYTES // 4
        line_size = _WIDTH if self._left_out else 0
        self._left_out += self._size - head - line_size - tail_size
        tail = os.pread(self._fd, tail_size, self._size - tail_size)
        self._size = head
        self._append(_LINE % self._left_out + tail)
        os.ftruncate(self._fd, self._size)


def read_log(path: Path, offset: int) -> tuple[str, int]:
    """Return the text after an offset, at most 256 KiB, and the offset after that text.

    Args:
        path: a log that may be growing, or not exist yet.
        offset: as returned by the last call, or 0. An offset beyond the end is of the log of an
            earlier attempt; this log is then read from its beginning.
    """
    try:
        with path.open("rb") as file:
            data, after = _read(file.fileno(), offset)
    except FileNotFoundError:
        return "", offset
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    if text := decoder.decode(data):
        # An incomplete last character is left to the next call.
        return text, after - len(decoder.getstate()[0])
    return data.decode("utf-8", "replace"), after


def log_end(path: Path) -> int:
    """Return the offset at which a log ends now; 0 if it does not exist."""
    try:
        with path.open("rb") as file:
            left_out, size = _bounds(file.fileno())
    except OSError:
        return 0
    return size - _WIDTH + left_out if left_out else size


def _read(fd: int, offset: int) -> tuple[bytes, int]:
    head = LOG_BYTES // 2
    while True:
        left_out, size = _bounds(fd)
        start = offset if offset <= (size if not left_out else size - _WIDTH + left_out) else 0
        if left_out and head <= start < head + left_out:
            return _LINE % left_out, head + left_out
        end = head if left_out and start < head else size
        begin = start if start < head or not left_out else start - left_out + _WIDTH
        data = os.pread(fd, max(0, min(end - begin, _TEXT_BYTES)), begin)
        left_out_now, size_now = _bounds(fd)
        if left_out_now == left_out and size_now >= size:  # otherwise bytes have moved: read again
            return data, start + len(data)


def _bounds(fd: int) -> tuple[int, int]:
    """Return how many bytes of a log were left out, and its size."""
    line = _LINE_PATTERN.fullmatch(os.pread(fd, _WIDTH, LOG_BYTES // 2))
    return int(line[1]) if line else 0, os.fstat(fd).st_size


def last_lines(path: Path, count: int) -> str:
    """Return the last lines of a log; "" if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 200 * count))
            lines = file.read(200 * count).decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-count:])
