"""Make the files of an output block by block, and upload them without writing them anywhere.

Blocks are made ahead by several threads, and uploaded in their order. No slab of a tensor is made
twice, because blocks end where slabs do. Memory: see `Pace`.
"""

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol, Self

from unshard.engines.files import PieceReader
from unshard.engines.threads import Overflows, Resources
from unshard.plan.pieces import Contents, blocks_of
from unshard.progress import Advanced, Listener
from unshard.signals import uninterrupted
from unshard.stores.objects import LEAST_PART, MOST_PARTS

__all__ = ["Pace", "Uploader", "pace", "upload_files"]

_SHARE = 8
_LARGEST_BLOCK = 32 << 20
_MOST_AT_ONCE = 16


class Uploader(Protocol):
    """What takes the files."""

    def upload(
        self, name: str, blocks: Iterator[bytearray], *, part_bytes: int, at_once: int
    ) -> None:
        """Write a file from its blocks; what they raise is raised."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How much is made and sent at a time.

    In memory are `ahead` blocks that are made, `at_once` parts that are sent, and one of each.

    Attributes:
        block_bytes: how long blocks and parts are.
        ahead: how many blocks are made before they are sent, by as many threads.
        at_once: how many parts are sent at a time.
    """

    block_bytes: int
    ahead: int
    at_once: int


def pace(memory_bytes: int) -> Pace:
    """Divide a bound on memory; four parts of 5 MiB are needed in any case."""
    block = min(max(memory_bytes // _SHARE, LEAST_PART), _LARGEST_BLOCK)
    each = min(max((memory_bytes // block - 2) // 2, 1), _MOST_AT_ONCE)
    return Pace(block, each, each)


def upload_files(
    path: Path,
    files: Mapping[str, Contents],
    uploader: Uploader,
    resources: Resources,
    listener: Listener,
) -> Overflows:
    """Make and upload files, one after another.

    Args:
        path: that of the checkpoint, for errors.
        files: what they consist of.
        uploader: takes them; called from another thread.
        resources: `memory_bytes` bounds the blocks.
        listener: is told what was sent; called from another thread.

    Returns:
        How many finite values became infinite.

    Raises:
        UnshardError: a source cannot be read, or what `uploader` raises.
    """
    chosen = pace(resources.memory_bytes)
    readers = [PieceReader(path, {}, cache_bytes=0) for _ in range(chosen.ahead)]
    try:
        with _Making(files, readers, chosen) as making:
            making.send(uploader, listener)
    finally:
        for reader in readers:
            reader.close()
    return sum((one.overflows for one in readers), Overflows())


class _StoppedError(Exception):
    """Raised in an upload to abort it."""


class _Making:
    """Makes the blocks of files ahead of their upload."""

    def __init__(
        self, files: Mapping[str, Contents], readers: list[PieceReader], chosen: Pace
    ) -> None:
        self._files = files
        self._pace = chosen
        self._stopped = threading.Event()
        self._readers: SimpleQueue[PieceReader] = SimpleQueue()
        for reader in readers:
            self._readers.put(reader)
        self._makers = ThreadPoolExecutor(chosen.ahead, "unshard-blocks")
        self._sender = ThreadPoolExecutor(1, "unshard-upload")
        self._made: deque[Future[bytearray]] = deque()
        self._left = (
            (one, *span)
            for one in files.values()
            for span in blocks_of(one, self._block_bytes(one))
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Abort what is under way, and wait until nothing is."""
        self._stopped.set()
        with uninterrupted():
            self._sender.shutdown()
            self._makers.shutdown(cancel_futures=True)

    def send(self, uploader: Uploader, listener: Listener) -> None:
        """Upload all files from a thread of their own, so that a signal can end the wait."""

        def send_all() -> None:
            for name, contents in self._files.items():
                part = self._block_bytes(contents)
                blocks = self._blocks(contents, listener)
                uploader.upload(name, blocks, part_bytes=part, at_once=self._pace.at_once)

        self._sender.submit(send_all).result()

    def _block_bytes(self, contents: Contents) -> int:
        return max(self._pace.block_bytes, -(-contents.size // MOST_PARTS))

    def _blocks(self, contents: Contents, listener: Listener) -> Iterator[bytearray]:
        left = contents.size
        while left:
            if self._stopped.is_set():
                raise _StoppedError
            for job in islice(self._left, 1 + self._pace.ahead - len(self._made)):
                self._made.append(self._makers.submit(self._make, *job))
            block = self._made.popleft().result()
            left -= len(block)
            listener(Advanced(len(block)))
            yield block

    def _make(self, contents: Contents, start: int, end: int) -> bytearray:
        reader = self._readers.get()
        try:
            block = bytearray(end - start)
            reader.read(contents, start, memoryview(block))
            return block
        finally:
            self._readers.put(reader)
