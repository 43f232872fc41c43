"""Make the files of an output block by block, and upload them without writing them anywhere.

Blocks are made ahead by several threads, and uploaded in their order. No slab of a tensor is made
twice, because blocks end where slabs do. Files with long runs that the store can copy itself are
composed of such copies and of what is between them. Memory: see `Pace`.
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
from unshard.engines.threads import Resources
from unshard.errors import StoreError
from unshard.plan.operations import Plan
from unshard.plan.pieces import Contents, UploadPart, blocks_of, contents_of, parts_of
from unshard.progress import Advanced, Listener
from unshard.signals import uninterrupted
from unshard.stores.copying import Composition
from unshard.stores.objects import LEAST_PART, MOST_PARTS
from unshard.stores.pool import AT_ONCE
from unshard.stores.remote_path import RemotePath
from unshard.write.stage import Finished, Overflows, Uploads, Written

_SHARE = 8
_LARGEST_BLOCK = 32 << 20
_MOST_AT_ONCE = 16

_log = logging.getLogger(__name__)


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

    @property
    def blocks(self) -> int:
        """How many blocks are in memory where parts are sent in any order."""
        return self.ahead + self.at_once


def pace(memory_bytes: int) -> Pace:
    """Divide a bound on memory; four parts of 5 MiB are needed in any case."""
    block = min(max(memory_bytes // _SHARE, LEAST_PART), _LARGEST_BLOCK)
    each = min(max((memory_bytes // block - 2) // 2, 1), _MOST_AT_ONCE)
    return Pace(block, each, each)


def upload_files(
    plan: Plan, stage: Uploads, resources: Resources, listener: Listener, finished: Finished
) -> Written:
    """Make and upload the files of a plan, one after another.

    Args:
        plan: what they consist of.
        stage: takes them; called from another thread.
        resources: `memory_bytes` bounds the blocks.
        listener: is told what was sent or copied; called from another thread.
        finished: called for each file that was written; from another thread.

    Raises:
        UnshardError: a source cannot be read, or what `stage` raises. If the store does not copy,
            the files are uploaded.
    """
    chosen = pace(resources.memory_bytes)
    reader = PieceReader(stage.target, cache_bytes=0, at_once=chosen.blocks)
    try:
        with _Making(plan, reader, chosen) as making:
            done = making.send(stage, listener, finished)
    finally:
        reader.close()
    done.overflows = reader.overflows
    return done


class _StoppedError(Exception):
    """Raised in an upload to abort it."""


class _Making:
    """Makes the blocks of files ahead of their upload."""

    def __init__(self, plan: Plan, reader: PieceReader, chosen: Pace) -> None:
        self._files = dict(contents_of(plan))
        self._numbers = {plan.layout.files[number].filename: number for number in plan.numbers}
        self._pace = chosen
        self._stopped = threading.Event()
        self._reader = reader
        self._makers = ThreadPoolExecutor(chosen.blocks, "unshard-blocks")
        self._copiers = ThreadPoolExecutor(AT_ONCE, "unshard-copies")
        self._sender = ThreadPoolExecutor(1, "unshard-upload")
        self._done = Written()
        self._again = 0  # bytes that were announced, and are sent once more

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Abort what is under way, and wait until nothing is."""
        self._stopped.set()
        with uninterrupted():
            self._sender.shutdown()
            self._makers.shutdown(cancel_futures=True)
            self._copiers.shutdown(cancel_futures=True)

    def send(self, stage: Uploads, listener: Listener, finished: Finished) -> Written:
        """Write all files from a thread of their own, so that a signal can end the wait."""

        def tell(name: str) -> None:
            number = self._numbers[name]
            counts = self._reader.overflows.items()
            finished(number, Overflows({at: count for at, count in counts if at[0] == number}))

        def send_all() -> None:
            for name in self._compose_files(stage, listener):
                tell(name)
            made: deque[Future[bytearray]] = deque()
            left = self._jobs()
            for name, contents in self._files.items():
                part = self._block_bytes(contents)
                blocks = self._blocks(contents.size, made, left, listener)
                stage.upload(name, blocks, part_bytes=part, at_once=self._pace.at_once)
                tell(name)

        self._sender.submit(send_all).result()
        return self._done

    def _compose_files(self, stage: Uploads, listener: Listener) -> Iterator[str]:
        """Write the files of which the store copies something, and yield each; others are left."""
        for name, contents in list(self._files.items()):
            parts = self._parts(contents, stage)
            if not any(one.copied for one in parts):
                continue
            sent: list[int] = []
            send = partial(self._add_parts, contents, parts, sent, listener)
            try:
                stage.compose(name, contents.size, send)
            except StoreError as error:
                _log.info("%s: the store does not copy: %s", name, error)
                self._done.refused = error.subject
                self._again += sum(sent)
                return
            self._done.copied += sum(one.size for one in parts if one.copied)
            del self._files[name]
            yield name

    def _parts(self, contents: Contents, stage: Uploads) -> list[UploadPart]:
        least = max(LEAST_PART, -(-contents.size // (MOST_PARTS - 1)))
        made = max(self._pace.block_bytes, 2 * least)
        sizes = {"least": least, "made_bytes": made}
        return list(parts_of(contents, **sizes, can_copy=stage.can_copy))

    def _add_parts(
        self,
        contents: Contents,
        parts: Sequence[UploadPart],
        sent: list[int],
        listener: Listener,
        made: Composition,
    ) -> None:
        """Add all parts of a file, in any order; `sent` gets their sizes."""

        def add(number: int, part: UploadPart) -> int:
            if self._stopped.is_set():
                raise _StoppedError
            run = part.copied
            if run is not None and isinstance(run.source, RemotePath):
                made.copy(number, run.source, run.start, run.length)
            else:
                made.put(number, self._make(contents, part.start, part.end))
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
        known = min(self._again, count)
        self._again -= known
        listener(Advanced(count - known))

    def _block_bytes(self, contents: Contents) -> int:
        return max(self._pace.block_bytes, -(-contents.size // MOST_PARTS))

    def _jobs(self) -> Iterator[tuple[Contents, int, int]]:
        for one in self._files.values():
            for start, end in blocks_of(one, self._block_bytes(one)):
                yield one, start, end

    def _blocks(
        self,
        left: int,
        made: deque[Future[bytearray]],
        jobs: Iterator[tuple[Contents, int, int]],
        listener: Listener,
    ) -> Iterator[bytearray]:
        """Yield the blocks of a file of which `left` bytes are left; the next ones are made."""
        while left:
            if self._stopped.is_set():
                raise _StoppedError
            for job in islice(jobs, 1 + self._pace.ahead - len(made)):
                made.append(self._makers.submit(self._make, *job))
            block = made.popleft().result()
            left -= len(block)
            self._advance(len(block), listener)
            yield block

    def _make(self, contents: Contents, start: int, end: int) -> bytearray:
        block = bytearray(end - start)
        self._reader.read(contents, start, memoryview(block))
        return block
