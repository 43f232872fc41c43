"""Make the files of an output block by block, and upload them without a local copy.

Several threads make blocks ahead, and blocks are uploaded in order. No slab of a tensor is made
twice, because blocks end where slabs do. A file with long runs that the store can copy itself is
composed of such copies and uploaded parts. Memory: see `Pace`.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Self

from unshard.engines.files import PieceReader
from unshard.engines.threads import Resources, overflows_of
from unshard.errors import StoreError
from unshard.plan.operations import Plan
from unshard.plan.pieces import Contents, UploadPart, blocks_of, contents_of, parts_of
from unshard.progress import Advanced, Listener
from unshard.signals import uninterrupted
from unshard.stores.copying import Composition
from unshard.stores.objects import LEAST_PART, MOST_PARTS
from unshard.stores.pool import AT_ONCE
from unshard.stores.remote_path import RemotePath
from unshard.write.stage import Finished, Uploads, Written

_SHARE = 8
_LARGEST_BLOCK = 32 << 20
_MOST_AT_ONCE = 16

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pace:
    """The number of blocks in memory: `ahead` + 1 are made, `at_once` + 1 are sent.

    Attributes:
        block_bytes: length of blocks and parts.
        ahead: number of blocks made ahead, by as many threads.
        at_once: number of parts sent concurrently.
    """

    block_bytes: int
    ahead: int
    at_once: int

    @property
    def blocks(self) -> int:
        """Number of blocks in memory if parts are sent in any order."""
        return self.ahead + self.at_once


def pace(memory_bytes: int) -> Pace:
    """Return the pace for a bound on memory, which is at least four parts of 5 MiB."""
    block = min(max(memory_bytes // _SHARE, LEAST_PART), _LARGEST_BLOCK)
    each = min(max((memory_bytes // block - 2) // 2, 1), _MOST_AT_ONCE)
    return Pace(block, each, each)


def upload_files(
    plan: Plan, stage: Uploads, resources: Resources, listener: Listener, finished: Finished
) -> Written:
    """Make and upload the files of a plan, one after another.

    Args:
        plan: the plan.
        stage: the target; called from another thread.
        resources: `memory_bytes` bounds the blocks.
        listener: receives the bytes sent or copied; called from another thread.
        finished: called for each complete file, from another thread.

    Raises:
        UnshardError: a source cannot be read, or `stage` raised it. If the store does not copy, the
            files are uploaded.
    """
    limits = pace(resources.memory_bytes)
    reader = PieceReader(stage.target, cache_bytes=0, at_once=limits.blocks)
    try:
        with _Uploader(plan, reader, limits) as uploader:
            written = uploader.send(stage, listener, finished)
    finally:
        reader.close()
    written.overflows = reader.overflows
    return written


class _AbortedError(Exception):
    """Raised in an upload to abort it."""


class _Uploader:
    """Makes the blocks of files ahead of their upload."""

    def __init__(self, plan: Plan, reader: PieceReader, limits: Pace) -> None:
        self._files = dict(contents_of(plan))
        self._numbers = {plan.layout.files[number].filename: number for number in plan.numbers}
        self._pace = limits
        self._stopped = threading.Event()
        self._reader = reader
        self._makers = ThreadPoolExecutor(limits.blocks, "unshard-blocks")
        self._copiers = ThreadPoolExecutor(AT_ONCE, "unshard-copies")
        self._sender = ThreadPoolExecutor(1, "unshard-upload")
        self._written = Written()
        self._resent = 0  # bytes that were reported already and are sent again

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Abort running uploads, and wait for their end."""
        self._stopped.set()
        with uninterrupted():
            self._sender.shutdown()
            self._makers.shutdown(cancel_futures=True)
            self._copiers.shutdown(cancel_futures=True)

    def send(self, stage: Uploads, listener: Listener, finished: Finished) -> Written:
        """Write all files from another thread, so that a signal can end the wait."""

        def report(name: str) -> None:
            number = self._numbers[name]
            finished(number, overflows_of(self._reader.overflows, number))

        def send_all() -> None:
            for name in self._compose_files(stage, listener):
                report(name)
            futures: deque[Future[bytearray]] = deque()
            jobs = (
                (contents, start, end)
                for contents in self._files.values()
                for start, end in blocks_of(contents, self._block_bytes(contents))
            )
            for name, contents in self._files.items():
                blocks = self._blocks(contents.size, futures, jobs, listener)
                part = self._block_bytes(contents)
                stage.upload(name, blocks, part_bytes=part, at_once=self._pace.at_once)
                report(name)

        self._sender.submit(send_all).result()
        return self._written

    def _compose_files(self, stage: Uploads, listener: Listener) -> Iterator[str]:
        """Write the files that the store can copy parts of; yield their names."""
        for name, contents in list(self._files.items()):
            least = max(LEAST_PART, -(-contents.size // (MOST_PARTS - 1)))
            sizes = {"least": least, "made_bytes": max(self._pace.block_bytes, 2 * least)}
            parts = list(parts_of(contents, **sizes, can_copy=stage.can_copy))
            if not any(part.copied for part in parts):
                continue
            sent: list[int] = []
            send = partial(self._add_parts, contents, parts, sent, listener)
            try:
                stage.compose(name, contents.size, send)
            except StoreError as error:
                _log.info("%s: the store does not copy: %s", name, error)
                self._written.refused = error.subject
                self._resent += sum(sent)
                return
            self._written.copied += sum(part.size for part in parts if part.copied)
            del self._files[name]
            yield name

    def _add_parts(
        self,
        contents: Contents,
        parts: Sequence[UploadPart],
        sent: list[int],
        listener: Listener,
        composition: Composition,
    ) -> None:
        """Add all parts of a file, in any order; append their sizes to `sent`."""

        def add(number: int, part: UploadPart) -> int:
            if self._stopped.is_set():
                raise _AbortedError
            run = part.copied
            if run is not None and isinstance(run.source, RemotePath):
                composition.copy(number, run.source, run.start, run.length)
            else:
                composition.put(number, self._make(contents, part.start, part.end))
            return part.size

        futures = [
            (self._copiers if part.copied else self._makers).submit(add, number, part)
            for number, part in enumerate(parts, 1)
        ]
        try:
            for future in as_completed(futures):
                sent.append(future.result())
                self._advance(sent[-1], listener)
        finally:
            for future in futures:
                future.cancel()
            wait(futures)

    def _advance(self, count: int, listener: Listener) -> None:
        repeated = min(self._resent, count)
        self._resent -= repeated
        listener(Advanced(count - repeated))

    def _block_bytes(self, contents: Contents) -> int:
        return max(self._pace.block_bytes, -(-contents.size // MOST_PARTS))

    def _blocks(
        self,
        left: int,
        futures: deque[Future[bytearray]],
        jobs: Iterator[tuple[Contents, int, int]],
        listener: Listener,
    ) -> Iterator[bytearray]:
        """Yield the blocks of a file of `left` bytes, while the next blocks are made."""
        while left:
            if self._stopped.is_set():
                raise _AbortedError
            for job in islice(jobs, 1 + self._pace.ahead - len(futures)):
                futures.append(self._makers.submit(self._make, *job))
            block = futures.popleft().result()
            left -= len(block)
            self._advance(len(block), listener)
            yield block

    def _make(self, contents: Contents, start: int, end: int) -> bytearray:
        block = bytearray(end - start)
        self._reader.read(contents, start, memoryview(block))
        return block
