"""Find the checkpoint that a path means, whatever level of its tree the path points to.

A *step directory* (`global_step_10`, `checkpoint-10`) has one checkpoint; its weights are in it, or
in a folder named after a role (verl, SkyRL), a weight set (lmms-engine) or its content (`model`). A
*run directory* has several step directories. Sharded weights win over whole ones, and what is
closer to the path over what is deeper. Only names and places count; no file is opened.

Sources: verl's FSDPCheckpointManager, SkyRL's fsdp_strategy, lmms-engine's fsdp2_trainer,
accelerate's fsdp_utils, and the checkpointers of torchtitan, torchtune, Composer, Lightning,
OLMo-core and NeMo AutoModel.
"""

import re
from dataclasses import replace
from pathlib import Path

from unshard.errors import IncompleteError, UnknownFormatError, UsageError
from unshard.read.dcp.reader import DCP
from unshard.read.format import (
    DEEPSPEED,
    MEGATRON,
    ROLES,
    Choice,
    Format,
    Location,
    Role,
    Weights,
)
from unshard.read.rank_files.reader import RANK_FILES
from unshard.read.safetensors_shards.reader import SAFETENSORS_SHARDS
from unshard.read.whole_files.reader import WHOLE_FILES

__all__ = ["all_steps", "at_same_step", "discover", "step_numbers", "step_of"]

FORMATS = (RANK_FILES, SAFETENSORS_SHARDS, MEGATRON, DCP, WHOLE_FILES, DEEPSPEED)
"""All formats, in the order in which a directory is searched for them."""

_STEPS = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?:global_step_?|checkpoint[-_]|step[-_]?|iter_)(\d+)",  # verl, HF, torchtitan, OLMo-core
        r"ep\d+-ba(\d+)",  # Composer
        r"epoch_\d+_step_(\d+)",  # NeMo AutoModel
        r"(?:dist_)?epoch_(\d+)",  # torchtune
        r".*step=(\d+).*\.ckpt",  # Lightning
    )
)
_MODEL_DIR, _EMA_DIR = "pytorch_model_fsdp_0", "pytorch_ema_model_fsdp_0"
_FSDP_FOLDER = re.compile(r"pytorch_(?:ema_)?model_fsdp_\d+")
_FOLDERS = ("model", "model_and_optim", "sharded")
_WEIGHT_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".th", ".tar", "")
_STATE = (
    r"(?:(?:lr_|train_)?(?:optim(?:izer)?|scheduler|sampler|scaler|data(?:loader)?|rng|random|extra"
    r"|trainer|training)(?:_states?|_args)?)(?:_\d+|_merged)?"
)
_TRAINING_STATE = re.compile(rf"{_STATE}\.\w+")
_STATE_FOLDER = re.compile(_STATE)
_ONE_RANK = re.compile(r"(?:.*[_.-])?rank[_-]?\d+[_.-].*")
_RUN_FOLDERS = ("checkpoint", "checkpoints", "outputs")
_UPWARD = 3
_STEP_ABOVE = 2  # NeMo-RL: step_10/policy/weights
_NESTED_RUNS = 1
_LISTED_RUNS = 12


def discover(path: Path, choice: Choice) -> list[Location]:
    """Return the checkpoints that `path` may mean, the highest step first.

    Raises:
        UnknownFormatError: nothing there is a checkpoint; says what was looked for and what is
            there.
        IncompleteError: the directory of the weights asked for is empty.
        UsageError: the choice contradicts the path; the path is training state; or the weights
            are an actor's and a critic's, or a critic's alone, and no role was chosen.
    """
    if not path.exists():
        raise UnknownFormatError(f"{path}: no such file or directory")
    start = path.parent.resolve() / path.name if path.is_file() else path.resolve()
    if _is_checkpoint_file(start):
        folder = start.parent
        alone = _location(folder, _step_above(folder), WHOLE_FILES)
        return [_choose(start, [replace(alone, weights="model", file=start)], choice, start=start)]
    named = start if start.is_file() else None
    place = start.parent if named else start
    found = _instep_of(place, sharded=True)
    steps = [] if found else _in_run(place, choice, depth=_NESTED_RUNS)
    if not found and not any(at.format.sharded for at in steps):
        found = _instep_of(place, sharded=False)
    if found:
        # The reader takes the set of files that the named one belongs to.
        found = [replace(at, file=named) if at.weights_dir == place else at for at in found]
        return [_choose(place, found, choice, start=start)]
    if steps:
        return steps
    for above in list(place.parents)[:_UPWARD]:
        found = _instep_of(above, sharded=True)
        if found:
            _refuse_training_state(above, start)
            inside = [at for at in found if start.is_relative_to(at.weights_dir)]
            return [_choose(above, inside or found, choice, start=start)]
    for name in _RUN_FOLDERS:
        if (place / name).is_dir():
            return discover(place / name, choice)
    raise _nothing_found(path, choice.step)


