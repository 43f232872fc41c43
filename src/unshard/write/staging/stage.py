"""Staging: an output is written next to its target, and replaces it in one commit or vanishes.

A staging directory is `_unshard-partial-<random>/`, next to the target, and only its owner may
enter it. It contains `owner.json`, `output/`, the record of finished files, and at the end perhaps
a journal. If its process is killed, the next run finishes, continues or removes it, if it is
provably the same user's (see `owners`). If the target is inside a checkpoint, the name also
contains the parent's modification time, to restore it.
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
    MergeEngine,
    Overflows,
    WorkDigests,
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
    is_open_to_others,
    is_trusted_later,
    seal,
    staging_name,
)
from unshard.write.staging.recovery import adopt, recover, remove_empty, remove_staging
from unshard.write.staging.targets import allocated, check_space, choose_mode, is_inside
from unshard.write.staging.turns import lock_directory, turn

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Staging:
    """A directory to fill, which `commit` turns into the target; without it, nothing remains.

    Args:
        target: the path of the output; parents are created (and removed again on failure).
        needed_bytes: the size of the output.
        sources: the directories of the checkpoint; if the output goes into one of them, that one
            keeps its modification time (trainers rotate checkpoints by it).
        overwrite: whether files that unshard wrote may be replaced; "all": other files too.
        names: the paths of the output's files, so that conflicts are refused at once.
        resume: whether to continue an earlier process's output for this target, and to keep
            finished files after a signal or an error, unless the output itself is wrong or a source
            has changed.

    Raises:
        OutputError: on entering: the target exists, is not writable or has no space, or its file
            system has no locks.
    """

    def __init__(  # noqa: PLR0913 (all facts about a target)
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
        self._resume = resume and bool(seal())  # without a key, finished files are not trusted
        self._why_not_resumed = ""
        if resume and not self._resume:
            self._why_not_resumed = (
                "there is no private directory for this user's key; set XDG_STATE_HOME to a "
                "directory of yours"
            )
        self._is_adopted = False
        self._mode = Mode.NEW
        self._made_parents: list[Path] = []
        self._place: StagingDirectory | None = None
        self._owner_file: FileIO | None = None
        self._held = ExitStack()
        self._quiet = ExitStack()  # delays signals from the commit to the end of the stage
        self._is_complete = False

    @property
    def directory(self) -> Path:
        """The directory of the output's files."""
        return self._staging.path / OUTPUT

    @property
    def scratch(self) -> Path:
        """A directory for temporary files."""
        scratch = self._staging.path / "scratch"
        scratch.mkdir(exist_ok=True)
        return scratch

    def write(
        self,
        plan: Plan,
        engine: MergeEngine,
        work: WorkDigests,
        *,
        seal: Callable[[Path, int], None] = lambda _path, _number: None,
    ) -> Written:
        """Write the weight files that are not finished yet; see `OutputStage.write`.

        `seal` is called with the path and number of each file that has all its bytes.
        """
        ledger, files = open_ledger(self._staging, work), plan.layout.files
        if self._why_not_resumed:
            ledger.notes.append(Text(f"⟦--resume⟧ has no effect: {self._why_not_resumed}"))
        left = unfinished(plan, ledger.known, ledger.notes, engine.listener)
        data = sum(files[number].data_bytes for number in left.numbers)
        engine.listener(Progress("writing", data))
        recorder = ThreadPoolExecutor(1)  # flushes files while others are written
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
            with uninterrupted():  # no file may be recorded while the stage is removed
                recorder.shutdown(cancel_futures=True)
        return Written(earlier_overflows(plan, ledger.known) + overflows)

    def add(self, files: Mapping[str, bytes | Path]) -> None:
        """Add small files; see `OutputStage.add`."""
        write_files(files, self.directory)

    def readable(self) -> Path:
        """Return the directory of the unfinished output."""
        return self.directory

    @property
    def _staging(self) -> StagingDirectory:
        if self._place is None or (self._owner_file is not None and self._owner_file.closed):
            raise RuntimeError("the stage has not been entered by this process")
        return self._place

    def check(self) -> Mode:
        """Return the mode of the commit, by `choose_mode`; change nothing."""
        return choose_mode(
            self._target, self._sources, overwrite=self._overwrite, names=self._names
        )

    @contextmanager
    def turn(self, is_made: Callable[[], bool], listener: Listener) -> Iterator[None]:
        """Wait for other processes that make the output; see `OutputStage.turn`."""
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
            return self  # noqa: TRY300 (inside, so that a signal just before it is caught)
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
                note_resumable(error, left)
            if isinstance(error, OSError):
                raise unwritable(self._target, error, left) from error
        except KeyboardInterrupt as late:
            if self._is_complete:
                late.args = (f"interrupted, but only after {self._target} was complete",)
            raise

    def commit(self, record: bytes | None = None, *, replaced: Sequence[str] = ()) -> list[str]:
        """Add the record, make everything durable, and replace the target.

        Signals are delayed until the stage is left, which then reports that they came too late.
        Companions in `replaced` replace those in a checkpoint's own directory. Return notes about
        concurrent changes in the target, and about failed flushes.

        Raises:
            OutputError: another process made the target, or not all files could be moved.
        """
        if record is not None:
            write_files({RECORD_NAME: record}, self.directory)
        with ExitStack() as quiet:
            quiet.enter_context(uninterrupted())
            configs = [self.directory / "config.json", self.directory / ADAPTER_CONFIG_NAME]
            has_config = any(path.exists() for path in configs)
            is_alone = self._mode is not Mode.IN_PLACE and not has_config
            notes = self._take_place(replaced)
            if is_alone and (self._target / "config.json").exists():
                notes.append(
                    f"{self._target} keeps its config.json, which this merge did not write: the "
                    "new weights would be loaded with it"
                )
            self._is_complete = True
            self._made_parents.clear()
            self._clean_up(keep=False)
            if self._resume and not self._is_adopted:  # older staging directories are obsolete now
                recover(self._target.parent, target=self._target.name)
            self._quiet = quiet.pop_all()
        return notes

    def _take_place(self, replaced: Collection[str]) -> list[str]:
        staging = self._staging
        if self._mode is Mode.NEW:
            try:
                take_new(staging, self._target)
                return _durable(staging.parent, self._target)
            except OutputError:
                if not self._overwrite:
                    raise
                self._mode = self.check()  # the target has appeared meanwhile: replace it
        journal = begin(
            staging,
            self._target,
            self._mode,
            replaced=replaced,
            lose_strangers=self._overwrite == "all",
        )
        write_journal(staging, journal)
        with suppress(OSError):  # retried below, because every step is idempotent
            return finish(staging, journal) + _durable(staging.parent, self._target)
        try:
            return finish(staging, journal) + _durable(staging.parent, self._target)
        except OSError as error:
            if not is_begun(staging, journal):
                raise
            self._place = None  # left for the next run
            is_automatic = is_trusted_later(staging)
            way = "the next merge to the same target moves them" if is_automatic else "move them"
            raise OutputError(
                f"{self._target}: not all new files could be moved there: {error}",
                hint=f"the others are in {staging.path}; {way}",
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
                f"{self._target}: is a mount point, and cannot be replaced atomically",
                hint="give a directory inside it",
            )
        if self._mode in (Mode.IN_PLACE, Mode.HERE):
            self._held.enter_context(lock_directory(self._target))
        with uninterrupted():
            if self._resume:
                self._adopt()
        present = allocated(self._staging.path) if self._is_adopted else 0
        check_space(self._target.parent, self._needed - present)
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
        """Return whether the parent of the target is part of a checkpoint."""
        return any(is_inside(target.parent, source) for source in self._sources)

    def _adopt(self) -> None:
        """Take over an earlier process's staging directory for this target, if there is one."""
        directory = self._target.parent
        with ExitStack() as held:
            parent = os.open(directory, _DIRECTORY)
            held.callback(os.close, parent)
            owner = Owner(tuple(self._made_parents), self._target.name, keeps=True)
            adopted = adopt(parent, directory, owner, held)
            if adopted is None:
                return
            self._held.push(held.pop_all())
        self._place, locked = adopted
        self._owner_file = locked.file
        self._made_parents = list(locked.owner.made[::-1])
        self._is_adopted = True
        recover(directory, target=self._target.name)  # removes others for the same target

    def _make(self) -> None:
        """Create the staging directory, and hold it open."""
        directory = self._target.parent
        parent = os.open(directory, _DIRECTORY)
        self._held.callback(os.close, parent)
        is_within = self._is_within(self._target)
        name = staging_name(parent, os.fstat(parent).st_mtime_ns if is_within else None)
        os.mkdir(name, 0o700, dir_fd=parent)
        try:
            fd = self._held.enter_context(opened(name, within=parent))
        except OSError:
            os.rmdir(name, dir_fd=parent)
            raise
        self._place = StagingDirectory(directory / name, parent, fd)
        if self._resume and is_open_to_others(fd):
            self._resume = False
            self._why_not_resumed = f"the file system of {directory} lets others write everywhere"
        owner = Owner(tuple(self._made_parents), self._target.name, self._resume)
        self._owner_file = self._held.enter_context(claim(self._place, owner))

    def _clean_up(self, *, keep: bool) -> None:
        """Remove everything, unless a commit is left for the next run, or `keep`."""
        try:
            self._remove(keep=keep)
        except BaseException:  # a signal that came before `uninterrupted`
            self._remove(keep=keep)
            raise

    def _remove(self, *, keep: bool) -> None:
        with uninterrupted():
            staging, self._place = self._place, None
            if staging is not None and not keep:
                remove_staging(staging, self._owner_file)
            self._held.close()
            remove_empty(self._made_parents[::-1])


def note_resumable(error: BaseException | None, left: Path) -> None:
    """Add to an error or an interruption where the finished files are, and how to reuse them."""
    text = Text(f"finished files are kept in {left}; rerun with ⟦+--resume⟧ to reuse them")
    if isinstance(error, KeyboardInterrupt):
        error.args = (f"{error}\n  kept:     {text}" if error.args else f"{how(error)}: {text}",)
    elif isinstance(error, UnshardError):
        error.hint = error.hint + "; " + text if error.hint else text


def unwritable(target: Path, error: OSError, left: Path | None = None) -> OutputError:
    """Return the error of a failed output, whose finished files are in `left`."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    failure = OutputError(
        f"{target}: cannot be written: {error.strerror or error}",
        hint="free some space and run it again" if full else "",
    )
    if left is not None:
        note_resumable(failure, left)
    elif full:
        failure.hint += "; no partial output left"
    return failure


def _durable(directory: int, target: Path) -> list[str]:
    """Flush a completed rename; return a note if the flush fails."""
    try:
        os.fsync(directory)
    except OSError as error:
        return [f"{target} is complete, but may not survive a power failure: {error}"]
    return []
