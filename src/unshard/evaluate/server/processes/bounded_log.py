"""A log of bounded size: of one that is too long, the first and the last parts are kept.

The file has the first half of the bound as it was written, then, if anything was left out, one
line of fixed width that says how many bytes, then the end. An offset into a log counts all bytes
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
    """A log file that is written at its end and never grows beyond a size.

    Args:
        path: of the file, which is truncated.
        most_bytes: its largest size, give or take a few bytes; at least 1,000.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._most = max(most_bytes, 1000)
        self._head = self._most // 2
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
            if self._size >= self._most:
                self._cut()
            part = rest[: self._most - self._size]
            self._append(part)
            rest = rest[len(part) :]

    def _append(self, data: bytes | memoryview) -> None:
        while data:
            written = os.pwrite(self._fd, data, self._size)
            self._size += written
            data = data[written:]

    def _cut(self) -> None:
        """Leave out the older half of what follows the first part."""
        kept = (self._most - self._head) // 2
        had_line = _WIDTH if self._left_out else 0
        self._left_out += self._size - self._head - had_line - kept
        tail = os.pread(self._fd, kept, self._size - kept)
        self._size = self._head
        self._append(_LINE % self._left_out + tail)
        os.ftruncate(self._fd, self._size)


def read_log(path: Path, offset: int, *, most_bytes: int = LOG_BYTES) -> tuple[str, int]:
    """Return what follows an offset, at most 256 KiB of it, and the offset after that.

    Args:
        path: of a log that may be growing, or not be there yet.
        offset: as returned by the call before; 0 at first. One beyond the end is of another log,
            of an earlier attempt, and means the beginning of this one.
        most_bytes: the bound that the log was written with.
    """
    try:
        with path.open("rb") as file:
            found, after = _read(file.fileno(), offset, head=max(most_bytes, 1000) // 2)
    except FileNotFoundError:
        return "", offset
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    if text := decoder.decode(found):
        # A last character that is not complete is left to the next call.
        return text, after - len(decoder.getstate()[0])
    return found.decode("utf-8", "replace"), after


def log_end(path: Path) -> int:
    """Return the offset at which a log ends now; 0 if it is not there."""
    try:
        with path.open("rb") as file:
            left_out, size = _bounds(file.fileno(), LOG_BYTES // 2)
    except OSError:
        return 0
    return size - _WIDTH + left_out if left_out else size


def _read(fd: int, offset: int, *, head: int) -> tuple[bytes, int]:
    while True:
        left_out, size = _bounds(fd, head)
        start = offset if offset <= (size if not left_out else size - _WIDTH + left_out) else 0
        if left_out and head <= start < head + left_out:
            return _LINE % left_out, head + left_out
        end = head if left_out and start < head else size
        begin = start if start < head or not left_out else start - left_out + _WIDTH
        found = os.pread(fd, max(0, min(end - begin, _TEXT_BYTES)), begin)
        left_out_now, size_now = _bounds(fd, head)
        if left_out_now == left_out and size_now >= size:  # otherwise the bytes have moved since
            return found, start + len(found)


def _bounds(fd: int, head: int) -> tuple[int, int]:
    """Return how many bytes of a log were left out, and its size."""
    line = _LINE_PATTERN.fullmatch(os.pread(fd, _WIDTH, head))
    return int(line[1]) if line else 0, os.fstat(fd).st_size


def last_lines(path: Path, count: int) -> str:
    """Return the last lines of a log; nothing if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 200 * count))
            lines = file.read(200 * count).decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-count:])
