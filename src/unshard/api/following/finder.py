"""Watch a run's directory for complete checkpoints, for trainers without hooks.

A checkpoint is complete when its trainer has written its marker (`marks`), and its files have kept
their sizes and times since the last look. A directory that is renamed when it is complete (NeMo-RL,
xtuner) has no step until then. If a format has no marker, it detects missing and unfinished files
(`Format.missing`). In an object store, where uploads may come in any order, a checkpoint must also
be readable by a merge: no file, rank or tensor is missing.

A trainer that resumes from an earlier step overwrites the files of later steps. Such a step is
complete when every file was written again, or its marker is newer than the files that were.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from unshard.api.options import MergeOptions
from unshard.api.sources import read_checkpoint
from unshard.errors import (
    CorruptError,
    IncompleteError,
    StoreError,
    UnknownFormatError,
    UnshardError,
    UsageError,
)
from unshard.read.finding.diagnosis import no_such
from unshard.read.finding.discover import all_steps, discover, step_folders, step_numbers
from unshard.read.finding.marks import MARKS, half_saved, unfinished_lmms
from unshard.read.finding.versions import Stamps, fingerprint, stamps_of
from unshard.read.format import Choice, Location
from unshard.stores.objects import listed
from unshard.stores.remote_path import RemotePath, look_again

_JUST_WRITTEN = "just written"

log = logging.getLogger(__name__)


def check_run(run: Path) -> None:
    """Raise a UsageError if a path is a file, or a checkpoint itself; a run need not exist yet."""
    if not run.exists() and (error := no_such(run)).hint:
        raise error
    try:
        is_file = run.is_file()
        checkpoints = [] if is_file else discover(run, Choice(None, "actor", None))
    except (UnshardError, OSError):
        return  # no checkpoint yet
    path, kind = run.resolve(), "file" if is_file else "checkpoint"
    has_steps = any(path in checkpoint.step_dir.parents for checkpoint in checkpoints)
    if is_file or (not step_numbers(path) and not has_steps):
        raise UsageError(f"{run} is a {kind}", expected="the directory of the run's checkpoints")


class _SeenCheckpoint(NamedTuple):
    """A checkpoint that a look has returned.

    Attributes:
        step: its step.
        stamps: sizes and times of its weights.
        files: all files that it had.
        watched: paths of which at least one changes when the weights are written again.
        written: their times, in ns; None if a path was gone.
    """

    step: int | None
    stamps: Stamps
    files: frozenset[str]
    watched: list[Path]
    written: list[int] | None


class CheckpointFinder:
    """Polls a run, and returns every complete checkpoint once.

    A checkpoint that is saved again is returned again; in an object store only if a look has found
    it removed.

    Args:
        run: the directory of the steps.
        choice: role and weights; by default the model's.
        tell: called with messages for the user.

    Attributes:
        reasons: why the last look did not return an existing step, by step.
    """

    def __init__(
        self,
        run: Path,
        choice: Choice | None = None,
        tell: Callable[[str], object] = log.warning,
    ) -> None:
        self._run = run
        self._choice = choice or Choice(weights="model")
        self._tell = tell
        self._before: dict[Path, Mapping[str, object]] = {}  # see `_status_of`
        self._unread: dict[Path, Mapping[str, object]] = {}  # status at a failed read
        self._seen: dict[Path, _SeenCheckpoint] = {}
        self._former: dict[Path, _SeenCheckpoint] = {}  # seen, but changed since
        self._done: set[int] = set()  # steps of seen checkpoints that have not changed
        self._warned: set[str] = set()
        self._logged: dict[int, str] = {}  # the last logged reason, by step
        self.reasons: dict[int, str] = {}

    @property
    def is_growing(self) -> bool:
        """Whether the last look found a step that had changed since the one before."""
        return _JUST_WRITTEN in self.reasons.values()

    def look(self) -> list[Location]:
        """Return the checkpoints that became complete since the last look, lowest step first."""
        look_again(self._run)
        self.reasons = {}
        try:
            steps = self._steps()
        except StoreError as error:
            self._warn(f"the run cannot be listed now: {error}")
            return []
        complete = []
        for location in steps:
            path = location.path
            source = path.with_name(f"{path.name}-fsdp")  # lmms-engine merges it, and removes it
            if path in self._seen or source in self._former:
                continue
            stamps = _stamps_now(location)  # taken before `_is_ready` checks for changes
            if self._is_ready(location) and self._is_new(location, stamps):
                complete.append(location)
        return complete

    def _is_new(self, location: Location, stamps: Stamps) -> bool:
        """Record a complete checkpoint; return whether it differs from the one seen before."""
        path, watched = location.path, [location.path]
        is_remote = isinstance(path, RemotePath)
        written, files = _times(watched), frozenset(self._before[path])
        if stamps and not is_remote:
            newest = max(stamps, key=lambda name: stamps[name][1])
            watched = [*location.roots, location.weights_dir / newest]
            times = _times(location.roots)
            # The time in the stamps, not the current one: the next look must notice a new save.
            written = None if times is None else [*times, stamps[newest][1]]
        former = self._former.pop(path, None)
        is_new = former is None or former.stamps != stamps or not stamps or is_remote
        files = files if former is None or is_new else former.files
        self._seen[path] = _SeenCheckpoint(location.step, stamps, files, watched, written)
        self._done |= set() if location.step is None else {location.step}
        return is_new

    def found(self, location: Location) -> str:
        """Return the `stamp` of a checkpoint at the look that returned it."""
        stamps = self._seen[location.path].stamps
        return fingerprint(stamps) if stamps else self.stamp(location)

    def is_as_found(self, location: Location) -> bool:
        """Return whether the weights are unchanged since a look, and no file is gone.

        Raises:
            StoreError: as for `stamp`.
        """
        path, is_same = location.path, False
        look_again(path)
        seen = self._seen.get(path) or self._former[path]
        with suppress(OSError):
            files = _status_of(path).keys()
            is_same = stamps_of(location) == seen.stamps and seen.files <= files
        if not is_same and path in self._seen and isinstance(path, RemotePath):
            self._former[path] = self._seen.pop(path)  # looks do not notice it in a store
            self._done.discard(seen.step or 0)
        return is_same

    def stamp(self, location: Location) -> str:
        """Return the fingerprint of this version of a checkpoint; "" if it is gone.

        Raises:
            StoreError: the store cannot be reached, or refuses.
        """
        try:
            return fingerprint(stamps_of(location))
        except OSError:
            return ""

    def _warn(self, why: str) -> None:
        """Report a reason without a step, once."""
        if why not in self._warned:
            self._tell(why)
        self._warned.add(why)

    def _pass_over(self, step: int, what: str, why: str) -> None:
        """Report once why a step is not returned, because trainers write a step for minutes.

        A new reason is reported if a later step is complete: then no trainer is writing this step.
        """
        why = why.partition("\n")[0]
        self.reasons[step] = f"{what} yet: {why}"
        is_late = any(later > step for later in self._done)
        if step not in self._logged or (is_late and self._logged[step] != why):
            self._tell(f"step {step} is {what} yet: {why}")
            self._logged[step] = why

    def _steps(self) -> list[Location]:
        """Return the checkpoints of all steps but those that were returned and have not changed.

        Listing hundreds of steps takes long, and in an object store every folder is a request. An
        error in one step does not affect the others.
        """
        for path, seen in list(self._seen.items()):
            if _times(seen.watched) != seen.written:
                self._former[path] = self._seen.pop(path)
                self._done.discard(seen.step or 0)
        is_remote = isinstance(self._run, RemotePath)
        if (is_remote or self._done) and (folders := step_folders(self._run)):
            return self._in_folders(folders)
        try:
            return self._matching(self._choice)
        except (UnshardError, OSError) as error:
            folders = step_folders(self._run)
            if not folders:
                self._warn(f"no checkpoint yet: {error}")
        return self._in_folders(folders)

    def _in_folders(self, folders: Mapping[int, Path]) -> list[Location]:
        locations: list[Location] = []
        for number in [step for step in folders if step not in self._done]:
            try:
                locations += self._matching(self._choice._replace(step=number))
            except (UnshardError, OSError) as error:
                # Folders that a trainer has just made, without a file, are not worth a message.
                if not self._done or any(path.is_file() for path in folders[number].rglob("*")):
                    self._pass_over(number, "not taken", str(error))
        return locations

    def _matching(self, choice: Choice) -> list[Location]:
        """Return the checkpoints of steps, without critics unless a role was chosen."""
        if choice.role is not None:
            return all_steps(self._run, choice)
        try:
            locations = all_steps(self._run, choice)
        except UsageError:
            locations = all_steps(self._run, choice._replace(role="actor"))
        return [location for location in locations if location.role != "critic"]

    def _is_ready(self, location: Location) -> bool:
        """Return whether nothing has changed since the last look, and nothing is missing."""
        path = location.path
        before = self._before.get(path)
        try:
            now = self._before[path] = _status_of(path)
            if before != now or now == self._unread.get(path):
                if location.step is not None:
                    is_new = before != now
                    self.reasons[location.step] = _JUST_WRITTEN if is_new else "not complete yet"
                return False
            why = why_incomplete(location)
            former = self._former.get(path)
            why = why or half_saved(location, former.stamps if former else {})
            if why is None and isinstance(path, RemotePath):
                why = _why_unread(location)
                self._unread |= {} if why is None else {path: now}
        except OSError:  # the trainer has just removed it
            return False
        except StoreError as error:
            why = str(error)
        if why is not None and location.step is not None:
            self._pass_over(location.step, "not complete", why)
        return why is None


def _stamps_now(location: Location) -> Stamps:
    """Return the stamps of a checkpoint; {} if it is gone, or its store fails."""
    with suppress(OSError, StoreError):
        return stamps_of(location)
    return {}


def _times(places: Iterable[Path]) -> list[int] | None:
    """Return the time of the last write to each path, in ns; None if a path is gone."""
    with suppress(OSError):
        return [path.stat().st_mtime_ns for path in places]
    return None


def _status_of(place: Path) -> Mapping[str, object]:
    """Return size and time, or size and ETag, of every file of a checkpoint."""
    if isinstance(place, RemotePath) and not place.is_file():
        return listed(place.bucket, place.key)
    inside = [place] if place.is_file() else place.rglob("*")
    files = {path: path.stat() for path in inside if path.is_file()}
    return {str(path): (stat.st_size, stat.st_mtime_ns) for path, stat in files.items()}


def _why_unread(location: Location) -> str | None:
    """Return why a merge could not read a checkpoint in a store yet.

    None also for errors that waiting does not solve, which the server reports.
    """
    options = MergeOptions(role=location.role, weights=location.weights, config="none")
    try:
        read_checkpoint(location.path, options, pass_over=False)
    except (IncompleteError, UnknownFormatError, CorruptError) as error:
        return str(error)
    except StoreError:
        raise
    except UnshardError as error:
        log.info("%s: taken, although it cannot be read: %s", location.path, error)
    return None


def why_incomplete(location: Location) -> str | None:
    """Return why a checkpoint is incomplete; None if its writer has finished it.

    Raises:
        OSError: it has vanished.
    """
    for why_of in (*MARKS, location.format.missing, unfinished_lmms):
        if (why := why_of(location)) is not None:
            return why or None
    return None
