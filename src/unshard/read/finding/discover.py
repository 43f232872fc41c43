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

import re
from dataclasses import replace
from pathlib import Path

from unshard.errors import UnknownFormatError, UsageError
from unshard.read.finding.choosing import DEFAULT_ROLES, choose
from unshard.read.finding.near_misses import nothing_found
from unshard.read.finding.search import (
    FORMATS,
    WEIGHT_SUFFIXES,
    format_in,
    is_state,
    search,
    steps_in,
)
from unshard.read.finding.step_names import count_steps, family, step_of, step_of_parents
from unshard.read.format import ROLES, Choice, Format, Location, Weights, blaming, role_in
from unshard.read.rank_files.reader import RANK_FILES
from unshard.read.whole_files.reader import WHOLE_FILES

__all__ = ["all_steps", "at_same_step", "discover", "step_numbers"]

_MODEL_DIR, _EMA_DIR = "pytorch_model_fsdp_0", "pytorch_ema_model_fsdp_0"
_FSDP_FOLDER = re.compile(r"pytorch_(?:ema_)?model_fsdp_\d+")
_FOLDERS = ("model", "model_and_optim", "sharded")
_EMA = re.compile(r"(?:.*[-_])?ema(?:[-_].*)?", re.IGNORECASE)
# Files that are a checkpoint by their name alone: of Lightning, nanoGPT, litgpt.
_ALONE = re.compile(r".*\.ckpt|(?:ckpt|checkpoint|lit_model)\.pth?")
_EPOCHS = re.compile(r"(?:dist_)?epoch_#")
_RUN_FOLDERS = ("checkpoint", "checkpoints", "outputs")
_UPWARD = 3
_LISTED = 12
_TRIED = 3  # the highest steps of a run, of which one holds weights
_NESTED_RUNS = 1


def discover(path: Path, choice: Choice) -> list[Location]:
    """Return the checkpoints that `path` may mean, the highest step first.

    Raises:
        UnknownFormatError: nothing there is a checkpoint; says what was looked for and what is
            there.
        IncompleteError: the directory of the weights asked for is empty.
        UsageError: the choice contradicts the path; the path is training state; or there are
            several sets of weights or several runs, and nothing says which is meant.
    """
    if not path.exists():
        raise UnknownFormatError(f"{path}: no such file or directory")
    start = path.parent.resolve() / path.name if path.is_file() else path.resolve()
    if is_checkpoint_file(start):
        return [choose(start, [_alone(start)], choice, start=start)]
    named = start if start.is_file() else None
    place = start.parent if named else start
    found = _nearby(place, choice, sharded=True)
    steps = [] if found else _in_run(place, choice, depth=_NESTED_RUNS)
    if not found and not any(at.format.sharded for at in steps):
        found = _nearby(place, choice, sharded=False)
    if found:
        # The reader takes the set of files that the named one belongs to.
        found = [replace(at, file=named) if at.weights_dir == place else at for at in found]
        return [choose(place, found, choice, start=start)]
    found = steps or _below(place, choice) or _around(start, choice)
    if not found:
        raise nothing_found(path, choice.step)
    return found


def is_checkpoint_file(path: Path) -> bool:
    """Return whether a path is a file of weights that is not a part of a larger set."""
    is_weights = path.is_file() and path.suffix.lower() in {*WEIGHT_SUFFIXES, ""}
    if path.suffix and is_state(path.name.partition(".")[0]):
        return False
    return is_weights and not any(one.claims(path) for one in FORMATS)


def _alone(file: Path) -> Location:
    """Return where a file is that is a checkpoint of its own."""
    location = _location(file.parent, file.parent, WHOLE_FILES)
    own = step_of(file.stem)
    return replace(location, step=location.step if own is None else own, weights="model", file=file)


