"""Files that a plan would write, read without writing them: a part at a time, from anywhere.

Memory: the bytes that are asked for, `CACHE_BYTES` of what was made last, and one slab for each
thread that makes one.
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
from unshard.convert.outputs import Converted
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
    """Reads what output files consist of; threads may, and `at_once` pieces are read at a time.

    Args:
        path: that of the checkpoint, for errors.
        states: the files that are read as they were when they were opened first.
        cache_bytes: how much is kept of what was made last, `CACHE_BYTES` by default; one slab in
            any case.
        at_once: how many pieces are read at a time.
    """

    def __init__(
        self,
        path: Path,
        states: FileStates | None = None,
        *,
        cache_bytes: int | None = None,
        at_once: int = AT_ONCE,
    ) -> None:
        what = f"{path}: the files of the checkpoint were closed"
        self._sources = LentFiles(what, at_once=at_once, states=states)
        self._cache_bytes = CACHE_BYTES if cache_bytes is None else cache_bytes
        self._lock = Lock()  # of the two that follow
        self._made: OrderedDict[tuple[Tiled, tuple[int, ...]], memoryview] = OrderedDict()
        self._lost: dict[tuple[int, int, tuple[int, ...]], int] = {}

    def close(self) -> None:
        """Close all files once the pieces being read are done; nothing can be read then."""
        self._sources.close()
        self._made.clear()

    def check(self) -> None:
        """Raise the error of `read` if the reader is closed."""
        self._sources.check()

    @property
    def overflows(self) -> Counter[tuple[int, int]]:
        """How many finite values became infinite in what was made, as `Executor` counts them."""
        counted: Counter[tuple[int, int]] = Counter()
        with self._lock:
            for (file, start, _), count in self._lost.items():
                counted[file, start] += count
        return counted

    def read(self, contents: Contents, at: int, out: memoryview) -> None:
        """Fill `out` with the bytes of a file from `at` on; the file has as many.

        Raises:
            CorruptError: a source file is gone, has changed, or ends early.
            UsageError: the reader is closed.
        """
        waiting = _Waiting()
        while out:
            self._sources.check()
            piece, skip = contents.find(at)
            block = out[:_BLOCK]
            match piece:
                case StoredRun(path, start, length):
                    with self._sources.borrow() as files:  # and given back, for other threads
                        source = files.source(path)
                        if isinstance(source, RemoteFile):
                            block = out[: length - skip]
                            waiting.add_run(source, start + skip, block)
                        else:
                            block = block[: length - skip]
                            read_exactly(source, start + skip, block)
                case Slab():
                    block = out[: piece.length - skip]
                    self._read_slab(piece, skip, block, waiting)
                case _:
                    block = block[: len(piece) - skip]
                    block[:] = piece[skip : skip + len(block)]
            at, out = at + len(block), out[len(block) :]
        waiting.finish()

    def blocks(
        self, tensor: Converted | Contents, block_bytes: int = _BLOCK
    ) -> Iterator[memoryview]:
        """Yield the bytes of a tensor in blocks, as an output file has them: row-major.

        The bytes of a block change when the next one is asked for. A tensor without elements has
        no block. Every block but the last has `block_bytes`.

        Raises:
            CorruptError, UsageError: as by `read`.
        """
        contents = tensor if isinstance(tensor, Contents) else contents_of_tensor(tensor)
        buffer = memoryview(bytearray(min(block_bytes, contents.size)))
        for start in range(0, contents.size, block_bytes):
            block = buffer[: contents.size - start]
            self.read(contents, start, block)
            yield block

    def _read_slab(self, slab: Slab, skip: int, out: memoryview, waiting: "_Waiting") -> None:
        """Read a part of a slab; if it is made of what is in a bucket, `waiting` reads it later."""
        tables = (one.chunks for one in stored_tensors(slab.operation))
        if not any(isinstance(path, RemotePath) for table in tables for path in table.paths[:1]):
            self._copy_slab(slab, skip, out)
        elif isinstance(slab.operation, Gather) and len(out) == slab.length:
            source, raw = slab.operation.source, raw_dtype(slab.operation.to)
            array = np.frombuffer(out, raw).reshape(slab.box.sizes)
            with self._sources.borrow() as files:
                for part in stored_parts(array, slab.box, source.chunks, raw, files):
                    waiting.add_part(part)
        else:
            waiting.tasks.append(partial(self._copy_slab, slab, skip, out))

    def _copy_slab(self, slab: Slab, skip: int, out: memoryview) -> None:
        with self._sources.borrow() as files:
            out[:] = self._bytes_of(slab, files)[skip : skip + len(out)]

    def _bytes_of(self, slab: Slab, files: OpenFiles) -> memoryview:
        """Return the bytes of a slab: of one made lately, or made now.

        Threads that want the same slab at the same time each make it.
        """
        key = slab.operation, slab.box.offsets  # itself: what is made later may get its identity
        with self._lock:
            found = self._made.get(key)
            if found is not None:
                self._made.move_to_end(key)  # now the last to go
                return found
        made = self._make(slab, files)
        with self._lock:
            self._made[key] = made
            held = sum(map(len, self._made.values()))
            while held > self._cache_bytes and len(self._made) > 1:
                held -= len(self._made.popitem(last=False)[1])
        return made

    def _make(self, slab: Slab, files: OpenFiles) -> memoryview:
        out = np.empty(slab.box.sizes, raw_dtype(slab.operation.to))
        for place, tile in slab_tiles(slab):
            made = make_tile(tile, files)
            view(out, place)[...] = made.view(out.dtype)
            if count := count_overflows(tile, made, files):
                target = tile.operation.target  # a slab may be made again: it counts once
                with self._lock:
                    self._lost[target.file, target.start, tile.box.offsets] = count
        return out.reshape(-1).view(np.uint8).data


class _Waiting:
    """What is still to be read from buckets, with few requests, several at a time.

    Attributes:
        tasks: what reads by itself.
    """

    def __init__(self) -> None:
        self.tasks: list[Callable[[], None]] = []
        self._runs: dict[str, tuple[RemoteFile, list[tuple[int, memoryview]]]] = {}

    def add_run(self, file: RemoteFile, start: int, out: memoryview) -> None:
        """Add bytes of an object; neighbours are read together."""
        if start + len(out) > file.size:
            read_exactly(file, start, out)  # raises that the object ends too early
        self._runs.setdefault(file.name, (file, []))[1].append((start, out))

    def add_part(self, part: StoredPart) -> None:
        """Add a part of a box of a tensor; one on disk is read at once."""
        run = part.run()
        if not isinstance(part.file, RemoteFile):
            part.fill()
        elif run is None:
            self.tasks.append(part.fill)
        else:
            self.add_run(part.file, part.start, run)

    def finish(self) -> None:
        """Read all of it."""
        for file, runs in self._runs.values():
            self.tasks += file.fills(runs)
        all_at_once(self.tasks)


class PlannedFile(io.BufferedIOBase):
    """A file that a merge would write, open for reading: as `open(path, "rb")` returns it.

    Its bytes are read, or made, when they are asked for. Several threads may use it; they share its
    position, but not that of another one for the same file.

    Attributes:
        name: of the file, in the directory that a merge would make.
        size: how many bytes it has.
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
                raise ValueError(f"seek({offset}, {whence}): there is no such position")
            self._at = base + offset
            return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        """Read up to `size` bytes from the position on; all that are left if it is negative.

        Raises:
            CorruptError: a source file is gone, has changed, or ends early.
            UsageError: the checkpoint was closed.
            ValueError: this file was closed.
        """
        self._check_open()
        with self._lock:
            left = max(0, self.size - self._at)
            wanted = left if size is None or size < 0 else min(size, left)
            whole = io.BytesIO()  # its value is not copied, as a bytearray would be
            block = memoryview(bytearray(min(wanted, _BLOCK)))
            for done in range(0, wanted, _BLOCK):
                part = block[: wanted - done]
                self._read(self._at + done, part)
                whole.write(part)
            self._at += wanted
        return whole.getvalue()

    def read_at(self, at: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `at` on, which the file has; the position stays."""
        self._read(at, out)

    def read1(self, size: int = -1, /) -> bytes:
        """Read as `read` does."""
        return self.read(size)

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        """Fill a buffer from the position on; return how many bytes were left for it.

        Raises:
            CorruptError: a source file is gone, has changed, or ends early.
            UsageError: the checkpoint was closed.
            ValueError: this file was closed.
        """
        self._check_open()
        with self._lock:
            out = memoryview(buffer).cast("B")
            out = out[: max(0, self.size - self._at)]
            self._read(self._at, out)
            self._at += len(out)
            return len(out)

    def readinto1(self, buffer: "WriteableBuffer", /) -> int:
        """Fill a buffer as `readinto` does."""
        return self.readinto(buffer)

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"{self.name}: the file is closed")
