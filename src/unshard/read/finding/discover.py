"""Finds the checkpoint of a path, at whatever level of its tree the path is.

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
from itertools import tee
from pathlib import Path

from unshard.errors import UnknownFormatError, UsageError
from unshard.read.finding.candidates import (
    SearchResult,
    is_checkpoint_file,
    location_of,
    numbered_files,
    search,
    sets_at,
    sets_within,
    single_file,
    steps_in,
)
from unshard.read.finding.markers import MARKERS
from unshard.read.finding.ranking import DEFAULT_ROLES, RunDirectory, choose, sets_near
from unshard.read.format import Choice, Location, blaming, role_in
from unshard.read.hub_files import PIPELINE_INDEX
from unshard.read.step_names import is_state, step_of_parents
from unshard.read.tree import LONGEST_TEXT, Tree

_RUN_FOLDERS = ("checkpoint", "checkpoints", "outputs")
_UPWARD = 3
_TRIED = 3  # the highest steps of a run, one of which must hold weights


def discover(path: Path, choice: Choice, tree: Tree | None = None) -> list[Location]:
    """Return the checkpoints that `path` may mean, the highest step first.

    Raises:
        CheckpointError: see `find`; for any of the steps.
    """
    return list(find(path, choice, tree))


def find(path: Path, choice: Choice, tree: Tree | None = None) -> Iterator[Location]:
    """Yield the checkpoints that `path` may mean, the highest step first; there is at least one.

    Lazy: steps are inspected in order and only on demand, so one step of a long run is read, and
    errors in older steps are not raised.

    Raises:
        UnknownFormatError: there is no checkpoint; the message has the expected names and those
            that are there.
        IncompleteError: the directory of the weights asked for is empty.
        CorruptError: a directory cannot be read.
        UsageError: the choice contradicts the path; the path is training state, or a marker of the
            latest step; or several sets of weights or several runs match.
    """
    tree = tree or Tree()
    with blaming(path):
        is_file = tree.is_file(path)
        if not is_file and not tree.is_dir(path):
            if tree.exists(path):
                raise UnknownFormatError(f"{path}: is not a regular file")
            from unshard.read.finding.diagnosis import no_such

            raise no_such(path)
        if is_file and path.name in MARKERS and tree.size(path) <= LONGEST_TEXT:
            raise UsageError(
                f"{path}: is a marker of the latest step, not a checkpoint",
                hint=f"pass {path.parent} or a step directory",
            )
        start = tree.resolve(path.parent) / path.name if is_file else tree.resolve(path)
        if not is_file and PIPELINE_INDEX in tree.inside(start):
            from unshard.read.beside.pipelines import component_of, is_pipeline

            start = component_of(start) if is_pipeline(start / PIPELINE_INDEX) else start
        place = start.parent if is_file else start
        if is_checkpoint_file(tree, start):
            yield choose(tree, start, [single_file(tree, start)], choice, start=start)
            return
        steps = _nearest(tree, place, start, choice)
        first = next(steps, None)
        if first is None:
            run, sets = _below(tree, place, choice)
            if run is not None:
                steps = _or_apart(tree, place, find(run, choice, tree), sets, choice)
            else:
                steps = iter(sets or _around(tree, start, choice))
            first = next(steps, None)
        if first is None:
            from unshard.read.finding.diagnosis import nothing_found

            raise nothing_found(tree, path, choice.step)
        yield first
        yield from steps


def _nearest(tree: Tree, place: Path, start: Path, choice: Choice) -> Iterator[Location]:
    """Yield the weights at a place, or in its folders of known names, or those of its steps."""
    sets = sets_near(tree, place, choice, sharded=True)
    steps = iter(()) if sets else RunDirectory(tree, place, choice).steps()
    first = next(steps, None)
    if not sets and (first is None or not first.format.sharded):
        sets = sets_near(tree, place, choice, sharded=False)
        steps, ahead = tee(steps)
        if sets and any(at.format.sharded for at in ahead):
            sets = []
    if sets:
        if start != place:  # the reader takes the set of files that contains this file
            sets = [replace(at, file=start) if at.weights_dir == place else at for at in sets]
        yield choose(tree, place, sets, choice, start=place)
    elif first is not None:
        yield first
        yield from steps


def _below(tree: Tree, place: Path, choice: Choice) -> tuple[Path | None, list[Location]]:
    """Return the run below a place, and the sets apart from it.

    Without one run, return None, and the chosen set or the files of steps below the place.
    """
    for name in _RUN_FOLDERS:
        if tree.is_dir(place / name):
            return place / name, []
    below = search(tree, place)
    runs = [
        run
        for run, steps in below.runs.items()
        if any(sets_within(tree, at) for _, at in steps[:_TRIED])
    ]
    if runs:
        chosen = runs if len(runs) == 1 else _runs_of_role(place, runs, choice)
        if runs == [place] or len(chosen) != 1 or below.is_cut:  # a cut search may miss others
            return None, []
        return chosen[0], _apart(tree, place, chosen[0], below, choice)
    files = [numbered_files(tree, folder, choice.step) for folder in below.folders]
    numbered = [steps for steps in files if steps]
    if len(numbered) == 1 and not below.sets:
        return None, numbered[0]
    sets = [] if below.sets else [steps[0] for steps in numbered]
    sets = sets or sets_within(tree, place)
    return None, [choose(tree, place, sets, choice, start=place)] if sets else []


def _apart(
    tree: Tree, place: Path, run: Path, below: SearchResult, choice: Choice
) -> list[Location]:
    """Return the sharded sets below a place that are outside its one run."""
    sets = [
        location_of(tree, folder, place, form)
        for folder, form in below.sets
        if form.sharded and not folder.is_relative_to(run)
    ]
    return [at for at in sets if choice.step in (None, at.step)]


def _or_apart(
    tree: Tree, place: Path, steps: Iterator[Location], apart: list[Location], choice: Choice
) -> Iterator[Location]:
    """Yield the steps of the one run below a place, or the chosen set next to it."""
    of_role = [at for at in apart if choice.role is not None and at.is_called(choice.role)]
    if of_role:
        yield choose(tree, place, of_role, choice, start=place)
        return
    first = next(steps)
    chosen = choose(tree, place, [first, *apart], choice, start=place) if apart else first
    yield chosen
    if chosen is first:
        yield from steps


def _runs_of_role(place: Path, runs: list[Path], choice: Choice) -> list[Path]:
    """Return the runs of the chosen role, if each run has one role (ROLL)."""
    roles = {run: role_in(run.relative_to(place).parts) for run in runs}
    known_roles = set() if None in roles.values() else set(roles.values())
    wanted = choice.role or next((role for role in DEFAULT_ROLES if role in known_roles), None)
    return [run for run, role in roles.items() if role == wanted and role in known_roles]


def _around(tree: Tree, start: Path, choice: Choice) -> list[Location]:
    """Return the checkpoint around a path that is inside of it, next to its weights."""
    place = start.parent if tree.is_file(start) else start
    named = step_of_parents(place, sharded=False)
    for above in list(place.parents)[:_UPWARD]:
        sets = sets_at(tree, above, sharded=True)
        if not sets and named is not None and above == named[0]:
            sets = sets_within(tree, above)
        if sets:
            inner = above / start.relative_to(above).parts[0]
            if tree.is_dir(inner) and is_state(inner.name):
                raise UsageError(
                    f"{start} is training state, not weights",
                    hint=f"pass the checkpoint itself: {above}",
                )
            inside = [at for at in sets if start.is_relative_to(at.weights_dir)]
            inside = inside or [at for at in sets if at.weights_dir.is_relative_to(inner)]
            return [choose(tree, above, inside or sets, choice, start=start)]
    return []


def all_steps(run: Path, choice: Choice) -> list[Location]:
    """Return the checkpoints of all steps of a run, the lowest step first.

    Empty if `run` is, or is inside, a single checkpoint. A final model in the run's own directory
    is not a step.

    Raises:
        CheckpointError: see `discover`.
    """
    with blaming(run):
        tree, place = Tree(), run.resolve()
        steps = [at for at in discover(run, choice, tree) if place in at.step_dir.parents]
        return (steps or list(RunDirectory(tree, place, choice).steps()))[::-1]


def step_folders(run: Path) -> dict[int, Path]:
    """Return the directories of a run's steps, even of empty ones, the lowest step first."""
    tree = Tree()
    for folder in (run, *(run / name for name in _RUN_FOLDERS)):
        if steps := steps_in(tree, folder):
            return dict(reversed(steps))
    return {}


def step_numbers(run: Path) -> list[int]:
    """Return the steps that have a directory in a run, even an empty one, the lowest first."""
    return list(step_folders(run))
