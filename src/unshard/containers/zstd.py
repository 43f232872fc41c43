"""Compress and decompress zstd frames, in bounded memory.

Needs Python 3.14's own `compression.zstd`, or the package `zstandard` (the extra `zstd`).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

from unshard.containers.open_files import Opened
from unshard.containers.strided import read_exactly
from unshard.errors import CorruptError, UsageError, how_to_install

_BLOCK = 1 << 20
_PIECE = 2048  # bytes fed at a time; each may become 32 KiB

_NO_DELTA = "a delta is compressed (zstd), and no library for it is installed"
_NO_CHECKPOINT = "this checkpoint is compressed (zstd), and no library for it is installed"


def decompress(
    source: str, file: Opened, window: tuple[int, int], out: IO[bytes], limit: int
) -> int:
    """Decompress a window (offset, length) of a file into `out`; return the size in bytes.

    `source` is the name of the file in errors. At most `limit` bytes are written.

    Raises:
        CorruptError: the window is not one zstd frame, or it ends early or exceeds `limit`.
        UsageError: no zstd library is installed.
    """
    own, package = _libraries(_NO_CHECKPOINT)
    decompressor = own.ZstdDecompressor() if own else package.ZstdDecompressor().decompressobj()
    offset, length = window
    item, size = f"{source}: the item at byte {offset}", 0
    # torch reads one frame, and would ignore any bytes after it.
    trailing = CorruptError(
        f"{item} has bytes after its end",
        expected="one zstd frame",
        found="one, and more bytes",
    )
    try:
        for start in range(0, length, _BLOCK):
            block = bytearray(min(_BLOCK, length - start))
            read_exactly(file, offset + start, memoryview(block))
            for at in range(0, len(block), _PIECE):
                if decompressor.eof:
                    raise trailing
                data = decompressor.decompress(bytes(block[at : at + _PIECE]))
                size += len(data)
                if size > limit:
                    raise CorruptError(
                        f"{item} is larger than its tensor", expected=f"at most {limit} bytes"
                    )
                out.write(data)
    except ((own or package).ZstdError, EOFError) as error:
        raise CorruptError(f"{item} cannot be decompressed: {error}") from error
    if not decompressor.eof:
        raise CorruptError(f"{item} is compressed and ends early")
    if decompressor.unused_data:
        raise trailing
    return size


def frame_of(blocks: Iterable[memoryview], size: int) -> Iterator[bytes]:
    """Yield a frame of blocks, `size` bytes in all, at the level of ModelExpress and slime.

    Raises:
        UsageError: no zstd library is installed.
    """
    own, package = _libraries(_NO_DELTA)
    compressor = own.ZstdCompressor(1) if own else package.ZstdCompressor(1).compressobj(size)
    for block in blocks:
        yield compressor.compress(block)
    yield compressor.flush()


class _Window:
    """The next bytes of a file, as a file."""

    def __init__(self, file: IO[bytes], length: int) -> None:
        self._file, self._left = file, length

    def read(self, size: int) -> bytes:
        data = self._file.read(min(size, self._left))
        self._left -= len(data)
        return data


def frame_reader(source: str, file: IO[bytes], length: int) -> Callable[[int], bytes]:
    """Return a function that reads a number of decompressed bytes from the next `length` bytes.

    `decompress`, which takes a number of compressed bytes at a time, would not bound the memory:
    a frame of zeros is thousands of times smaller than the zeros.

    Raises:
        UsageError: no zstd library is installed.
    """
    own, package = _libraries(_NO_DELTA)
    errors = (own.ZstdError, EOFError) if own else package.ZstdError
    window, package = _Window(file, length), package and package.ZstdDecompressor()
    # Bytes after the frame are read as another frame.
    stream = own.ZstdFile(window) if own else package.stream_reader(window, read_across_frames=True)

    def read(size: int) -> bytes:
        try:
            data: bytes = stream.read(size)
        except errors as error:
            raise CorruptError(f"{source}: cannot be decompressed: {error}") from error
        return data

    return read


def _libraries(missing: str) -> tuple[Any, Any]:
    """Return Python's own library, or the package; without either, raise the error `missing`."""
    try:
        from compression import zstd
    except ImportError:
        try:
            import zstandard
        except ImportError as error:
            raise UsageError(missing, hint=how_to_install("zstandard", "zstd")) from error
        return None, zstandard
    return zstd, None
