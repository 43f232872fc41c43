"""An output in an object store: written there directly, and complete only when it says so.

A store cannot rename what was written. So a merge first claims the place, by an object that only
one process can create; it writes the weights, then everything else, and last the files by which a
reader takes a directory for a model: config.json and the like, and the record `unshard.json`. What
fails removes what it wrote, and the claim. A process that is killed leaves both, and no config.

With `--resume` each finished file of weights is recorded, and a later merge takes the claim over
(with `--reuse`, that of a killed merge alone); it removes what is not finished. A merge whose claim
was taken over stops, and removes nothing.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Self

from unshard.errors import OutputError, StoreError, UnshardError
from unshard.plan.operations import Plan
from unshard.progress import Listener
from unshard.progress import Stage as Progress
from unshard.read.hub_files import RECORD_NAME
from unshard.showing import counted
from unshard.signals import uninterrupted
from unshard.stores.at_once import away_from_signals
from unshard.stores.copying import Composition, Copier
from unshard.stores.objects import Stored, create, listed, remove, upload
from unshard.stores.remote_path import RemotePath
from unshard.write.bucket.claim import CLAIM_NAME, Claim
from unshard.write.bucket.ledger import FINISHED_NAME, BucketLedger, open_bucket_ledger
from unshard.write.record import add_companions, is_last, listed_weights
from unshard.write.stage import (
    SUSPECT,
    Counts,
    Engine,
    Overflows,
    Work,
    Written,
    counts_in,
    earlier_overflows,
    scratch_directory,
    unfinished,
)
from unshard.write.staging.stage import say_what_is_left

_SMALL = 8 << 20
_NO_OVERWRITE = "no store exchanges two outputs in one step, so nothing there is overwritten: "

_log = logging.getLogger(__name__)


class BucketStage:
    """Writes an output into a store. Left without a commit, nothing of it remains.

    Args:
        target: where the output goes; nothing may be there.
        overwrite: whether the user asked for an output to be replaced; no store can do that.
        names: the paths that the output will have.
        resume: whether to take over what an interrupted merge left, and to leave what is finished
            after an error.

    Raises:
        BusyError: on entering: another process writes there.
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
        self._over: str | None = None  # the claim of a killed process, which was waited for
        self._has_taken_over, self._found = False, dict[str, Stored]()  # an interrupted merge's
        self._ledger: BucketLedger | None = None
        self._last: dict[str, bytes] = {}
        self._temporary = ExitStack()
        self._is_complete = False

    def check(self) -> None:
        """Check that there is nothing at the target; write nothing.

        Raises:
            OutputError: there is.
        """
        found = listed(self._bucket, self.target.key)
        if CLAIM_NAME in found and RECORD_NAME not in found:
            if self._resume:
                return
            raise self._claim.taken()
        if found:
            hint = "give another output, or remove everything there first"
            if self._overwrite:
                hint = f"{_NO_OVERWRITE}{hint}"
            raise OutputError(f"{self.target}: exists already", hint=hint)

    @contextmanager
    def turn(self, is_made: Callable[[], bool], listener: Listener) -> Iterator[None]:
        """Wait for a process that writes there; see `Stage.turn`. No other claim is taken over."""
        self._over, self._has_waited = self._claim.wait(is_made, listener), True
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
            self._check_written()  # perhaps another process has just written there
            return self  # noqa: TRY300 (a signal just before it is caught, too)
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
        """Make the claim of an interrupted merge this one's; return whether there was one."""
        found = listed(self._bucket, self.target.key)
        claim = found.pop(CLAIM_NAME, None)
        if claim is None:
            return False
        if RECORD_NAME in found:  # it was killed when all was written
            left = [*found.keys() & {FINISHED_NAME}, CLAIM_NAME]
            self._written |= dict.fromkeys(left)
            self._remove(left)
            return False
        self._claim.make(instead_of=self._over if self._has_waited else claim.etag)
        self._written[CLAIM_NAME] = None
        self._has_taken_over, self._found = True, found
        return True

    @cached_property
    def scratch(self) -> Path:
        """A temporary directory on this machine, until the stage is left."""
        return scratch_directory(self._temporary)

    def write(self, plan: Plan, engine: Engine, work: Work) -> Written:
        """Upload the files of weights that no earlier process has finished; see `Stage.write`."""
        ledger, files = self._open_ledger(work), plan.layout.files
        left = unfinished(plan, ledger, engine.listener)
        engine.listener(Progress("uploading", left.bytes_written))

        def finished(number: int, overflows: Overflows) -> None:
            self._record(files[number].filename, counts_in(overflows))

        written = engine.upload(left, self, finished)
        written.overflows += earlier_overflows(plan, ledger)
        return written

    def _open_ledger(self, work: Work) -> BucketLedger:
        """Open the record of what is finished, and remove everything else that a merge left."""
        found, self._found = self._found, {}
        written = found.pop(FINISHED_NAME, None)
        data = b"" if written is None else self._claim.read(FINISHED_NAME)
        ledger = open_bucket_ledger(work, data, found)
        if strange := sorted(found.keys() - self._names):
            raise self._claim.lost(strange)
        if written is not None:
            self._written[FINISHED_NAME] = written
        rest = [name for name in found if name not in ledger.known]
        rest.sort(key=is_last, reverse=True)  # no reader may find a config without its model
        self._written |= dict.fromkeys(rest) | dict(ledger.files)
        if left := self._remove(rest):
            raise OutputError(f"{self.target}: cannot be removed: {', '.join(left)}")
        if self._has_taken_over and not self.abort_uploads(self._names):
            what = f"{self.target}: parts of what the other merge was uploading may be left"
            _log.warning("%s, which are paid for; a rule of the bucket can remove them", what)
        self._ledger = ledger
        return ledger

    def _record(self, name: str, counts: Counts) -> None:
        """Record a file as finished, if the merge can be resumed; for any thread.

        Raises:
            OutputError: another merge has taken over.
            StoreError: the store cannot be reached, or does not allow it.
        """
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
        """Write a file in parts, as `stores.objects.upload` does; for any thread.

        Raises:
            BusyError: another merge has taken over; its file is not replaced.
            StoreError: the store cannot be reached, or does not allow it.
        """
        self._written[name] = None  # whatever happens now, it may be there
        claim, limits = self._claim, {"part_bytes": part_bytes, "at_once": at_once}
        blocks = claim.while_held(blocks)
        self._written[name] = upload(self._bucket, claim.key(name), blocks, **limits)

    @property
    def written(self) -> Mapping[str, Stored | None]:
        """What this stage has written, by name; None is what may be there."""
        return self._written

    def wrote(self, name: str, stored: Stored | None) -> None:
        """Take note of a file that another process has written, or None: that it may write."""
        self._written[name] = stored
        if stored is not None:
            self._claim.check()

    def can_copy(self, source: Path) -> bool:
        """Return whether the store copies from a file of the checkpoint itself, for `compose`."""
        return self._copier is not None and self._copier.can_copy(source)

    def compose(self, name: str, size: int, send: Callable[[Composition], None]) -> None:
        """Write a file from parts, as `Copier.compose` does; for any thread.

        Raises:
            BusyError: as for `upload`.
            StoreError: the store cannot be reached, or does not do it.
        """
        if self._copier is None:
            raise TypeError("the store cannot copy")

        def held(composition: Composition) -> None:
            send(composition)
            self._claim.check()

        self._written[name] = None  # whatever happens now, it may be there
        self._written[name] = self._copier.compose(self._bucket, self._claim.key(name), size, held)

    def abort_uploads(self, names: Collection[str]) -> bool:
        """Abort what processes that are gone had begun to upload in parts; for any thread.

        Return whether nothing of it is left: S3 can do that, if boto3 is installed and it is
        allowed; Azure drops parts by itself, when the blob is put or after a week. Where another
        merge has taken over, uploads are its own, and are left.
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
        """Add small files; see `Stage.add`. Those that make a model of it wait for the commit."""
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
        """Return where the output can be read before the commit, but for what waits for it."""
        self._bucket.forget()
        return self.target

    def _create(self, name: str, data: bytes) -> None:
        """Write a small file, whose name must not be taken."""
        with uninterrupted():
            self._written[name] = None
            stored = create(self._bucket, self._claim.key(name), data)
            if stored is None:
                del self._written[name]  # it is not ours
                raise OutputError(
                    f"{self.target}/{name}: another process wrote it in the meantime",
                    hint="give another output",
                )
            self._written[name] = stored

    def _check_written(self) -> None:
        """Check that the store has everything as it was written, and that the claim is ours.

        Raises:
            OutputError: something is missing, was changed, or was added.
        """
        found = listed(self._bucket, self.target.key)
        names = {*found, *self._written} - {CLAIM_NAME}
        pairs = {name: (self._written.get(name), found.get(name)) for name in names}
        wrong = [name for name, (a, b) in sorted(pairs.items()) if not (a and b and a.is_same(b))]
        self._claim.check()
        if wrong:
            raise self._claim.lost(wrong)

    def commit(self, record: bytes, *, replaced: Sequence[str] = ()) -> list[str]:  # noqa: ARG002
        """Write the files that make the output complete, the record after all others.

        The record also gets the files that are not weights. Nothing is replaced. Ctrl-C and the
        like wait until all is done. Return notes.

        Raises:
            OutputError: another process wrote there.
        """
        weights, own = listed_weights(record), (CLAIM_NAME, FINISHED_NAME)
        sizes = {name: len(data) for name, data in self._last.items()}
        sizes |= {name: one.size for name, one in self._written.items() if one is not None}
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
        """Remove what was written, the newest first and the claim last.

        What is finished stays if the merge can be resumed; all stays that another took over.
        """
        with uninterrupted():
            self._claim.end()
            with suppress(StoreError):  # a store that does not answer removes nothing, either
                if not self._claim.is_held():  # another may have made it complete
                    _log.warning("%s: the claim is not this merge's; left alone", self.target)
                    if isinstance(error, OutputError | StoreError):  # perhaps due to that
                        raise self._claim.lost([CLAIM_NAME]) from error
                    return
            kept = self._kept(error)
            left = self._remove([name for name in reversed(self._written) if name not in kept])
            if kept:
                self._claim.end(give_up=True)
                say_what_is_left(error, self.target)
            if left:
                with suppress(UnshardError):  # what could not be removed need not be there
                    left = [name for name in listed(self._bucket, self.target.key) if name in left]
        if not left:
            return
        what = f"{self.target}: {counted(len(left), 'object')} of the unfinished output are left"
        _log.warning("%s: %s", what, ", ".join(left))
        if isinstance(error, KeyboardInterrupt):
            error.args = (f"interrupted; {what}: remove everything there",)
        else:
            raise OutputError(what, hint="remove everything there") from error

    def _kept(self, error: BaseException | None) -> set[str]:
        """Return what stays for a merge that goes on; an error of the output removes everything."""
        ledger = self._ledger
        if not self._resume or ledger is None or isinstance(error, SUSPECT):
            return set()
        return {*ledger.files, FINISHED_NAME, CLAIM_NAME} if ledger.files else set()

    def _remove(self, names: Iterable[str]) -> list[str]:
        """Remove objects that this stage wrote; return those that could not be removed."""
        left = []
        for name in list(names):
            try:
                remove(self._bucket, self._claim.key(name))
                self._written.pop(name)
            except UnshardError as error:
                _log.info("%s/%s: %s", self.target, name, error)
                left.append(name)
        return left
