"""Random access to the files that a plan would write, without writing them.

Memory: the requested bytes, a cache of `CACHE_BYTES`, and a slab for each thread that makes one.
"""

import io
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from unshard.containers.chunks import StoredPart, stored_parts, view
from unshard.containers.file_states import FileStates
from unshard.containers.open_files import AT_ONCE, LentFiles, OpenFiles
from unshard.containers.strided import raw_dtype, read_exactly
from unshard.convert.outputs import ConvertedTensor
from unshard.plan.operations import Gather, Tiled, stored_tensors
from unshard.plan.pieces import Contents, Slab, StoredRun, contents_of_tensor, slab_tiles
from unshard.stores.pool import all_at_once
from unshard.stores.remote_file import RemoteFile
from unshard.stores.remote_path import RemotePath
from unshard.write.execute import count_overflows, make_tile

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

CACHE_BYTES = 32 * 1024 * 1024
_BLOCK = 1024 * 1024


class PieceReader:
    """Reads the contents of output files, for several threads.

    Args:
        path: the path of the checkpoint, for errors.
        states: the states of the source files when they were first opened.
        cache_bytes: bytes of recent slabs to cache, `CACHE_BYTES` by default; at least one slab.
        at_once: number of pieces to read concurrently.
    """

    def __init__(
        self,
        path: Path,
        states: FileStates | None = None,
        *,
        cache_bytes: int | None = None,
        at_once: int = AT_ONCE,
    ) -> None:
        closed = f"{path}: the files of the checkpoint were closed"
        self._sources = LentFiles(closed, at_once=at_once, states=states)
        self._cache_bytes = CACHE_BYTES if cache_bytes is None else cache_bytes
        self._lock = Lock()  # guards `_slabs` and `_overflows`
        self._slabs: OrderedDict[tuple[Tiled, tuple[int, ...]], memoryview] = OrderedDict()
        self._overflows: dict[tuple[int, int, tuple[int, ...]], int] = {}

    def close(self) -> None:
        """Close all files after the current pieces; afterwards nothing can be read."""
        self._sources.close()
        self._slabs.clear()

    def check(self) -> None:
        """Raise the error of `read` if the reader is closed."""
        self._sources.check()

    @property
    def overflows(self) -> Counter[tuple[int, int]]:
        """The number of finite values that became infinite so far, as `Executor` counts them."""
        totals: Counter[tuple[int, int]] = Counter()
        with self._lock:
            for (file, start, _), count in self._overflows.items():
                totals[file, start] += count
        return totals

    def read(self, contents: Contents, at: int, out: memoryview) -> None:
        """Fill `out` with the bytes of a file from `at` on; the file has enough bytes.

        Raises:
            CorruptError: a source file is gone, has changed, or ends early.
            UsageError: the reader is closed.
        """
        pending = _PendingReads()
        while out:
            self._sources.check()
            piece, skip = contents.find(at)
            block = out[:_BLOCK]
            match piece:
                case StoredRun(path, start, length):
                    with self._sources.borrow() as files:  # per piece, for other threads' sake
                        source = files.source(path)
                        if isinstance(source, RemoteFile):
                            block = out[: length - skip]
                            pending.add_run(source, start + skip, block)
                        else:
                            block = block[: length - skip]
                            read_exactly(source, start + skip, block)
                case Slab():
                    block = out[: piece.length - skip]
                    self._read_slab(piece, skip, block, pending)
                case _:
                    block = block[: len(piece) - skip]
                    block[:] = piece[skip : skip + len(block)]
            at, out = at + len(block), out[len(block) :]
        pending.finish()

    def blocks(
        self, tensor: ConvertedTensor | Contents, block_bytes: int = _BLOCK
    ) -> Iterator[memoryview]:
        """Yield the row-major bytes of a tensor, as in an output file, in blocks.

        A block is valid until the next block is requested. A tensor without elements has no block.
        Every block but the last has `block_bytes`.

        Raises:
            CorruptError, UsageError: as by `read`.
        """
        contents = tensor if isinstance(tensor, Contents) else contents_of_tensor(tensor)
        buffer = memoryview(bytearray(min(block_bytes, contents.size)))
        for start in range(0, contents.size, block_bytes):
            block = buffer[: contents.size - start]
            self.read(contents, start, block)
            yield block

    def _read_slab(self, slab: Slab, skip: int, out: memoryview, pending: "_PendingReads") -> None:
        """Read a part of a slab; if its sources are in a bucket, `pending` reads it later."""
        firsts = (tensor.chunks.paths[:1] for tensor in stored_tensors(slab.operation))
        if not any(isinstance(path, RemotePath) for paths in firsts for path in paths):
            self._copy_slab(slab, skip, out)
        elif isinstance(slab.operation, Gather) and len(out) == slab.length:
            source, raw = slab.operation.source, raw_dtype(slab.operation.to)
            array = np.frombuffer(out, raw).reshape(slab.box.sizes)
            with self._sources.borrow() as files:
                for part in stored_parts(array, slab.box, source.chunks, raw, files):
                    pending.add_part(part)
        else:
            pending.tasks.append(partial(self._copy_slab, slab, skip, out))

    def _copy_slab(self, slab: Slab, skip: int, out: memoryview) -> None:
        with self._sources.borrow() as files:
            out[:] = self._bytes_of(slab, files)[skip : skip + len(out)]

    def _bytes_of(self, slab: Slab, files: OpenFiles) -> memoryview:
        """Return the bytes of a slab, from the cache or made now.

        Threads that need the same slab at the same time each make it.
        """
        key = slab.operation, slab.box.offsets  # the object, because an id may be reused
        with self._lock:
            cached = self._slabs.get(key)
            if cached is not None:
                self._slabs.move_to_end(key)  # least recently used first
                return cached
        data = self._make(slab, files)
        with self._lock:
            self._slabs[key] = data
            size = sum(map(len, self._slabs.values()))
            while size > self._cache_bytes and len(self._slabs) > 1:
                size -= len(self._slabs.popitem(last=False)[1])
        return data

    def _make(self, slab: Slab, files: OpenFiles) -> memoryview:
        out = np.empty(slab.box.sizes, raw_dtype(slab.operation.to))
        for box, tile in slab_tiles(slab):
            elements = make_tile(tile, files)
            view(out, box)[...] = elements.view(out.dtype)
            if count := count_overflows(tile, elements, files):
                target = tile.operation.target  # keyed by tile, because a slab may be made again
                with self._lock:
                    self._overflows[target.file, target.start, tile.box.offsets] = count
        return out.reshape(-1).view(np.uint8).data


