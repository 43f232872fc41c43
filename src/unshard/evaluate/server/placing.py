"""Finds a request's checkpoint, its step, and its training run."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

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


class Placed(NamedTuple):
    """A request, completed from its checkpoint's path.

    Attributes:
        request: its checkpoint is the directory of the step, or the model.
        folder: the directory around the checkpoint.
        run: the directory of the training run; None if the path has none.
        states_step: whether the path has the step of the request.
    """

    request: Request
    folder: Path
    run: Path | None
    states_step: bool


def place(request: Request) -> Placed:
    """Fill in the step and the run from the path of a request's checkpoint.

    The directory of a run stands for its newest step, or the step of the request. A model without a
    step in its name belongs to the run of the request, or without one is a run by itself.

    Raises:
        UsageError: the run does not have that step, or the server may not read it.
        StoreError: the store cannot be reached, or does not allow it.
    """
    path = path_of(request.checkpoint)
    try:
        location = next(find(path, Choice(weights=request.weights)))
    except StoreError:
        raise
    except UnshardError as error:
        if isinstance(error.__cause__, PermissionError):
            raise not_readable(error.__cause__) from error
        # It is gone, or has no such weights: its step is in its name all the same.
        at, step = step_of_parents(path, sharded=False) or (path, None)
    else:
        if path in location.step_dir.parents:
            is_run = location.step is not None and step_of(path.name) is None
            if is_run and request.step not in {None, location.step}:
                location = _find_step(path, request)
            path = location.step_dir
        step = location.step
        is_file = step is not None and location.place == location.file  # Lightning's, in its run
        at = location.place if is_file else location.step_dir
    run = RunFolder.around(at).path if step is not None else None if request.run else at
    expected = step if request.step is None else request.step
    placed = replace(request, checkpoint=str(path), step=expected)
    return Placed(placed, at.parent, run, states_step=step is not None and step == expected)


@dataclass(eq=False)
class RunFinder:
    """Finds the training run of a request; thread-safe."""

    runs: RunRecords
    roots: Sequence[Path]
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add_run(self, placed: Placed) -> Request:
        """Record the run of a request; return the request with it.

        Raises:
            UsageError: the request has no directory, and several runs have its name.
        """
        request, directory = placed.request, placed.run
        if request.directory and not (placed.states_step and directory):
            directory = path_of(request.directory).resolve()  # read only if it is below a root
        with self._lock:
            if directory is None:
                return replace(request, run_id=self._find_id(request.run))
            is_model = str(directory) == request.checkpoint
            run = self.at(directory, request.run, is_model=is_model)
        return replace(request, run=request.run or run.name, run_id=run.id)

    def _find_id(self, name: str) -> str:
        """Return the id of the run of a name; "" if there is none."""
        named = self.runs.named(name)
        candidates = named if len(named) == 1 else [run for run in named if not run.directory]
        if named and not candidates:
            raise UsageError(
                f"run {name!r}: several training runs have this name",
                expected="the directory of the run",
                found=", ".join(run.directory for run in named),
            )
        return candidates[0].id if candidates else ""

    def at(self, directory: Path, name: str = "", *, is_model: bool = False) -> TrainingRun:
        """Return the run in a directory, which gets an id if it has none and can be written to.

        A run that was moved or renamed is the same run; a copy is another. If the directory cannot
        hold the id, the run is identified by its path.

        Args:
            directory: the run's.
            name: the client's name for the run, which a new run gets; "": that of its directory.
            is_model: whether it is the directory of a model, in which nothing is written.
        """
        folder, is_open = RunFolder(directory), self._is_open(directory)
        identity = folder.read_identity() if is_open else None
        recorded, is_own, is_written = self.runs.at(str(directory)), False, None
        if identity is not None:
            is_own = not identity.is_copy and not self._is_elsewhere(identity.id, directory)
        if identity is not None and is_own:
            run_id = identity.id
            if identity.joins and self.runs.get(identity.joins) is not None:
                self.runs.join(run_id, identity.joins)
        elif recorded is not None and self._is_same(recorded, identity, is_open=is_open):
            run_id = recorded.id
        else:
            run_id = new_run_id()
        if is_open:
            is_written = is_own or (not is_model and _write(folder, run_id, identity))
        before = self.runs.get(run_id)
        own = name or folder.name
        if before and (name or before.name != RunFolder(path_of(before.directory)).name):
            own = before.name  # a run keeps its first name, and is found by the others
        run = self.runs.record(run_id, own, str(directory), is_written=is_written)
        if name not in {"", own}:
            self.runs.call(run_id, name)
        return run

    def _is_same(
        self, recorded: TrainingRun, identity: RunIdentity | None, *, is_open: bool
    ) -> bool:
        """Return whether a directory without an own id is the run that is recorded there.

        It is not if it had that run's id, or is a copy of it: another directory has replaced it.
        """
        if identity is None:
            return not (is_open and self.runs.is_written(recorded.id))
        return identity.id != recorded.id

    def _is_elsewhere(self, run_id: str, directory: Path) -> bool:
        """Return whether another directory, which was recorded for a run, still has its id."""
        recorded = self.runs.get(run_id)
        if recorded is None or recorded.directory in {"", str(directory)}:
            return False
        other = path_of(recorded.directory)
        identity = RunFolder(other).read_identity() if self._is_open(other) else None
        return identity is not None and identity.id == run_id and not identity.is_copy

    def is_known(self, directory: Path) -> bool:
        """Return whether a directory has a run's id, or is recorded as a run."""
        has_id = self._is_open(directory) and RunFolder(directory).read_identity() is not None
        return has_id or self.runs.at(str(directory)) is not None

    def _is_open(self, directory: Path) -> bool:
        """Return whether the server may read and write its files in a directory."""
        is_local = not isinstance(directory, RemotePath) and directory.is_dir()
        return is_local and is_inside(directory, self.roots)


def _write(folder: RunFolder, run_id: str, copied: RunIdentity | None) -> bool:
    try:
        folder.write_identity(run_id, copied=copied)
    except OSError:
        return False  # the run is identified by its path
    return True


def _find_step(run: Path, request: Request) -> Location:
    """Return the checkpoint of a request's step in a run, or raise a UsageError."""
    try:
        return next(find(run, Choice(request.step, weights=request.weights)))
    except StoreError:
        raise
    except UnshardError as error:
        raise UsageError(
            f"{run}: the directory of this run does not have step {request.step}",
            found=error.found or error.subject,
            hint="pass the directory of the step itself, or no step for the newest",
        ) from error
