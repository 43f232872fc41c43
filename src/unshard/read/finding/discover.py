"""Find the checkpoint that a path means, whatever level of its tree the path points to.

A *step directory* (`global_step_10`, `checkpoint-10`) has one checkpoint, of one set of weights or
several: those of roles (verl, SkyRL), or of an average (lmms-engine). A *run directory* has several
step directories. What is closer to the path wins over what is deeper, and sharded weights win over
whole ones at the same place. Folders of known names come first; then all others are searched. Only
names and places count; no file is opened.

Sources: verl's FSDPCheckpointManager, SkyRL's fsdp_strategy, lmms-engine's fsdp2_trainer,
accelerate's fsdp_utils, and the checkpointers of torchtitan, torchtune, Composer, Lightning,
OLMo-core and NeMo AutoModel.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

from unshard.errors import UnknownFormatError, UsageError
from unshard.read.finding.choosing import DEFAULT_ROLES, choose
from unshard.read.finding.markers import is_marker
from unshard.read.finding.near_misses import nothing_found
from unshard.read.finding.places import (
    alone,
    instep_of,
    is_checkpoint_file,
    location_of,
    nearby,
    within,
)
from unshard.read.finding.runs import NESTED_RUNS, in_run, numbered_files
from unshard.read.finding.search import Below, search, steps_in
from unshard.read.format import Choice, Location, blaming, role_in
from unshard.read.step_names import is_state, step_of_parents
from unshard.stores.remote_path import why_unlisted

_RUN_FOLDERS = ("checkpoint", "checkpoints", "outputs")
_UPWARD = 3
_TRIED = 3  # the highest steps of a run, of which one holds weights


def discover(path: Path, choice: Choice) -> list[Location]:
    """Return the checkpoints that `path` may mean, the highest step first.

    Raises:
        CheckpointError: see `find`; for any of the steps.
    """
    return list(find(path, choice))


def find(path: Path, choice: Choice) -> Iterator[Location]:
    """Yield the checkpoints that `path` may mean, the highest step first; there is at least one.

    No step is looked into before it is needed, but as far as the choice of the first depends on it:
    of a long run one step is read, and what is wrong with an older one does not matter.

    Raises:
        UnknownFormatError: nothing there is a checkpoint; says what was looked for and what is
            there.
        IncompleteError: the directory of the weights asked for is empty.
        CorruptError: a directory cannot be read.
        UsageError: the choice contradicts the path; the path is training state, or
            states the latest step; or there are
            several sets of weights or several runs, and nothing says which is meant.
    """
    with blaming(path):
        yield from _find(path, choice)


def _find(path: Path, choice: Choice) -> Iterator[Location]:
    if not path.exists():
        raise UnknownFormatError(f"{path}: no such file or directory", hint=why_unlisted(path))
    if not (path.is_file() or path.is_dir()):
        raise UnknownFormatError(f"{path}: is not a regular file")
    if is_marker(path):
        raise UsageError(
            f"{path}: states which step is the latest, and is not a checkpoint",
            hint=f"give the directory, {path.parent}, or the one of a step",
        )
    start = path.parent.resolve() / path.name if path.is_file() else path.resolve()
    if is_checkpoint_file(start):
        yield choose(start, [alone(start)], choice, start=start)
        return
    named = start if start.is_file() else None
    place = start.parent if named else start
    found = nearby(place, choice, sharded=True)
    steps = iter(()) if found else in_run(place, choice, depth=NESTED_RUNS)
    first = next(steps, None)
    if not found and (first is None or not first.format.sharded):
        found = nearby(place, choice, sharded=False)
        if found and any(at.format.sharded for at in steps):
            found, steps = [], in_run(place, choice, depth=NESTED_RUNS)
            first = next(steps, None)
    if found:
        # The reader takes the set of files that the named one belongs to.
        found = [replace(at, file=named) if at.weights_dir == place else at for at in found]
        yield choose(place, found, choice, start=place)
        return
    others = _below(place, choice) if first is None else chain([first], steps)
    first = next(others, None)
    if first is not None:
        yield from chain([first], others)
        return
    around = _around(start, choice)
    if not around:
        raise nothing_found(path, choice.step)
    yield from around


def _below(place: Path, choice: Choice) -> Iterator[Location]:
    """Yield what a search of all folders below a place finds."""
    for name in _RUN_FOLDERS:
        if (place / name).is_dir():
            yield from _find(place / name, choice)
            return
    below = search(place)
    runs = [run for run, steps in below.runs.items() if any(within(at) for _, at in steps[:_TRIED])]
    if runs == [place]:
        return
    if runs:
        meant = runs if len(runs) == 1 else _runs_of_role(place, runs, choice)
        if len(meant) == 1 and not below.is_cut:  # else others may not have been seen
            yield from _in_run_or_apart(place, meant[0], below, choice)
        return
    numbered = [found for one in below.folders if (found := numbered_files(one, choice))]
    if below.sets:
        yield choose(place, within(place), choice, start=place)
    elif len(numbered) == 1:
        yield from numbered[0]
    elif found := [at for files in numbered for at in files[:1]] or within(place):
        yield choose(place, found, choice, start=place)


def _in_run_or_apart(place: Path, run: Path, below: Below, choice: Choice) -> Iterator[Location]:
    """Yield the checkpoints of the one run below a place, or the set next to it that is meant."""
    apart = [
        location_of(folder, place, form)
        for folder, form in below.sets
        if form.sharded and not folder.is_relative_to(run)
    ]
    if choice.step is not None:
        apart = [at for at in apart if at.step == choice.step]
    named = [at for at in apart if choice.role is not None and at.is_called(choice.role)]
    if named:
        yield choose(place, named, choice, start=place)
        return
    steps = _find(run, choice)
    first = next(steps)
    chosen = choose(place, [first, *apart], choice, start=place) if apart else first
    yield chosen
    if chosen is first:
        yield from steps


def _runs_of_role(place: Path, runs: list[Path], choice: Choice) -> list[Path]:
    """Return the runs of the role that is meant, where each run is of one (ROLL)."""
    roles = {run: role_in(run.relative_to(place).parts) for run in runs}
    known = set() if None in roles.values() else set(roles.values())
    wanted = choice.role or next((role for role in DEFAULT_ROLES if role in known), None)
    return [run for run, role in roles.items() if role == wanted and role in known]


def _around(start: Path, choice: Choice) -> list[Location]:
    """Return the checkpoint that a path is inside of, next to its weights."""
    place = start.parent if start.is_file() else start
    named = step_of_parents(place, sharded=False)
    for above in list(place.parents)[:_UPWARD]:
        found = instep_of(above, sharded=True)
        if not found and named is not None and above == named[0]:
            found = within(above)
        if found:
            inner = above / start.relative_to(above).parts[0]
            if inner.is_dir() and is_state(inner.name):
                raise UsageError(
                    f"{start} is training state, not weights",
                    hint=f"give the checkpoint itself: {above}",
                )
            inside = [at for at in found if start.is_relative_to(at.weights_dir)]
            inside = inside or [at for at in found if at.weights_dir.is_relative_to(inner)]
            return [choose(above, inside or found, choice, start=start)]
    return []


def all_steps(run: Path, choice: Choice) -> list[Location]:
    """Return the checkpoints of all steps of a run, the lowest step first.

    Of a path that is one checkpoint, or is inside one, there are none. A final model in the run's
    own directory is not a step.

    Raises:
        CheckpointError: see `discover`.
    """
    with blaming(run):
        place = run.resolve()
        found = [one for one in discover(run, choice) if place in one.step_dir.parents]
        return (found or list(in_run(place, choice, depth=NESTED_RUNS)))[::-1]


def step_folders(run: Path) -> dict[int, Path]:
    """Return the directories of a run's steps, even of empty ones, the lowest step first."""
    for folder in (run, *(run / name for name in _RUN_FOLDERS)):
        if steps := steps_in(folder):
            return dict(reversed(steps))
    return {}


def step_numbers(run: Path) -> list[int]:
    """Return the steps of which a run has directories, even empty ones, the lowest first."""
    return list(step_folders(run))
