"""Where a request belongs: its checkpoint, its step, and the training run that it is of."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from unshard.errors import StoreError, UnshardError, UsageError
from unshard.evaluate.jobs import Request, TrainingRun
from unshard.evaluate.run_folder import RunFolder, RunIdentity
from unshard.evaluate.server.roots import is_inside, not_readable
from unshard.evaluate.server.store.records import RunRecords
from unshard.evaluate.server.store.runs import new_run_id
from unshard.read.finding.discover import find
from unshard.read.format import Choice, Location
from unshard.read.step_names import step_of, step_of_parents
from unshard.stores.remote_path import RemotePath, path_of


@dataclass(frozen=True, slots=True)
class Placed:
    """A request, with what its checkpoint's path says.

    Attributes:
        request: its checkpoint is the directory of the step, or the model.
        folder: the directory around that.
        run: the directory of the training run; None: the path states none.
        states_step: whether the path states the step that the request has.
    """

    request: Request
    folder: Path
    run: Path | None
    states_step: bool


def place(request: Request) -> Placed:
    """Fill in what the path of a request's checkpoint says: the step, and the run.

    The directory of a run means its newest step, or the step of the request. A model without a
    step in its name is of the run that the request names, and if it names none, a run by itself.

    Raises:
        UsageError: the run does not have that step, or the server may not read it.
        StoreError: the store cannot be reached, or does not allow it.
    """
    path = path_of(request.checkpoint)
    try:
        found = next(find(path, Choice(weights=request.weights)))
    except StoreError:
        raise
    except UnshardError as error:
        if isinstance(error.__cause__, PermissionError):
            raise not_readable(error.__cause__) from error
        # Gone, or without these weights: its name states the step all the same.
        at, step = step_of_parents(path, sharded=False) or (path, None)
    else:
        if path in found.step_dir.parents:
            is_run = found.step is not None and step_of(path.name) is None
            if is_run and request.step not in {None, found.step}:
                found = _find_step(path, request)
            path = found.step_dir
        is_file = found.step is not None and found.place == found.file  # Lightning's, in its run
        at, step = found.place if is_file else found.step_dir, found.step
    folder = at.parent
    run = RunFolder.around(at).path if step is not None else None if request.run else at
    wanted = step if request.step is None else request.step
    placed = replace(request, checkpoint=str(path), step=wanted)
    return Placed(placed, folder, run, states_step=step is not None and step == wanted)


class RunFinder:
    """Finds out which training run a request is of; for any number of threads.

    Args:
        runs: those that are known.
        roots: the directories that checkpoints may be in.
    """

    def __init__(self, runs: RunRecords, roots: Sequence[Path]) -> None:
        self._runs = runs
        self._roots = roots
        self._lock = threading.Lock()

    def add_run(self, placed: Placed) -> Request:
        """Return the request of a checkpoint with its run, which is recorded.

        Raises:
            UsageError: several runs have the name that a request gives, which gives no directory.
        """
        request, directory = placed.request, placed.run
        if request.directory and not (placed.states_step and directory):
            directory = path_of(request.directory).resolve()  # files are read below a root only
        with self._lock:
            if directory is None:
                return replace(request, run_id=self._find_id(request.run))
            is_model = str(directory) == request.checkpoint
            run = self.at(directory, request.run, is_model=is_model)
        return replace(request, run=request.run or run.name, run_id=run.id)

    def _find_id(self, name: str) -> str:
        """Return the id of the run of a name; empty if there is none."""
        known = self._runs.named(name)
        found = known if len(known) == 1 else [one for one in known if not one.directory]
        if known and not found:
            raise UsageError(
                f"run {name!r}: several training runs have this name",
                expected="the directory of the run",
                found=", ".join(one.directory for one in known),
            )
        return found[0].id if found else ""

    def at(self, directory: Path, name: str = "", *, is_model: bool = False) -> TrainingRun:
        """Return the run in a directory, which gets an id if it has none and can be written to.

        A run that was moved or renamed is the same run; one that was copied is another. Where the
        directory cannot hold the id, its path is what the run is known by.

        Args:
            directory: of the run.
            name: what the client calls the run, which counts if it is new; empty: it is called like
                its directory.
            is_model: whether it is the directory of a model, in which nothing is written.
        """
        folder, is_open = RunFolder(directory), self._is_open(directory)
        said = folder.read_identity() if is_open else None
        known = self._runs.at(str(directory))
        is_own = (
            said is not None and not said.is_copy and not self._is_elsewhere(said.id, directory)
        )
        if said is not None and is_own:
            run_id = said.id
            if said.joins and self._runs.get(said.joins) is not None:
                self._runs.join(run_id, said.joins)
        elif known is not None and self._is_same(known, said, is_open=is_open):
            run_id = known.id
        else:
            run_id = new_run_id()
        is_written = is_own or (not is_model and _write(folder, run_id, said)) if is_open else None
        before = self._runs.get(run_id)
        own = name or folder.name
        if before and (name or before.name != RunFolder(path_of(before.directory)).name):
            own = before.name  # the first that it got; the others mean it, too
        run = self._runs.record(run_id, own, str(directory), is_written=is_written)
        if name not in {"", own}:
            self._runs.call(run_id, name)
        return run

    def _is_same(self, known: TrainingRun, said: RunIdentity | None, *, is_open: bool) -> bool:
        """Return whether a directory that has no id of its own is the run that is known there.

        It is not if it had that run's id, or is a copy of it: another directory came in its place.
        """
        if said is None:
            return not (is_open and self._runs.is_written(known.id))
        return said.id != known.id

    def _is_elsewhere(self, run_id: str, directory: Path) -> bool:
        """Return whether another directory has a run's id, too, and was seen with it before."""
        known = self._runs.get(run_id)
        if known is None or known.directory in {"", str(directory)}:
            return False
        other = path_of(known.directory)
        said = RunFolder(other).read_identity() if self._is_open(other) else None
        return said is not None and said.id == run_id and not said.is_copy

    def is_known(self, directory: Path) -> bool:
        """Return whether a directory is, or says that it is, a run that was evaluated."""
        said = RunFolder(directory).read_identity() if self._is_open(directory) else None
        return said is not None or self._runs.at(str(directory)) is not None

    def _is_open(self, directory: Path) -> bool:
        """Return whether files of ours may be in a directory."""
        is_local = not isinstance(directory, RemotePath) and directory.is_dir()
        return is_local and is_inside(directory, self._roots)


def _write(folder: RunFolder, run_id: str, copied: RunIdentity | None) -> bool:
    """Give a run's directory its id; return whether that was possible."""
    try:
        folder.write_identity(run_id, copied=copied)
    except OSError:
        return False  # it is known by its path
    return True


def _find_step(run: Path, request: Request) -> Location:
    """Return the checkpoint of a request's step in a run's directory.

    Raises:
        UsageError: the run does not have it: its newest must not pass for it.
    """
    try:
        return next(find(run, Choice(request.step, weights=request.weights)))
    except StoreError:
        raise
    except UnshardError as error:
        raise UsageError(
            f"{run}: the directory of this run does not have step {request.step}",
            found=error.found or error.subject,
            hint="give the directory of the step itself, or no step for the newest",
        ) from error
