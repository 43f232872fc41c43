"""Decompressing zstd frames: a window of a file into another file, in bounded memory.

Needs Python 3.14's own `compression.zstd`, or the package `zstandard` (the extra `zstd`).
"""

import io
from collections.abc import Callable
from pathlib import Path
from typing import IO, cast

from unshard.containers.strided import read_exactly
from unshard.errors import CorruptError, UsageError

__all__ = ["decompress"]

_BLOCK = 1 << 20

Decompressor = Callable[[IO[bytes]], IO[bytes]]


def decompress(source: Path, fd: int, window: tuple[int, int], out: IO[bytes], limit: int) -> int:
    """Write what a compressed window of a file holds; return its size in bytes.

    Args:
        source: the file, for messages.
        fd: its descriptor.
        window: offset and length of the compressed bytes.
        out: where to write.
        limit: the most bytes that may come out.

    Raises:
        CorruptError: the window is no zstd frame, ends early, or holds more than `limit`.
        UsageError: no zstd library is installed.
    """
    opened, errors = _library()
    done = 0
    try:
        with opened(cast("IO[bytes]", io.BufferedReader(_Window(fd, *window)))) as stream:
            while block := stream.read(_BLOCK):
                done += len(block)
                if done > limit:
                    raise CorruptError(
                        f"{source}: the item at byte {window[0]} holds more than its tensor",
                        expected=f"at most {limit} bytes",
                    )
                out.write(block)
    except errors as error:
        raise CorruptError(
            f"{source}: the item at byte {window[0]} cannot be decompressed: {error}"
        ) from error
    return done


def _library() -> tuple[Decompressor, tuple[type[Exception], ...]]:
    """Return what opens a compressed stream, and the errors it raises."""
    try:
        from compression import zstd
    except ImportError:
        pass
    else:
        return zstd.ZstdFile, (zstd.ZstdError, EOFError)
    try:
        import zstandard
    except ImportError as error:
        raise UsageError(
            "this checkpoint is compressed (zstd), and no library for it is installed",
            hint="pip install 'unshard[zstd]'",
        ) from error
    return zstandard.ZstdDecompressor().stream_reader, (zstandard.ZstdError, EOFError)


class _Window(io.RawIOBase):
    """A part of a file as a stream of its own."""

    def __init__(self, fd: int, offset: int, length: int) -> None:
        self._fd = fd
        self._at = offset
        self._end = offset + length

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview | bytearray") -> int:  # type: ignore[override]
        block = memoryview(buffer)[: self._end - self._at]
        read_exactly(self._fd, self._at, block)
        self._at += len(block)
        return len(block)
