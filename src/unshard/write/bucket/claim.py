"""The claim on a place in a store: an object that only one process can create or take over.

A store has no locks that end with a process. To check whether it still holds a place, a process
reads the claim and compares its id with its own.

While a merge runs, a thread rewrites its claim every `BEAT_S`; a claim that does not change belongs
to a killed process. Clocks are not compared. A waiting process adds up the time that it slept, so
that it does not take over at once after it was suspended itself; the next conditional write
decides.
"""

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from datetime import UTC, datetime

from unshard import __version__
from unshard.containers.json_file import parsed_object
from unshard.errors import CorruptError, OutputError, UnshardError
from unshard.fronts import Text
from unshard.progress import Chosen, Listener, Warned
from unshard.read.hub_files import RECORD_NAME
from unshard.stores.buckets import refusing
from unshard.stores.objects import create
from unshard.stores.pool import submit
from unshard.stores.remote_path import RemotePath
from unshard.write.bucket.ledger import FINISHED_NAME
from unshard.write.stage import BusyError

CLAIM_NAME = "_unshard-partial.json"
"""The object that claims a place until the output there is complete."""

BEAT_S = 20.0
"""Seconds between two rewrites of a claim."""

_SILENT_BEATS = 6
_NO_BEATS = (
    "its claim does not show whether that merge still runs; if it was killed, interrupt this one, "
    "and rerun it with ⟦--resume⟧ instead of ⟦--reuse⟧"
)

_log = logging.getLogger(__name__)


class Claim:
    """The claim of this process on a target.

    Most methods raise a StoreError if the store cannot be reached, or does not allow a request.
    """

    def __init__(self, target: RemotePath) -> None:
        self._target, self._bucket = target, target.bucket
        begun = datetime.now(UTC).isoformat(timespec="seconds")
        self._fields = {"unshard": __version__, "begun": begun, "id": secrets.token_hex(16)}
        self._count = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def make(self, *, instead_of: str | None = None) -> None:
        """Write the claim if there is none, or replace the claim with an entity tag.

        From then on it is rewritten every `BEAT_S`, until `end`.

        Raises:
            BusyError: another process was faster.
        """
        if not self._put(BEAT_S, instead_of):
            raise self.taken()
        self._ended.clear()
        self._thread = threading.Thread(target=self._beat_on, name="unshard-claim", daemon=True)
        self._thread.start()

    def end(self, *, give_up: bool = False) -> None:
        """Stop rewriting the claim, so that it may be removed.

        With `give_up` it stays, but another process may take it over at once.
        """
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if give_up:
            self._beat(0)

    def _beat_on(self) -> None:
        while not self._ended.wait(BEAT_S):
            self._beat(BEAT_S)

    def _beat(self, beats: float) -> None:
        """Rewrite the claim, or stop if another process has it: the merge's own checks notice."""
        try:
            fields, etag = self._read()
            if fields.get("id") == self._fields["id"]:
                self._put(beats, etag)
            else:
                self._ended.set()
        except UnshardError as error:
            _log.info("%s/%s cannot be rewritten now: %s", self._target, CLAIM_NAME, error)

    def _put(self, beats: float, instead_of: str | None) -> bool:
        self._count += 1
        claim = self._fields | {"beats": beats, "count": self._count}
        data = (json.dumps(claim) + "\n").encode()
        return create(self._bucket, self.key(CLAIM_NAME), data, instead_of=instead_of) is not None

    def is_held(self) -> bool:
        """Return whether the store has this claim."""
        fields, _ = self._read()
        return fields.get("id") == self._fields["id"]

    def check(self) -> None:
        """Check that the claim is still held; only in the process that wrote it, not on Ray nodes.

        Raises:
            BusyError: another merge has taken over.
        """
        if self._thread is not None and not self.is_held():
            raise self.lost([CLAIM_NAME])

    def while_held(self, blocks: Iterator[bytearray]) -> Iterator[bytearray]:
        """Yield the blocks of an object; the final `check` aborts the upload of a lost claim."""
        yield from blocks
        submit(self.check).result()  # obstore accepts no request from this thread, its own

    def _read(self) -> tuple[dict[str, object], str | None]:
        """Return fields and entity tag of the claim in the store; ({}, None) if there is none."""
        key, fields, etag = self.key(CLAIM_NAME), dict[str, object](), None
        with refusing(f"{self._bucket.url}/{key}"), suppress(FileNotFoundError, CorruptError):
            answer = self._bucket.store.get(key)  # in one request: it may be rewritten any time
            etag = answer.meta["e_tag"] or ""
            fields = parsed_object(bytes(answer.bytes()), CLAIM_NAME)
        return fields, etag

    def wait(self, is_made: Callable[[], bool], listener: Listener) -> str | None:
        """Wait for the process that holds the claim, like `OutputStage.turn`.

        Returns:
            The entity tag of a killed process's claim; None if there is no claim, or the output
            exists.
        """
        fields, etag = self._read()
        if etag is not None:
            begun = str(fields.get("begun", "an unknown time"))[:40]
            listener(Chosen(f"waiting for a merge into {self._target} that began at {begun}"))
            if "beats" not in fields:  # an older version wrote it, and may still run
                listener(Warned(Text(f"{self._target}/{CLAIM_NAME}: {_NO_BEATS}")))
        silent, pause = 0.0, BEAT_S / 10
        while etag is not None:
            beats = fields.get("beats")
            if isinstance(beats, int | float) and silent >= _SILENT_BEATS * beats:
                return etag
            if is_made():
                break
            time.sleep(pause)
            before, (fields, etag) = fields, self._read()
            silent = silent + pause if fields == before else 0.0
            pause = min(pause * 1.2, BEAT_S / 4)
        return None

    def taken(self) -> BusyError:
        """Return the error that another process has claimed the target."""
        fields = dict[str, object]()
        with suppress(UnshardError):
            fields, _ = self._read()
        begun = str(fields.get("begun", "an unknown time"))[:40]
        return BusyError(
            f"{self._target}: a merge into it began at {begun}, and is not complete",
            hint="wait for it with ⟦--reuse⟧; or, if it was killed, continue it with ⟦--resume⟧, "
            "remove everything there, or give another output",
        )

    def lost(self, names: Collection[str]) -> OutputError:
        """Return the error that other processes have written objects there."""
        is_busy = {CLAIM_NAME, FINISHED_NAME, RECORD_NAME}.intersection(names)
        kind = BusyError if is_busy else OutputError
        return kind(
            f"{self._target}: changed by another process since it was written: {', '.join(names)}",
            hint="give another output",
        )

    def key(self, name: str) -> str:
        """Return the key of an object in the target."""
        return f"{self._target.key}/{name}".lstrip("/")

    def read(self, name: str) -> bytes:
        """Return the current content of an object in the target."""
        self._bucket.forget()
        data: bytes = (self._target / name).read_bytes()
        return data
