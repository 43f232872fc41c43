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
from itertools import tee
from pathlib import Path

from unshard.errors import UnknownFormatError, UsageError
from unshard.read.finding.candidates import (
    Below,
    alone,
    is_checkpoint_file,
    location_of,
    numbered_files,
    search,
    sets_at,
    sets_within,
    steps_in,
)
from unshard.read.finding.markers import MARKERS
from unshard.read.finding.ranking import DEFAULT_ROLES, Run, choose, sets_near
from unshard.read.format import Choice, Location, blaming, role_in
from unshard.read.hub_files import PIPELINE_INDEX
from unshard.read.step_names import is_state, step_of_parents
from unshard.read.tree import LONGEST_TEXT, Tree

_RUN_FOLDERS = ("checkpoint", "checkpoints", "outputs")
_UPWARD = 3
_TRIED = 3  # the highest steps of a run, of which one holds weights


def discover(path: Path, choice: Choice, tree: Tree | None = None) -> list[Location]:
    """Return the checkpoints that `path` may mean, the highest step first.

    Raises:
        CheckpointError: see `find`; for any of the steps.
    """
    return list(find(path, choice, tree))


def find(path: Path, choice: Choice, tree: Tree | None = None) -> Iterator[Location]:
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
    tree = tree or Tree()
    with blaming(path):
        is_file = tree.is_file(path)
        if not is_file and not tree.is_dir(path):
            if tree.exists(path):
                raise UnknownFormatError(f"{path}: is not a regular file")
            from unshard.read.finding.near_misses import no_such

            raise no_such(path)
        if is_file and path.name in MARKERS and tree.size(path) <= LONGEST_TEXT:
            raise UsageError(
                f"{path}: states which step is the latest, and is not a checkpoint",
                hint=f"give the directory, {path.parent}, or the one of a step",
            )
        start = tree.resolve(path.parent) / path.name if is_file else tree.resolve(path)
        if not is_file and PIPELINE_INDEX in tree.inside(start):
            from unshard.read.beside.pipelines import component_of, is_pipeline

            start = component_of(start) if is_pipeline(start / PIPELINE_INDEX) else start
        place = start.parent if is_file else start
        if is_checkpoint_file(tree, start):
            yield choose(tree, start, [alone(tree, start)], choice, start=start)
            return
        steps = _nearest(tree, place, start, choice)
        first = next(steps, None)
        if first is None:
            run, found = _below(tree, place, choice)
            if run is not None:
                steps = _or_apart(tree, place, find(run, choice, tree), found, choice)
            else:
                steps = iter(found or _around(tree, start, choice))
            first = next(steps, None)
        if first is None:
            from unshard.read.finding.near_misses import nothing_found

            raise nothing_found(tree, path, choice.step)
        yield first
        yield from steps


def _nearest(tree: Tree, place: Path, start: Path, choice: Choice) -> Iterator[Location]:
    """Yield the weights at a place, or in its folders of known names, or those of its steps."""
    found = sets_near(tree, place, choice, sharded=True)
    steps = iter(()) if found else Run(tree, place, choice).steps()
    first = next(steps, None)
    if not found and (first is None or not first.format.sharded):
        found = sets_near(tree, place, choice, sharded=False)
        steps, ahead = tee(steps)
        if found and any(at.format.sharded for at in ahead):
            found = []
    if found:
        if start != place:  # the reader takes the set of files that the named one belongs to
            found = [replace(at, file=start) if at.weights_dir == place else at for at in found]
        yield choose(tree, place, found, choice, start=place)
    elif first is not None:
        yield first
        yield from steps


def _below(tree: Tree, place: Path, choice: Choice) -> tuple[Path | None, list[Location]]:
    """Return the run below a place that is meant, and the sets apart from it.

    Without a run, None, and what is meant of the sets or the files of steps below the place.
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
        meant = runs if len(runs) == 1 else _runs_of_role(place, runs, choice)
        if runs == [place] or len(meant) != 1 or below.is_cut:  # others may not have been seen
            return None, []
        return meant[0], _apart(tree, place, meant[0], below, choice)
    files = [numbered_files(tree, folder, choice.step) for folder in below.folders]
    numbered = [found for found in files if found]
    if len(numbered) == 1 and not below.sets:
        return None, numbered[0]
    found = [] if below.sets else [found[0] for found in numbered]
    found = found or sets_within(tree, place)
    return None, [choose(tree, place, found, choice, start=place)] if found else []


def _apart(tree: Tree, place: Path, run: Path, below: Below, choice: Choice) -> list[Location]:
    """Return the sharded sets below a place that are not in the one run there."""
    found = [
        location_of(tree, folder, place, form)
        for folder, form in below.sets
        if form.sharded and not folder.is_relative_to(run)
    ]
    return [at for at in found if choice.step in (None, at.step)]


def _or_apart(
    tree: Tree, place: Path, steps: Iterator[Location], apart: list[Location], choice: Choice
) -> Iterator[Location]:
    """Yield the steps of the one run below a place, or the set next to it that is meant."""
    named = [at for at in apart if choice.role is not None and at.is_called(choice.role)]
    if named:
        yield choose(tree, place, named, choice, start=place)
        return
    first = next(steps)
    chosen = choose(tree, place, [first, *apart], choice, start=place) if apart else first
    yield chosen
    if chosen is first:
        yield from steps


def _runs_of_role(place: Path, runs: list[Path], choice: Choice) -> list[Path]:
    """Return the runs of the role that is meant, where each run is of one (ROLL)."""
    roles = {run: role_in(run.relative_to(place).parts) for run in runs}
    known = set() if None in roles.values() else set(roles.values())
    wanted = choice.role or next((role for role in DEFAULT_ROLES if role in known), None)
    return [run for run, role in roles.items() if role == wanted and role in known]


def _around(tree: Tree, start: Path, choice: Choice) -> list[Location]:
    """Return the checkpoint that a path is inside of, next to its weights."""
    place = start.parent if tree.is_file(start) else start
    named = step_of_parents(place, sharded=False)
    for above in list(place.parents)[:_UPWARD]:
        found = sets_at(tree, above, sharded=True)
        if not found and named is not None and above == named[0]:
            found = sets_within(tree, above)
        if found:
            inner = above / start.relative_to(above).parts[0]
            if tree.is_dir(inner) and is_state(inner.name):
                raise UsageError(
                    f"{start} is training state, not weights",
                    hint=f"give the checkpoint itself: {above}",
                )
            inside = [at for at in found if start.is_relative_to(at.weights_dir)]
            inside = inside or [at for at in found if at.weights_dir.is_relative_to(inner)]
            return [choose(tree, above, inside or found, choice, start=start)]
    return []


def all_steps(run: Path, choice: Choice) -> list[Location]:
    """Return the checkpoints of all steps of a run, the lowest step first.

    Of a path that is one checkpoint, or is inside one, there are none. A final model in the run's
    own directory is not a step.

    Raises:
        CheckpointError: see `discover`.
    """
    with blaming(run):
        tree, place = Tree(), run.resolve()
        found = [one for one in discover(run, choice, tree) if place in one.step_dir.parents]
        return (found or list(Run(tree, place, choice).steps()))[::-1]


def step_folders(run: Path) -> dict[int, Path]:
    """Return the directories of a run's steps, even of empty ones, the lowest step first."""
    tree = Tree()
    for folder in (run, *(run / name for name in _RUN_FOLDERS)):
        if steps := steps_in(tree, folder):
            return dict(reversed(steps))
    return {}


def step_numbers(run: Path) -> list[int]:
    """Return the steps of which a run has directories, even empty ones, the lowest first."""
    return list(step_folders(run))
