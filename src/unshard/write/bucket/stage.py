"""An output that is written directly into an object store, and is complete with its last file.

A store cannot rename objects. So a merge first claims the place with an object that only one
process can create. It writes the weights, then everything else, and last the files by which readers
recognise a model: config.json and the like, and the record `unshard.json`. A merge that fails
removes its objects and the claim. A process that is killed leaves both, but no config.

With `--resume` each finished weight file is recorded, and a later merge takes over the claim (with
`--reuse`, only a killed merge's claim) and removes unfinished files. A merge that has lost its
claim stops, and removes nothing.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Self

from unshard.console import counted
from unshard.errors import OutputError, StoreError, UnshardError
from unshard.plan.operations import Plan
from unshard.progress import Listener
from unshard.progress import Stage as Progress
from unshard.read.hub_files import RECORD_NAME
from unshard.signals import uninterrupted
from unshard.stores.copying import Composition, Copier
from unshard.stores.objects import Stored, create, listed, remove, upload
from unshard.stores.pool import away_from_signals
from unshard.stores.remote_path import RemotePath
from unshard.write.bucket.claim import CLAIM_NAME, Claim
from unshard.write.bucket.ledger import FINISHED_NAME, BucketLedger, open_bucket_ledger
from unshard.write.record import add_companions, is_last, listed_weights
from unshard.write.stage import (
    SUSPECT,
    Counts,
    MergeEngine,
    Overflows,
    WorkDigests,
    Written,
    counts_in,
    earlier_overflows,
    scratch_directory,
    unfinished,
)
from unshard.write.staging.stage import note_resumable

_SMALL = 8 << 20
_NO_OVERWRITE = "a store cannot swap two outputs atomically, so nothing there is overwritten: "

_log = logging.getLogger(__name__)


class BucketStage:
    """Writes an output into a store. If it is left without a commit, nothing remains.

    Args:
        target: the address of the output, which must not exist.
        overwrite: whether the user asked to replace an output, which no store can do.
        names: the paths of the output's files.
        resume: whether to continue an interrupted merge, and to keep finished files after an error.

    Raises:
        BusyError: on entering: another process writes there; later: another merge has taken over.
        OutputError: on entering: the target exists.
        StoreError: the store cannot be reached, or does not allow it.
    """

    def __init__(
        self,
        target: RemotePath,
        *,
        overwrite: bool = False,
        names: Collection[str] = (),
        resume: bool = False,
    ) -> None:
        self.target, self._bucket = target, target.bucket
        self._overwrite = overwrite
        self._names = frozenset((*names, RECORD_NAME))
        self._claim = Claim(target)
        self._written: dict[str, Stored | None] = {}
        self._resume = resume
        self._has_waited = False
        self._dead_claim: str | None = None  # entity tag of a killed process's claim
        self._has_taken_over = False
        self._left_objects = dict[str, Stored]()  # of the interrupted merge
        self._ledger: BucketLedger | None = None
        self._last: dict[str, bytes] = {}
        self._temporary = ExitStack()
        self._is_complete = False

    def check(self) -> None:
        """Check that the target does not exist; see `OutputStage.check`."""
        objects = listed(self._bucket, self.target.key)
        if CLAIM_NAME in objects and RECORD_NAME not in objects:
            if self._resume:
                return
            raise self._claim.taken()
        if objects:
            hint = "give another output, or remove everything there first"
            if self._overwrite:
                hint = f"{_NO_OVERWRITE}{hint}"
            raise OutputError(f"{self.target}: exists already", hint=hint)

    @contextmanager
    def turn(self, is_made: Callable[[], bool], listener: Listener) -> Iterator[None]:
        """Wait for a process that writes there; see `OutputStage.turn`.

        Afterwards only the claim of a killed process can be taken over.
        """
        self._dead_claim, self._has_waited = self._claim.wait(is_made, listener), True
        yield

    def __enter__(self) -> Self:
        with uninterrupted():
            if self._resume and self._take_over():
                return self
        self.check()
        try:
            with uninterrupted():
                self._claim.make()
                self._written[CLAIM_NAME] = None
            self._check_written()  # another process may have written there before the claim
            return self  # noqa: TRY300 (inside, so that a signal just before it is caught)
        except BaseException as error:
            if CLAIM_NAME in self._written:
                self._clean_up(error)
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._temporary.close()
        self._bucket.forget()
        if not self._is_complete:
            self._clean_up(error)
        elif isinstance(error, KeyboardInterrupt):
            error.args = (f"interrupted, but only after {self.target} was complete",)

    def _take_over(self) -> bool:
        """Take over the claim of an interrupted merge; return whether there was one."""
        objects = listed(self._bucket, self.target.key)
        claim = objects.pop(CLAIM_NAME, None)
        if claim is None:
            return False
        if RECORD_NAME in objects:  # it was killed after the output was complete
            left = [*objects.keys() & {FINISHED_NAME}, CLAIM_NAME]
            self._written |= dict.fromkeys(left)
            self._remove(left)
            return False
        self._claim.make(instead_of=self._dead_claim if self._has_waited else claim.etag)
        self._written[CLAIM_NAME] = None
        self._has_taken_over, self._left_objects = True, objects
        return True

    @cached_property
    def scratch(self) -> Path:
        """A local temporary directory, until the stage is left."""
        return scratch_directory(self._temporary)

    def write(self, plan: Plan, engine: MergeEngine, work: WorkDigests) -> Written:
        """Upload the weight files that are not finished yet; see `OutputStage.write`."""
        ledger, files = self._open_ledger(work), plan.layout.files
        left = unfinished(plan, ledger.known, ledger.notes, engine.listener)
        engine.listener(Progress("uploading", left.bytes_written))

        def finished(number: int, overflows: Overflows) -> None:
            self._record(files[number].filename, counts_in(overflows))

        written = engine.upload(left, self, finished)
        written.overflows += earlier_overflows(plan, ledger.known)
        return written

    def _open_ledger(self, work: WorkDigests) -> BucketLedger:
        """Open the record of finished files, and remove all other objects of the earlier merge."""
        objects, self._left_objects = self._left_objects, {}
        record = objects.pop(FINISHED_NAME, None)
        data = b"" if record is None else self._claim.read(FINISHED_NAME)
        ledger = open_bucket_ledger(work, data, objects)
        if strange := sorted(objects.keys() - self._names):
            raise self._claim.lost(strange)
        if record is not None:
            self._written[FINISHED_NAME] = record
        rest = [name for name in objects if name not in ledger.known]
        rest.sort(key=is_last, reverse=True)  # no reader may find a config without its model
        self._written |= dict.fromkeys(rest) | dict(ledger.files)
        if left := self._remove(rest):
            raise OutputError(f"{self.target}: cannot be removed: {', '.join(left)}")
        if self._has_taken_over and not self.abort_uploads(self._names):
            _log.warning(
                "%s: parts of the other merge's uploads may be left, which cost money; a lifecycle "
                "rule of the bucket can remove them",
                self.target,
            )
        self._ledger = ledger
        return ledger

    def _record(self, name: str, counts: Counts) -> None:
        """Record a finished file, if the merge can be resumed; for any thread."""
        stored, ledger = self._written[name], self._ledger
        if not self._resume or ledger is None or stored is None:
            return
        self._claim.check()
        before = self._written.setdefault(FINISHED_NAME, None)
        etag = None if before is None else before.etag
        data, key = ledger.add(name, stored, counts), self._claim.key(FINISHED_NAME)
        written = create(self._bucket, key, data, instead_of=etag)
        if written is None:
            raise self._claim.lost([FINISHED_NAME])
        self._written[FINISHED_NAME] = written

    def upload(
        self, name: str, blocks: Iterator[bytearray], *, part_bytes: int, at_once: int
    ) -> None:
        """Write a file in parts, with `stores.objects.upload`; for any thread.

        If another merge has taken over, its file is not replaced.
        """
        self._written[name] = None  # it may exist from now on, even after an error
        claim, limits = self._claim, {"part_bytes": part_bytes, "at_once": at_once}
        blocks = claim.while_held(blocks)
        self._written[name] = upload(self._bucket, claim.key(name), blocks, **limits)

    @property
    def written(self) -> Mapping[str, Stored | None]:
        """The objects written so far, by name; None: the object may exist."""
        return self._written

    def wrote(self, name: str, stored: Stored | None) -> None:
        """Record a file that another process has written; None: it may have written it."""
        self._written[name] = stored
        if stored is not None:
            self._claim.check()

    def can_copy(self, source: Path) -> bool:
        """Return whether the store can copy from a file of the checkpoint, for `compose`."""
        return self._copier is not None and self._copier.can_copy(source)

    def compose(self, name: str, size: int, send: Callable[[Composition], None]) -> None:
        """Write a file from parts, with `Copier.compose`, like `upload`."""
        if self._copier is None:
            raise TypeError("the store cannot copy")

        def send_and_check(composition: Composition) -> None:
            send(composition)
            self._claim.check()

        self._written[name] = None  # it may exist from now on, even after an error
        key = self._claim.key(name)
        self._written[name] = self._copier.compose(self._bucket, key, size, send_and_check)

    def abort_uploads(self, names: Collection[str]) -> bool:
        """Abort multipart uploads of lost processes; for any thread.

        Return whether none is left. S3 can do it with boto3 and permission; Azure drops parts when
        the blob is put, or after a week. If another merge has taken over, the uploads are its own
        and stay.
        """
        if self._copier is None:
            return self._bucket.url.startswith("a")
        try:
            if not self._claim.is_held():
                return True
            keys = {self._claim.key(name) for name in names}
            self._copier.abort_uploads(self._bucket, self.target.key, keys)
        except StoreError as error:
            _log.info("unfinished uploads are left: %s", error)
            return False
        return True

    def add(self, files: Mapping[str, bytes | Path]) -> None:
        """Add small files; see `OutputStage.add`. Config and the like wait for the commit."""
        for name, source in files.items():
            if isinstance(source, Path) and not is_last(name) and source.stat().st_size > _SMALL:
                with source.open("rb") as file:
                    blocks = map(bytearray, iter(partial(file.read, _SMALL), b""))
                    parts = {"part_bytes": _SMALL, "at_once": 2}
                    away_from_signals(partial(self.upload, name, blocks, **parts))
                continue
            data = source if isinstance(source, bytes) else source.read_bytes()
            if is_last(name):
                self._last[name] = data
            else:
                self._create(name, data)

    def readable(self) -> RemotePath:
        """Return the output's address; before the commit, it has no config."""
        self._bucket.forget()
        return self.target

    def _create(self, name: str, data: bytes) -> None:
        """Write a small file that must not exist."""
        with uninterrupted():
            self._written[name] = None
            stored = create(self._bucket, self._claim.key(name), data)
            if stored is None:
                del self._written[name]  # another process owns it
                raise OutputError(
                    f"{self.target}/{name}: another process wrote it in the meantime",
                    hint="give another output",
                )
            self._written[name] = stored

    def _check_written(self) -> None:
        """Check that the store has exactly the written objects, and that the claim is held."""
        objects = listed(self._bucket, self.target.key)
        wrong = []
        for name in sorted({*objects, *self._written} - {CLAIM_NAME}):
            written, stored = self._written.get(name), objects.get(name)
            if written is None or stored is None or not written.is_same(stored):
                wrong.append(name)
        self._claim.check()
        if wrong:
            raise self._claim.lost(wrong)

    def commit(self, record: bytes, *, replaced: Sequence[str] = ()) -> list[str]:  # noqa: ARG002
        """Write the files that complete the output, the record last; see `OutputStage.commit`.

        The record also lists the files that are not weights. Nothing is replaced. Signals are
        delayed until the end.
        """
        weights, own = listed_weights(record), (CLAIM_NAME, FINISHED_NAME)
        sizes = {name: len(data) for name, data in self._last.items()}
        sizes |= {name: stored.size for name, stored in self._written.items() if stored is not None}
        others = {name: sizes[name] for name in sorted(sizes) if name not in {*weights, *own}}
        with uninterrupted():
            self._check_written()
            for name, data in sorted(self._last.items()):
                self._create(name, data)
            self._create(RECORD_NAME, add_companions(record, others))
            self._is_complete = True
            self._claim.end()
            left = self._remove([name for name in reversed(own) if name in self._written])
        return [f"{self.target} is complete, but {name} could not be removed" for name in left]

    @cached_property
    def _copier(self) -> Copier | None:
        return Copier.into(self._bucket)

    def _clean_up(self, error: BaseException | None) -> None:
        """Remove the written objects, the newest first and the claim last.

        Finished files stay if the merge can be resumed, unless the output itself is wrong. If
        another merge has taken over, everything stays.
        """
        with uninterrupted():
            self._claim.end()
            with suppress(StoreError):  # a store that does not answer would not remove, either
                if not self._claim.is_held():  # another merge may have completed the output
                    _log.warning("%s: the claim is not this merge's; left alone", self.target)
                    if isinstance(error, OutputError | StoreError):  # perhaps its consequence
                        raise self._claim.lost([CLAIM_NAME]) from error
                    return
            resumable, ledger = set[str](), self._ledger
            if self._resume and ledger is not None and not isinstance(error, SUSPECT):
                resumable = {*ledger.files, FINISHED_NAME, CLAIM_NAME} if ledger.files else set()
            left = self._remove([name for name in reversed(self._written) if name not in resumable])
            if resumable:
                self._claim.end(give_up=True)
                note_resumable(error, self.target)
            if left:
                with suppress(UnshardError):  # an object whose removal failed may be gone
                    left = [name for name in listed(self._bucket, self.target.key) if name in left]
        if not left:
            return
        subject = f"{self.target}: {counted(len(left), 'object')} of the unfinished output are left"
        _log.warning("%s: %s", subject, ", ".join(left))
        if isinstance(error, KeyboardInterrupt):
            error.args = (f"interrupted; {subject}: remove everything there",)
        else:
            raise OutputError(subject, hint="remove everything there") from error

    def _remove(self, names: Iterable[str]) -> list[str]:
        """Remove objects of this stage; return the names of those that could not be removed."""
        left = []
        for name in list(names):
            try:
                remove(self._bucket, self._claim.key(name))
                self._written.pop(name)
            except UnshardError as error:
                _log.info("%s/%s: %s", self.target, name, error)
                left.append(name)
        return left