def _refuse_training_state(checkpoint: Path, start: Path) -> None:
    """Refuse a path inside a checkpoint that is its optimizer, its dataloader or the like."""
    inner = checkpoint / start.relative_to(checkpoint).parts[0]
    if inner.is_dir() and _STATE_FOLDER.fullmatch(inner.name):
        raise UsageError(
            f"{start} is training state, not weights",
            hint=f"give the checkpoint itself: {checkpoint}",
        )


def _is_checkpoint_file(path: Path) -> bool:
    """Return whether a path is a file of weights that is not a part of a larger set."""
    is_weights = path.is_file() and path.suffix.lower() in _WEIGHT_FILES
    if _TRAINING_STATE.fullmatch(path.name):
        return False
    return is_weights and not any(one.claims(path.name) for one in FORMATS)


def _instep_of(place: Path, *, sharded: bool) -> list[Location]:
    """Return every set of weights that `place` has, if it is a step or weights directory."""
    here = format_in(place, sharded=sharded)
    if here is not None:
        return [_location(place, _step_above(place), here)]
    if not place.is_dir():
        return []
    names = (child.name for child in place.iterdir() if _FSDP_FOLDER.fullmatch(child.name))
    found: list[Location] = []
    for folder in (place / name for name in (*ROLES, *sorted(names, reverse=True), *_FOLDERS)):
        form = format_in(folder, sharded=sharded)
        if form is None and sharded and folder.name == _EMA_DIR and folder.is_dir():
            # lmms-engine leaves the folder empty if nothing was averaged: `_choose` says so.
            form = RANK_FILES if _instep_of(place / _MODEL_DIR, sharded=True) else None
        if form is not None:
            found.append(_location(folder, place, form))
    return found


def _step_above(place: Path) -> Path:
    """Return the directory of the checkpoint whose weights are in `place`."""
    for above in (place, *list(place.parents)[:_STEP_ABOVE]):
        if step_of(above.name) is not None:
            return above
    is_inner = place.name in ROLES or _FSDP_FOLDER.fullmatch(place.name)
    return place.parent if is_inner else place


def format_in(directory: Path, *, sharded: bool) -> Format | None:
    """Return the format of the files that are directly in a directory, or None."""
    if not directory.is_dir():
        return None
    return next((one for one in FORMATS if one.sharded is sharded and one.holds(directory)), None)


def _location(folder: Path, step_dir: Path, form: Format) -> Location:
    inner = folder.relative_to(step_dir).parts
    role = next((ROLES[name] for name in inner if name in ROLES), None)
    weights = "ema" if folder.name == _EMA_DIR else "model"
    return Location(folder, step_dir, step_of(step_dir.name), role, weights, form)


def step_of(name: str) -> int | None:
    """Return the training step that a directory's name states."""
    matches = (pattern.fullmatch(name) for pattern in _STEPS)
    return next((int(match[1]) for match in matches if match), None)


def _choose(place: Path, found: list[Location], choice: Choice, *, start: Path) -> Location:
    """Return the one set of weights that is meant.

    Args:
        place: where they were looked for, for errors.
        found: what is there.
        choice: what the user asked for.
        start: the path that the user gave; `place` is a step of it, or above it.
    """
    is_run = start in place.parents
    if choice.step is not None and not is_run and found[0].step != choice.step:
        raise UsageError(
            f"{place} is step {found[0].step}, but --step {choice.step} was asked for",
            hint="give the directory that has all steps, or leave --step out",
        )
    sets = sorted({at.weights for at in found}, reverse=True)
    wanted = choice.weights or ("model" if "model" in sets else sets[0])
    kept = [at for at in found if at.weights == wanted]
    if not kept:
        raise UnknownFormatError(
            f"{place} has no {wanted} weights",
            expected=_EMA_DIR if wanted == "ema" else f"{_MODEL_DIR} or rank files",
            found=", ".join(at.weights_dir.name for at in found),
        )
    location = _choose_role(place, kept, choice.role, start)
    if next(location.weights_dir.iterdir(), None) is None:
        raise IncompleteError(
            f"{location.weights_dir} is empty: this run saved no {wanted} weights at this step"
        )
    return location


