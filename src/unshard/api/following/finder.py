"""Watch a run's directory for checkpoints that are complete, for trainers without hooks.

A checkpoint is complete when its trainer has left its mark (`marks`), and its files have kept their
sizes and times since the last look. A directory that is renamed when it is complete (NeMo-RL,
xtuner) has no step until then. Without a mark its format knows whether a file is missing or not
finished (`Format.missing`). In an object store, where uploads may come in any order, a checkpoint
must also be whole as a merge reads it: no file, rank or tensor is missing.

A trainer that resumes from an earlier step saves later ones again, over their files. Such a step is
complete when every file was written again, or a mark is newer than those that were.
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
        found = [] if is_file else discover(run, Choice(None, "actor", None))
    except (UnshardError, OSError):
        return  # no checkpoint yet
    place, what = run.resolve(), "file" if is_file else "checkpoint"
    is_inside = any(place in one.step_dir.parents for one in found)
    if is_file or (not step_numbers(place) and not is_inside):
        raise UsageError(f"{run} is a {what}", expected="the directory of the run's checkpoints")


class _Seen(NamedTuple):
    """A checkpoint that was returned; if its weights are written again, some `place` is.

    `files` are those that the whole checkpoint had then.
    """

    step: int | None
    stamps: Stamps
    files: frozenset[str]
    places: list[Path]
    written: list[int] | None


class CheckpointFinder:
    """Looks at a run again and again, and returns every complete checkpoint once.

    One that is saved again is returned again; in an object store only if a look found it removed.

    Args:
        run: the directory of the steps.
        choice: which weights are meant, and whose; by default the model's.
        tell: is called with what a user should know.

    Attributes:
        reasons: why the last look did not return a step that is there, by step.
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
        self._unread: dict[Path, Mapping[str, object]] = {}  # of those that were read in vain
        self._seen: dict[Path, _Seen] = {}
        self._former: dict[Path, _Seen] = {}  # of those that have changed since
        self._done: set[int] = set()  # the steps of those that have not
        self._warned: set[str] = set()
        self._told: dict[int, str] = {}  # the reason that was logged last, by step
        self.reasons: dict[int, str] = {}

    @property
    def is_growing(self) -> bool:
        """Whether the last look found a step that had changed since the one before."""
        return _JUST_WRITTEN in self.reasons.values()

    def look(self) -> list[Location]:
        """Return the checkpoints that are complete since the last look, the lowest step first."""
        look_again(self._run)
        self.reasons = {}
        try:
            steps = self._steps()
        except StoreError as error:
            self._warn(f"the run cannot be listed now: {error}")
            return []
        found = []
        for location in steps:
            path = location.path
            merged_from = path.with_name(f"{path.name}-fsdp")  # by lmms-engine; removed since
            if path in self._seen or merged_from in self._former:
                continue
            stamps = _stamps_now(location)  # of what `_is_ready` then finds unchanged
            if self._is_ready(location) and self._is_new(location, stamps):
                found.append(location)
        return found

    def _is_new(self, location: Location, stamps: Stamps) -> bool:
        """Take note of a complete checkpoint; return whether it is not the one known before."""
        path, places = location.path, [location.path]
        is_remote = isinstance(path, RemotePath)
        written, files = _times(places), frozenset(self._before[path])
        if stamps and not is_remote:  # they may be newer by now, which the next look is to notice
            newest = max(stamps, key=lambda name: stamps[name][1])
            places = [*location.roots, location.weights_dir / newest]
            times = _times(location.roots)
            written = None if times is None else [*times, stamps[newest][1]]
        former = self._former.pop(path, None)
        is_new = former is None or former.stamps != stamps or not stamps or is_remote
        files = files if former is None or is_new else former.files
        self._seen[path] = _Seen(location.step, stamps, files, places, written)
        self._done |= set() if location.step is None else {location.step}
        return is_new

    def found(self, location: Location) -> str:
        """Return the `stamp` of a checkpoint when a look found it complete."""
        stamps = self._seen[location.path].stamps
        return fingerprint(stamps) if stamps else self.stamp(location)

    def is_as_found(self, location: Location) -> bool:
        """Return whether the weights are as a look returned them, and no file is gone.

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
            self._former[path] = self._seen.pop(path)  # no look would notice it
            self._done.discard(seen.step or 0)
        return is_same

    def stamp(self, location: Location) -> str:
        """Return what distinguishes this version of a checkpoint from others; "" if it is gone.

        Raises:
            StoreError: the store cannot be reached, or does not allow it.
        """
        try:
            return fingerprint(stamps_of(location))
        except OSError:
            return ""

    def _warn(self, why: str) -> None:
        """Log why a checkpoint is not found, once."""
        if why not in self._warned:
            self._tell(why)
        self._warned.add(why)

    def _pass_over(self, step: int, what: str, why: str) -> None:
        """Log why a step is not returned: one line, because trainers write a step for minutes.

        Another reason is logged if a later step is complete: then none is writing this one.
        """
        why = why.partition("\n")[0]
        self.reasons[step] = f"{what} yet: {why}"
        is_late = any(later > step for later in self._done)
        if step not in self._told or (is_late and self._told[step] != why):
            self._tell(f"step {step} is {what} yet: {why}")
            self._told[step] = why

    def _steps(self) -> list[Location]:
        """Return the checkpoints of all steps; a broken step does not hold up the others.

        Those that were returned and have not changed are not listed again: with hundreds of steps
        that takes long, and in an object store every folder is a request.
        """
        for path, seen in list(self._seen.items()):
            if _times(seen.places) != seen.written:
                self._former[path] = self._seen.pop(path)
                self._done.discard(seen.step or 0)
        is_remote = isinstance(self._run, RemotePath)
        if (is_remote or self._done) and (folders := step_folders(self._run)):
            return self._of_steps(folders)
        try:
            return self._found(self._choice)
        except (UnshardError, OSError) as error:
            folders = step_folders(self._run)
            if not folders:
                self._warn(f"no checkpoint yet: {error}")
        return self._of_steps(folders)

    def _of_steps(self, folders: Mapping[int, Path]) -> list[Location]:
        found: list[Location] = []
        for number in [one for one in folders if one not in self._done]:
            try:
                found += self._found(self._choice._replace(step=number))
            except (UnshardError, OSError) as error:
                # A trainer that has just made its folders is nothing to tell of.
                if not self._done or any(one.is_file() for one in folders[number].rglob("*")):
                    self._pass_over(number, "not taken", str(error))
        return found

    def _found(self, choice: Choice) -> list[Location]:
        """Return the checkpoints of steps; of an actor and a critic, the actor."""
        if choice.role is not None:
            return all_steps(self._run, choice)
        try:
            found = all_steps(self._run, choice)
        except UsageError:
            found = all_steps(self._run, choice._replace(role="actor"))
        return [one for one in found if one.role != "critic"]

    def _is_ready(self, location: Location) -> bool:
        """Return whether nothing has changed since the last look, and nothing is missing."""
        place = location.path
        before = self._before.get(place)
        try:
            now = self._before[place] = _status_of(place)
            if before != now or now == self._unread.get(place):
                if location.step is not None:
                    is_new = before != now
                    self.reasons[location.step] = _JUST_WRITTEN if is_new else "not complete yet"
                return False
            why = why_incomplete(location)
            former = self._former.get(place)
            why = why or half_saved(location, former.stamps if former else {})
            if why is None and isinstance(place, RemotePath):
                why = _why_unread(location)
                self._unread |= {} if why is None else {place: now}
        except OSError:  # the trainer has just removed it
            return False
        except StoreError as error:
            why = str(error)
        if why is not None and location.step is not None:
            self._pass_over(location.step, "not complete", why)
        return why is None


def _stamps_now(location: Location) -> Stamps:
    """Return the stamps of a checkpoint; none of one that is gone, or in a store that fails."""
    with suppress(OSError, StoreError):
        return stamps_of(location)
    return {}


def _times(places: Iterable[Path]) -> list[int] | None:
    """Return when each path was written, in ns; None if one is gone."""
    with suppress(OSError):
        return [path.stat().st_mtime_ns for path in places]
    return None


def _status_of(place: Path) -> Mapping[str, object]:
    """Return what changes with any file of a checkpoint: size and time, or size and ETag."""
    if isinstance(place, RemotePath) and not place.is_file():
        return listed(place.bucket, place.key)
    inside = [place] if place.is_file() else place.rglob("*")
    files = {path: path.stat() for path in inside if path.is_file()}
    return {str(path): (one.st_size, one.st_mtime_ns) for path, one in files.items()}


def _why_unread(location: Location) -> str | None:
    """Return what a checkpoint in a store lacks; None also if it fails for another reason.

    That is for the server to report: waiting would not help.
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