class _PendingReads:
    """Reads from buckets that are still to be made, with few and concurrent requests.

    Attributes:
        tasks: reads that cannot be combined.
    """

    def __init__(self) -> None:
        self.tasks: list[Callable[[], None]] = []
        self._runs: dict[str, tuple[RemoteFile, list[tuple[int, memoryview]]]] = {}

    def add_run(self, file: RemoteFile, start: int, out: memoryview) -> None:
        """Add a run of bytes of an object; neighbouring runs are read together."""
        if start + len(out) > file.size:
            read_exactly(file, start, out)  # raises the error that the object ends early
        self._runs.setdefault(file.name, (file, []))[1].append((start, out))

    def add_part(self, part: StoredPart) -> None:
        """Add a part of a box of a tensor; read it now if it is on disk."""
        run = part.run()
        if not isinstance(part.file, RemoteFile):
            part.fill()
        elif run is None:
            self.tasks.append(part.fill)
        else:
            self.add_run(part.file, part.start, run)

    def finish(self) -> None:
        """Read everything."""
        for file, runs in self._runs.values():
            self.tasks += file.fills(runs)
        all_at_once(self.tasks)


class PlannedFile(io.BufferedIOBase):
    """A file that a merge would write, open for reading, like the result of `open(path, "rb")`.

    Its bytes are read or made on request. Several threads may use it; they share its position.

    Attributes:
        name: its name in the directory that a merge would write.
        size: its bytes.
        mode: "rb".
    """

    mode = "rb"

    def __init__(self, name: str, size: int, read: Callable[[int, memoryview], None]) -> None:
        self.name = name
        self.size = size
        self._read = read
        self._lock = Lock()
        self._at = 0

    def __repr__(self) -> str:
        """Return name and size."""
        return f"<PlannedFile {self.name!r}: {self.size:,} bytes>"

    def readable(self) -> bool:
        """Return True."""
        self._check_open()
        return True

    seekable = readable

    def tell(self) -> int:
        """Return the position, bytes."""
        self._check_open()
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move the position, as for any file; return it."""
        self._check_open()
        with self._lock:
            base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}.get(whence)
            if base is None or base + offset < 0:
                raise ValueError(f"seek({offset}, {whence}): invalid position")
            self._at = base + offset
            return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        """Read up to `size` bytes from the position on; all of the rest if it is negative.

        Raises:
            CorruptError: a source file is gone, has changed, or ends early.
            UsageError: the checkpoint was closed.
            ValueError: this file was closed.
        """
        self._check_open()
        with self._lock:
            left = max(0, self.size - self._at)
            wanted = left if size is None or size < 0 else min(size, left)
            whole = io.BytesIO()  # `getvalue` does not copy it, unlike `bytes(bytearray)`
            block = memoryview(bytearray(min(wanted, _BLOCK)))
            for done in range(0, wanted, _BLOCK):
                part = block[: wanted - done]
                self._read(self._at + done, part)
                whole.write(part)
            self._at += wanted
        return whole.getvalue()

    def read_at(self, at: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `at` on, which must exist; the position stays."""
        self._read(at, out)

    def read1(self, size: int = -1, /) -> bytes:
        """Read like `read`."""
        return self.read(size)

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        """Fill a buffer from the position on; return the number of bytes; raise as `read`."""
        self._check_open()
        with self._lock:
            out = memoryview(buffer).cast("B")
            out = out[: max(0, self.size - self._at)]
            self._read(self._at, out)
            self._at += len(out)
            return len(out)

    def readinto1(self, buffer: "WriteableBuffer", /) -> int:
        """Fill a buffer like `readinto`."""
        return self.readinto(buffer)

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"{self.name}: the file is closed")
