"""Staging: an output is made apart, then takes its place in one commit, or leaves nothing behind.

A staging directory is `_unshard-partial-<random>/`, next to the target, and only its owner may
enter it. It contains `owner.json`, `output/`, the record of the files there that are finished, and
in the end perhaps a journal. What a killed process left there is finished or removed by the next
run, or gone on with, if it can be shown to be that user's own (see `owners`). Where the target is
inside a checkpoint, the name also records the modification time to give back to the directory that
holds both.
"""

import errno
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Self

from unshard.errors import OutputError, UnshardError
from unshard.fronts import Text
from unshard.plan.operations import Plan
from unshard.progress import Listener
from unshard.progress import Stage as Progress
from unshard.read.hub_files import RECORD_NAME
from unshard.signals import how, uninterrupted
from unshard.write.companions import ADAPTER_CONFIG_NAME, write_files
from unshard.write.dirfd import opened
from unshard.write.stage import (
    SUSPECT,
    Engine,
    Overflows,
    Work,
    Written,
    counts_in,
    earlier_overflows,
    unfinished,
)
from unshard.write.staging.commit import begin, finish, is_begun, take_new
from unshard.write.staging.finished import open_ledger
from unshard.write.staging.journal import OUTPUT, Mode, write_journal
from unshard.write.staging.owners import (
    Owner,
    StagingDirectory,
    claim,
    is_believed_later,
    is_open_to_others,
    seal,
    staging_name,
)
from unshard.write.staging.recovery import adopt, recover, remove_empty, remove_staging
from unshard.write.staging.targets import allocated, check_space, choose_mode, is_inside
from unshard.write.staging.turns import lock_directory, turn

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Staging:
    """A directory to fill, which `commit` turns into the target. Left without it, nothing remains.

    Args:
        target: where the output goes; parents are made (and removed again on failure).
        needed_bytes: what the output will take.
        sources: the directories of the checkpoint; if the output goes into one of them, it
            keeps its modification time (trainers rotate checkpoints by it).
        overwrite: whether what unshard wrote there may be replaced; "all": other files too.
        names: the paths that the output will have, to refuse at once what would be refused later.
        resume: whether to go on with what an earlier process left of this target, and to leave it
            when a signal or an error ends this one, except an error of the output itself, or a
            source that has changed.

    Raises:
        OutputError: on entering: the target exists, is not writable or has no space, or its file
            system has no locks.
    """

    def __init__(  # noqa: PLR0913 (what must be known of a target)
        self,
        target: Path,
        needed_bytes: int,
        *,
        sources: Sequence[Path] = (),
        overwrite: bool | str = False,
        names: Collection[str] = (),
        resume: bool = False,
    ) -> None:
        self._target = target
        self._needed = needed_bytes
        self._sources = tuple(sources)
        self._overwrite = overwrite
        self._names = names
        self._resume = resume and bool(seal())  # without a key nothing that is left is believed
        self._why_not_resumed = ""
        if resume and not self._resume:
            why = "there is no private directory for this user's key"
            self._why_not_resumed = f"{why}; set XDG_STATE_HOME to a directory of yours"
        self._is_adopted = False
        self._mode = Mode.NEW
        self._made_parents: list[Path] = []
        self._place: StagingDirectory | None = None
        self._owner_file: FileIO | None = None
        self._held = ExitStack()
        self._quiet = ExitStack()  # holds signals back from a commit to the end of the stage
        self._is_complete = False

    @property
    def directory(self) -> Path:
        """Where to write the output's files."""
        return self._staging.path / OUTPUT

    @property
    def scratch(self) -> Path:
        """A directory for files that are needed while the output is made."""
        scratch = self._staging.path / "scratch"
        scratch.mkdir(exist_ok=True)
        return scratch

    def write(
        self,
        plan: Plan,
        engine: Engine,
        work: Work,
        *,
        seal: Callable[[Path, int], None] = lambda _path, _number: None,
    ) -> Written:
        """Make the files of weights that no earlier process has finished; see `Stage.write`.

        `seal` is called with the path and the number of each that has all its bytes.
        """
        ledger, files = open_ledger(self._staging, work), plan.layout.files
        if self._why_not_resumed:
            ledger.notes.append(Text(f"⟦--resume⟧ has no effect: {self._why_not_resumed}"))
        left = unfinished(plan, ledger, engine.listener)
        data = sum(files[number].data_bytes for number in left.numbers)
        engine.listener(Progress("writing", data))
        recorder = ThreadPoolExecutor(1)  # flushes a file while others are written
        records: list[Future[None]] = []

        def finished(number: int, overflows: Overflows) -> None:
            seal(self.directory / files[number].filename, number)
            counts = counts_in(overflows)
            records.append(recorder.submit(ledger.add, files[number].filename, counts))

        try:
            overflows = engine.make(left, self.directory, finished)
            for record in records:
                record.result()
        finally:
            with uninterrupted():  # nothing may be recorded while the stage is removed
                recorder.shutdown(cancel_futures=True)
        return Written(earlier_overflows(plan, ledger) + overflows)

    def add(self, files: Mapping[str, bytes | Path]) -> None:
        """Add small files; see `Stage.add`."""
        write_files(files, self.directory)

    def readable(self) -> Path:
        """Return where the output can be read before the commit."""
        return self.directory

    @property
    def _staging(self) -> StagingDirectory:
        if self._place is None or (self._owner_file is not None and self._owner_file.closed):
            raise RuntimeError("the stage has not been entered by this process")
        return self._place

    def check(self) -> Mode:
        """Return how the output would take its place, as `choose_mode` does; touch nothing."""
        return choose_mode(
            self._target, self._sources, overwrite=self._overwrite, names=self._names
        )

    @contextmanager
    def turn(self, is_made: Callable[[], bool], listener: Listener) -> Iterator[None]:
        """Wait for other processes that make the output; see `Stage.turn`."""
        target, make = self._target.resolve(), self._make_parents
        keeps_mtime = self._is_within(target)
        with ExitStack() as held:
            held.callback(lambda: remove_empty(self._made_parents[::-1]))
            try:
                own = turn(target, is_made, listener, make_parents=make, keeps_mtime=keeps_mtime)
                held.enter_context(own)
            except OSError as error:
                raise unwritable(target, error) from error
            yield

    def __enter__(self) -> Self:
        try:
            self._enter()
            return self  # noqa: TRY300 (a signal just before it is caught, too)
        except BaseException as error:
            self._clean_up(keep=self._is_adopted)
            if isinstance(error, OSError):
                raise unwritable(self._target, error) from error
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        left = None
        if self._resume and error is not None and not isinstance(error, SUSPECT):
            left = None if self._place is None else self._place.path
        try:
            self._clean_up(keep=left is not None)
            self._quiet.close()
            if left is not None:
                say_what_is_left(error, left)
            if isinstance(error, OSError):
                raise unwritable(self._target, error, left) from error
        except KeyboardInterrupt as late:
            if self._is_complete:
                late.args = (f"interrupted, but only after {self._target} was complete",)
            raise

    def commit(self, record: bytes | None = None, *, replaced: Sequence[str] = ()) -> list[str]:
        """Add the record, make everything durable and let it take the target's place.

        Ctrl-C and the like wait until the stage is left, which then reports that they came too
        late. Companions in `replaced` replace those in a checkpoint's own directory. Return notes:
        what others changed in the target in the meantime, and whether the output might not survive
        a power failure.

        Raises:
            OutputError: another process made the target, or not all files could be moved.
        """
        if record is not None:
            write_files({RECORD_NAME: record}, self.directory)
        with ExitStack() as quiet:
            quiet.enter_context(uninterrupted())
            configs = [self.directory / "config.json", self.directory / ADAPTER_CONFIG_NAME]
            is_alone = self._mode is not Mode.IN_PLACE and not any(one.exists() for one in configs)
            notes = self._take_place(replaced)
            if is_alone and (self._target / "config.json").exists():
                what = "which this merge did not write: the new weights would be loaded with it"
                notes.append(f"{self._target} keeps its config.json, {what}")
            self._is_complete = True
            self._made_parents.clear()
            self._clean_up(keep=False)
            if self._resume and not self._is_adopted:  # what could not be taken over is of no use
                recover(self._target.parent, target=self._target.name)
            self._quiet = quiet.pop_all()
        return notes

    def _take_place(self, replaced: Collection[str]) -> list[str]:
        place = self._staging
        if self._mode is Mode.NEW:
            try:
                take_new(place, self._target)
                return _durable(place.parent, self._target)
            except OutputError:
                if not self._overwrite:
                    raise
                self._mode = self.check()  # it may be replaced as if it had been there before
        journal = begin(
            place,
            self._target,
            self._mode,
            replaced=replaced,
            lose_strangers=self._overwrite == "all",
        )
        write_journal(place, journal)
        with suppress(OSError):  # every step may be done twice
            return finish(place, journal) + _durable(place.parent, self._target)
        try:
            return finish(place, journal) + _durable(place.parent, self._target)
        except OSError as error:
            if not is_begun(place, journal):
                raise
            self._place = None  # it is left for the next run
            next_one = "the next merge to the same place moves them"
            way = next_one if is_believed_later(place) else "move them"
            raise OutputError(
                f"{self._target}: not all new files could be moved there: {error}",
                hint=f"the others are in {place.path}; {way}",
            ) from error

    def _enter(self) -> None:
        name = self._target.resolve().name
        recover(self._target.parent, target=name, resume=self._resume)
        self._make_parents()
        self._mode = self.check()
        self._target = self._target.resolve()
        is_new, disk = self._mode is Mode.NEW, self._target.parent.stat().st_dev
        if not is_new and self._target.stat().st_dev != disk:
            raise OutputError(
                f"{self._target}: is a mount point, and cannot be replaced in one step",
                hint="give a directory inside it",
            )
        if self._mode in (Mode.IN_PLACE, Mode.HERE):
            self._held.enter_context(lock_directory(self._target))
        with uninterrupted():
            if self._resume:
                self._adopt()
        here = allocated(self._staging.path) if self._is_adopted else 0
        check_space(self._target.parent, self._needed - here)
        with uninterrupted():
            if not self._is_adopted:
                self._make()
        self.directory.mkdir(exist_ok=self._is_adopted)

    def _make_parents(self) -> None:
        missing = [p for p in (self._target.parent, *self._target.parent.parents) if not p.exists()]
        for parent in reversed(missing):
            parent.mkdir(exist_ok=True)
            self._made_parents.append(parent)

    def _is_within(self, target: Path) -> bool:
        """Return whether the directory that holds the target is part of a checkpoint."""
        return any(is_inside(target.parent, source) for source in self._sources)

    def _adopt(self) -> None:
        """Take over what an earlier process left of this target, if there is something."""
        holder = self._target.parent
        with ExitStack() as held:
            parent = os.open(holder, _DIRECTORY)
            held.callback(os.close, parent)
            owner = Owner(tuple(self._made_parents), self._target.name, keeps=True)
            found = adopt(parent, holder, owner, held)
            if found is None:
                return
            self._held.push(held.pop_all())
        self._place, taken = found
        self._owner_file = taken.file
        self._made_parents = list(taken.owner.made[::-1])
        self._is_adopted = True
        recover(holder, target=self._target.name)  # of the same target only one can be gone on with

    def _make(self) -> None:
        """Make the staging directory, and hold it open."""
        holder = self._target.parent
        parent = os.open(holder, _DIRECTORY)
        self._held.callback(os.close, parent)
        is_within = self._is_within(self._target)
        name = staging_name(parent, os.fstat(parent).st_mtime_ns if is_within else None)
        os.mkdir(name, 0o700, dir_fd=parent)
        try:
            fd = self._held.enter_context(opened(name, within=parent))
        except OSError:
            os.rmdir(name, dir_fd=parent)
            raise
        self._place = StagingDirectory(holder / name, parent, fd)
        if self._resume and is_open_to_others(fd):
            self._resume = False
            self._why_not_resumed = f"the file system of {holder} lets others write everywhere"
        owner = Owner(tuple(self._made_parents), self._target.name, self._resume)
        self._owner_file = self._held.enter_context(claim(self._place, owner))

    def _clean_up(self, *, keep: bool) -> None:
        """Leave nothing, unless a commit is left for the next run, or all of it is to be kept."""
        try:
            self._remove_what_is_left(keep=keep)
        except BaseException:  # a signal, before it could be held back
            self._remove_what_is_left(keep=keep)
            raise

    def _remove_what_is_left(self, *, keep: bool) -> None:
        with uninterrupted():
            place, self._place = self._place, None
            if place is not None and not keep:
                remove_staging(place, self._owner_file)
            self._held.close()
            remove_empty(self._made_parents[::-1])


def say_what_is_left(error: BaseException | None, left: Path) -> None:
    """Add to an error or an interruption where the finished files are, and how to go on."""
    text = Text(
        f"what is finished is kept in {left}; the same merge with ⟦+--resume⟧ goes on with it"
    )
    if isinstance(error, KeyboardInterrupt):
        error.args = (f"{error}\n  kept:     {text}" if error.args else f"{how(error)}: {text}",)
    elif isinstance(error, UnshardError):
        error.hint = error.hint + "; " + text if error.hint else text


def unwritable(target: Path, error: OSError, left: Path | None = None) -> OutputError:
    """Return the error for an output that could not be written; `left` is what was kept of it."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    raised = OutputError(
        f"{target}: cannot be written: {error.strerror or error}",
        hint="free some space and run it again" if full else "",
    )
    if left is not None:
        say_what_is_left(raised, left)
    elif full:
        raised.hint += "; nothing was left behind"
    return raised


def _durable(directory: int, target: Path) -> list[str]:
    """Flush a rename; return a note if that fails: the rename itself is done."""
    try:
        os.fsync(directory)
    except OSError as error:
        return [f"{target} is complete, but may not survive a power failure: {error}"]
    return []
