"""stdout and stderr of a command: what cannot be printed never stops the work."""

import errno
import io
import os
import sys
from typing import TextIO

from unshard.errors import printable

__all__ = ["flushed", "make_safe", "say"]


class _Unfailing(io.FileIO):
    """Writes to a descriptor; after the first error what is written is dropped.

    Attributes:
        error: that error.
    """

    error: OSError | None = None

    def write(self, data: object, /) -> int:
        """Write, or drop, all of the data."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        done = 0
        while self.error is None and done < len(view):
            try:
                done += super().write(view[done:]) or 0
            except OSError as error:
                self.error = error
        return len(view)


class _Printable(io.TextIOWrapper):
    """Escapes what would control a terminal: what others wrote is printed, too."""

    def write(self, text: str, /) -> int:
        """Write a text."""
        return super().write(printable(text))


def make_safe() -> None:
    """Make stdout and stderr print any text in their encoding, and outlast their own failure.

    Nothing in stdout controls a terminal. In stderr progress bars must: a message is printed by
    `say`, which escapes it.
    """
    sys.stdout = _safe(sys.stdout, 1, _Printable)
    sys.stderr = _safe(sys.stderr, 2, io.TextIOWrapper)


def _safe(stream: TextIO | None, number: int, kind: type[io.TextIOWrapper]) -> TextIO:
    """Return a stream in the place of one of Python's own; None is one that was closed."""
    if stream is None:
        fd = os.open(os.devnull, os.O_RDWR)
        if fd != number:  # or else the next file that is opened would be taken for it
            os.dup2(fd, number)
            os.close(fd)
        stream = io.TextIOWrapper(io.FileIO(number, "w", closefd=False), encoding="utf-8")
    raw = _Unfailing(number, "w", closefd=False)
    return kind(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=number == 2 or raw.isatty(),
    )


def say(text: object) -> None:
    """Print a message on stderr. It may quote what servers and evaluators answered."""
    print(printable(str(text)), file=sys.stderr, flush=True)


def flushed() -> OSError | None:
    """Flush both streams; return why stdout could not be written.

    A reader that has gone (`| head`) has read what it wanted: this is not an error.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    error = raw.error if isinstance(raw, _Unfailing) else None
    return None if error is None or error.errno == errno.EPIPE else error
