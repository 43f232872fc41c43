"""Decompressing a zstd frame: a window of a file into another file, in bounded memory.

Needs Python 3.14's own `compression.zstd`, or the package `zstandard` (the extra `zstd`).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, Protocol

from unshard.containers.open_files import Opened
from unshard.containers.strided import read_exactly
from unshard.errors import CorruptError, UsageError, how_to_install

_BLOCK = 1 << 20
_PIECE = 2048  # bytes fed at a time; each may become 32 KiB

_NO_DELTA = "a delta is compressed (zstd), and no library for it is installed"


class _Engine(Protocol):
    """What both libraries have: fed piece by piece, it knows when the frame is complete."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def decompress(
    source: str, file: Opened, window: tuple[int, int], out: IO[bytes], limit: int
) -> int:
    """Write what a compressed window (offset, length) of a file contains; return its size, bytes.

    `source` is the name of the file in errors. Never more than `limit` bytes are written.

    Raises:
        CorruptError: the window is not one zstd frame, or it ends early or exceeds `limit`.
        UsageError: no zstd library is installed.
    """
    engine, errors = _library()
    offset, length = window
    done = 0
    try:
        for start in range(0, length, _BLOCK):
            block = bytearray(min(_BLOCK, length - start))
            read_exactly(file, offset + start, memoryview(block))
            for at in range(0, len(block), _PIECE):
                if engine.eof:
                    raise _followed(source, offset)
                data = engine.decompress(bytes(block[at : at + _PIECE]))
                done += len(data)
                if done > limit:
                    raise CorruptError(
                        f"{source}: the item at byte {offset} is larger than its tensor",
                        expected=f"at most {limit} bytes",
                    )
                out.write(data)
    except errors as error:
        raise CorruptError(
            f"{source}: the item at byte {offset} cannot be decompressed: {error}"
        ) from error
    if not engine.eof:
        raise CorruptError(f"{source}: the item at byte {offset} is compressed and ends early")
    if engine.unused_data:
        raise _followed(source, offset)
    return done


def _followed(source: str, offset: int) -> CorruptError:
    """Return the error for bytes that torch, which reads one frame, would pass over."""
    return CorruptError(
        f"{source}: the item at byte {offset} has bytes after its end",
        expected="one zstd frame",
        found="one, and more bytes",
    )


def frame_of(blocks: Iterable[memoryview], size: int) -> Iterator[bytes]:
    """Yield a frame of blocks, `size` bytes in all, at the level of ModelExpress and slime.

    Raises:
        UsageError: no zstd library is installed.
    """
    own, package = _libraries(_NO_DELTA)
    engine = own.ZstdCompressor(1) if own else package.ZstdCompressor(1).compressobj(size)
    for block in blocks:
        yield engine.compress(block)
    yield engine.flush()


class _Window:
    """The next bytes of a file, as a file."""

    def __init__(self, file: IO[bytes], length: int) -> None:
        self._file, self._left = file, length

    def read(self, size: int) -> bytes:
        data = self._file.read(min(size, self._left))
        self._left -= len(data)
        return data


def frame_reader(source: str, file: IO[bytes], length: int) -> Callable[[int], bytes]:
    """Return a function that reads so many bytes of what the next `length` bytes contain: a frame.

    A frame of zeros is thousands of times smaller than they are, so `decompress`, which takes a
    number of compressed bytes at a time, would not be bounded.

    Raises:
        UsageError: no zstd library is installed.
    """
    own, package = _libraries(_NO_DELTA)
    errors = (own.ZstdError, EOFError) if own else package.ZstdError
    window, package = _Window(file, length), package and package.ZstdDecompressor()
    # What follows the frame is read as another one.
    stream = own.ZstdFile(window) if own else package.stream_reader(window, read_across_frames=True)

    def read(size: int) -> bytes:
        try:
            data: bytes = stream.read(size)
        except errors as error:
            raise CorruptError(f"{source}: cannot be decompressed: {error}") from error
        return data

    return read


def _library() -> tuple[_Engine, tuple[type[Exception], ...]]:
    """Return what decompresses one frame, and the errors it raises."""
    own, package = _libraries(
        "this checkpoint is compressed (zstd), and no library for it is installed"
    )
    if own:
        return own.ZstdDecompressor(), (own.ZstdError, EOFError)
    return package.ZstdDecompressor().decompressobj(), (package.ZstdError, EOFError)


def _libraries(missing: str) -> tuple[Any, Any]:
    """Return Python's own library, or else the package; `missing` is the error without both."""
    try:
        from compression import zstd
    except ImportError:
        try:
            import zstandard
        except ImportError as error:
            raise UsageError(missing, hint=how_to_install("zstandard", "zstd")) from error
        return None, zstandard
    return zstd, None