def _nearby(place: Path, choice: Choice, *, sharded: bool) -> list[Location]:
    """Return the sets of weights of a place in it and its known folders; of a role, in all."""
    found = _instep_of(place, sharded=sharded)
    has_role = choice.role is None or any(at.is_called(choice.role) for at in found)
    has_weights = choice.weights is None or any(at.weights == choice.weights for at in found)
    if not found or (has_role and has_weights):
        return found
    known = {at.weights_dir for at in found}
    return found + [at for at in _within(place) if at.weights_dir not in known]


def _instep_of(place: Path, *, sharded: bool) -> list[Location]:
    """Return every set of weights in a place itself, or in its folders with known names."""
    here = format_in(place, sharded=sharded)
    if here is not None:
        return [_location(place, place, here)]
    if not place.is_dir():
        return []
    names = (child.name for child in place.iterdir() if _FSDP_FOLDER.fullmatch(child.name))
    found: list[Location] = []
    for folder in (place / name for name in (*ROLES, *sorted(names, reverse=True), *_FOLDERS)):
        form = format_in(folder, sharded=sharded)
        if form is None and sharded and folder.name == _EMA_DIR and folder.is_dir():
            # lmms-engine leaves the folder empty if nothing was averaged: `choose` says so.
            form = RANK_FILES if _instep_of(place / _MODEL_DIR, sharded=True) else None
        if form is not None:
            found.append(_location(folder, place, form))
    return found


def _location(folder: Path, place: Path, form: Format) -> Location:
    """Return where weights are that were found from a place, at or above their folder."""
    named = step_of_parents(folder, sharded=form.sharded)
    is_inner = folder.name in ROLES or _FSDP_FOLDER.fullmatch(folder.name)
    if named is not None:
        step_dir, step = named
    else:
        step_dir, step = (folder.parent if place == folder and is_inner else place), None
    inner = folder.relative_to(step_dir).parts
    is_ema = folder.name == _EMA_DIR or any(_EMA.fullmatch(name) for name in inner)
    role = role_in(inner) or role_in((step_dir.parent.name,))
    return Location(folder, step_dir, step, role, "ema" if is_ema else "model", form)


def _within(step_dir: Path) -> list[Location]:
    """Return all sets of weights at any depth of a step directory, the sharded if there are any."""
    below = search(step_dir)
    found = [_location(folder, step_dir, form) for folder, form in below.sets]
    nested = [path for steps in below.runs.values() for _, path in steps[:1]]
    found += [at for path in nested for at in _instep_of(path, sharded=True)]
    alone = (_files_in(folder) for folder in below.folders)
    sharded = {at.role for at in found if at.format.sharded}
    kept = [at for at in found if at.format.sharded or at.role not in sharded]
    return kept or [at for files in alone for at in files]


def _files_in(place: Path) -> list[Location]:
    """Return the one file of a place that is a checkpoint by its name, if there is one."""
    files = [
        child
        for child in (place.iterdir() if place.is_dir() else ())
        if _ALONE.fullmatch(child.name) and is_checkpoint_file(child)
    ]
    return [_alone(files[0])] if len(files) == 1 else []


def _in_run(run: Path, choice: Choice, *, depth: int) -> list[Location]:
    """Return what the steps of a run hold; verl's torchtitan engine has steps within steps."""
    steps = steps_in(run)
    if steps and choice.step is not None:
        there = ", ".join(str(step) for step, _ in reversed(steps))
        steps = [(step, place) for step, place in steps if step == choice.step]
        if not steps:
            raise UnknownFormatError(f"{run} has no step {choice.step}", found=f"steps {there}")
    locations: list[Location] = []
    empty: list[Path] = []
    runs: list[Path] = []
    for step, place in steps:
        found = _nearby(place, choice, sharded=True) or _nearby(place, choice, sharded=False)
        inner = replace(choice, step=None)
        if found:
            locations.append(choose(place, found, choice, start=run))
        elif depth and (nested := _in_run(place, inner, depth=depth - 1)):
            locations += nested
            runs += [place] if any(at.step != step for at in nested) else []
        elif within := _within(place):
            locations.append(choose(place, within, choice, start=run))
        elif not locations:
            empty.append(place)
    if len(runs) > 1:
        raise UsageError(
            f"{run} has the steps of {len(runs)} runs",
            hint=f"give one of them: {', '.join(map(str, runs[:_LISTED]))}",
        )
    _refuse_two_runs(run, locations)
    return [replace(at, empty=tuple(empty)) for at in locations] or _numbered_files(run, choice)