def _choose_role(place: Path, found: list[Location], role: Role | None, start: Path) -> Location:
    """Return the weights of a role; a critic is never taken unless it is named."""
    kept = [at for at in found if role in (None, at.role)]
    names = " and ".join(at.weights_dir.name for at in kept or found)
    if not kept:
        raise UnknownFormatError(f"{place} has no {role}", found=names)
    if len(kept) > 1:
        roles = {at.role for at in kept} - {None}
        hint = "choose with --role actor|critic" if len(roles) == len(kept) else "give one of them"
        raise UsageError(f"{place} has {names}", hint=hint)
    if kept[0].role == "critic" and role is None and not start.is_relative_to(kept[0].weights_dir):
        raise UsageError(
            f"{place} has only a critic, which is not the model that was trained",
            hint="if you want the critic: --role critic",
        )
    return kept[0]


def _steps(run: Path) -> list[tuple[int, Path]]:
    """Return the step directories of a run, the highest step first."""
    if not run.is_dir():
        return []
    found = [
        (step, child)
        for child in run.iterdir()
        if (step := step_of(child.name)) is not None and child.is_dir()
    ]
    return sorted(found, reverse=True)


def _in_run(run: Path, choice: Choice, *, depth: int) -> list[Location]:
    """Return the weights of a run's steps; verl's torchtitan engine has steps within steps."""
    steps = _steps(run)
    if steps and choice.step is not None:
        there = ", ".join(str(step) for step, _ in reversed(steps))
        steps = [(step, place) for step, place in steps if step == choice.step]
        if not steps:
            raise UnknownFormatError(f"{run} has no step {choice.step}", found=f"steps {there}")
    locations: list[Location] = []
    empty: list[Path] = []
    for _, place in steps:
        found = _instep_of(place, sharded=True) or _instep_of(place, sharded=False)
        if found:
            locations.append(_choose(place, found, choice, start=run))
        elif depth and (inner := _in_run(place, replace(choice, step=None), depth=depth - 1)):
            locations += inner
        elif not locations:
            empty.append(place)
    return [replace(at, empty=tuple(empty)) for at in locations]


def all_steps(run: Path, choice: Choice) -> list[Location]:
    """Return the checkpoints of all steps of a run, the lowest step first.

    Of a path that is one checkpoint, or is inside one, there are none. A final model in the run's
    own directory is not a step.

    Raises:
        CheckpointError: see `discover`.
    """
    place = run.resolve()
    found = [one for one in discover(run, choice) if place in one.step_dir.parents]
    return (found or _in_run(place, choice, depth=_NESTED_RUNS))[::-1]


def step_numbers(run: Path) -> list[int]:
    """Return the steps of which a run has directories, even empty ones, the lowest first."""
    for folder in (run, *(run / name for name in _RUN_FOLDERS)):
        if steps := _steps(folder):
            return sorted({step for step, _ in steps})
    return []


def _nothing_found(path: Path, wanted: int | None) -> UnknownFormatError:
    folder = path if path.is_dir() else path.parent
    steps = [(step, place) for step, place in _steps(folder) if wanted in (None, step)]
    if steps:
        folder = steps[0][1]
    there = sorted(child.name + ("/" if child.is_dir() else "") for child in folder.iterdir())
    shown = ", ".join(there[:12]) + (f" and {len(there) - 12} more" if len(there) > 12 else "")
    return UnknownFormatError(
        f"{folder if steps else path}: no checkpoint found",
        expected="model_world_size_W_rank_R.pt (verl, lmms-engine), .metadata and *.distcp (torch "
        "DCP), pytorch_model_fsdp_0/ (accelerate, HF Trainer), shard-*-model-*.safetensors or "
        "model.safetensors, here, in actor/, critic/, model/ or in step directories "
        "(global_step_N, checkpoint-N, step-N)",
        found=shown or "an empty directory",
        hint=_what_to_give(folder),
    )


def _what_to_give(folder: Path) -> str:
    """Return which path near a directory without a checkpoint may be the one that is meant."""
    children = sorted(folder.iterdir())
    runs = [child for child in children if child.is_dir() and step_numbers(child)]
    if runs:
        more = f" and {len(runs) - _LISTED_RUNS} more" if len(runs) > _LISTED_RUNS else ""
        listed = ", ".join(str(run) for run in runs[:_LISTED_RUNS])
        return f"give one of the runs below it: {listed}{more}"
    for child in children:
        if child.suffix and _is_checkpoint_file(child) and not _ONE_RANK.fullmatch(child.name):
            return f"give the file itself: {child}"
    return ""


def at_same_step(location: Location, weights: Weights) -> Location | None:
    """Return where the step directory has its EMA or its regular weights, if it has them."""
    folder = location.step_dir / (_EMA_DIR if weights == "ema" else _MODEL_DIR)
    form = format_in(folder, sharded=True)
    if form is None:
        return None
    return replace(location, weights_dir=folder, weights=weights, format=form)