def _refuse_two_runs(run: Path, locations: list[Location]) -> None:
    """Refuse steps that are named in two ways: the highest number may be another run's."""
    unsure = [at for at in locations if at.step is None or step_of(at.step_dir.name) is None]
    if len(unsure) > 1 and not count_steps([at.step for at in unsure]):
        raise UsageError(
            f"{run} has {len(unsure)} folders that may be steps, or runs",
            found=", ".join(at.step_dir.name for at in unsure[:_LISTED]),
            hint="give one of them, or its --step N",
        )
    kinds: dict[str, Location] = {}
    for at in locations:
        if at.step_dir.parent == run and at.format.sharded:
            kinds.setdefault(family(at.step_dir.name), at)
    if any("epoch" not in kind for kind in kinds):  # a trainer may save at both
        kinds = {kind: at for kind, at in kinds.items() if not _EPOCHS.fullmatch(kind)}
    if len(kinds) > 1:
        raise UsageError(
            f"{run} has the steps of two runs: their names differ",
            found=", ".join(at.step_dir.name for at in kinds.values()),
            hint="give the directory of the step that you want",
        )


def _numbered_files(run: Path, choice: Choice) -> list[Location]:
    """Return the files of a run that are one step each, as MMEngine and Fabric write them."""
    if not run.is_dir():
        return []
    found = [
        _alone(child)
        for child in run.iterdir()
        if step_of(child.stem) is not None and child.suffix and is_checkpoint_file(child)
    ]
    kept = [at for at in found if choice.step in (None, at.step)]
    return sorted(kept, key=lambda at: at.step or 0, reverse=True)


def _below(place: Path, choice: Choice) -> list[Location]:
    """Return what a search of all folders below a place finds."""
    for name in _RUN_FOLDERS:
        if (place / name).is_dir():
            return discover(place / name, choice)
    below = search(place)
    runs = [
        run for run, steps in below.runs.items() if any(_within(at) for _, at in steps[:_TRIED])
    ]
    if runs == [place]:
        return []
    if runs:
        meant = runs if len(runs) == 1 else _runs_of_role(place, runs, choice)
        is_certain = len(meant) == 1 and not below.is_cut  # else others may not have been seen
        return discover(meant[0], choice) if is_certain else []
    if below.sets:
        return [choose(place, _within(place), choice, start=place)]
    numbered = [found for one in below.folders if (found := _numbered_files(one, choice))]
    if len(numbered) == 1:
        return numbered[0]
    found = [at for files in numbered for at in files[:1]] or _within(place)
    return [choose(place, found, choice, start=place)] if found else []


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
        found = _instep_of(above, sharded=True)
        if not found and named is not None and above == named[0]:
            found = _within(above)
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
        return (found or _in_run(place, choice, depth=_NESTED_RUNS))[::-1]


def step_numbers(run: Path) -> list[int]:
    """Return the steps of which a run has directories, even empty ones, the lowest first."""
    for folder in (run, *(run / name for name in _RUN_FOLDERS)):
        if steps := steps_in(folder):
            return sorted({step for step, _ in steps})
    return []


def at_same_step(location: Location, weights: Weights) -> Location | None:
    """Return where the step directory has its EMA or its regular weights, if it has them."""
    folder = location.step_dir / (_EMA_DIR if weights == "ema" else _MODEL_DIR)
    form = format_in(folder, sharded=True)
    if form is None:
        return None
    return replace(location, weights_dir=folder, weights=weights, format=form)
