"""Find the checkpoint that a path means, whatever level of its tree the path points to.

A *step directory* (`global_step_10`, `checkpoint-10`) holds one checkpoint; its weights lie in it,
or in a folder named after a role (verl), a weight set (lmms-engine) or what it holds (`model`). A
*run directory* holds several step directories. Sharded weights win over whole ones, and what lies
closer to the path over what lies deeper. Knows names and places; opens no file.

Sources: verl's FSDPCheckpointManager, lmms-engine's fsdp2_trainer, accelerate's fsdp_utils, and the
checkpointers of torchtitan, torchtune, Composer, Lightning, OLMo-core and NeMo AutoModel.
"""

import re
from dataclasses import replace
from pathlib import Path

from unshard.errors import IncompleteError, UnknownFormatError, UsageError
from unshard.read.format import Format, Location, Request, Role
from unshard.read.formats import FORMATS, format_in
from unshard.read.rank_files import RANK_FILES
from unshard.read.whole_files import WHOLE_FILES

__all__ = ["all_steps", "discover", "is_ema_there", "regular_of", "step_numbers"]

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
_ROLES = ("actor", "critic")
_FSDP_FOLDER = re.compile(r"pytorch_(?:ema_)?model_fsdp_\d+")
_FOLDERS = ("model", "model_and_optim", "sharded")
_WEIGHT_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".th", ".tar", "")
_TRAINING_STATE = re.compile(
    r"(?:rng_state|random_states|scheduler|optimizer|sampler|scaler|data)(?:_\d+)?\.\w+"
    r"|training_args\.bin"
)
_RUN_FOLDERS = ("checkpoint", "checkpoints", "outputs")
_UPWARD = 3
_NESTED_RUNS = 1


def discover(path: Path, request: Request) -> list[Location]:
    """Return the checkpoints that `path` may mean, the highest step first.

    Raises:
        UnknownFormatError: nothing there is a checkpoint; says what was looked for and what is
            there.
        IncompleteError: the directory of the weights asked for is empty.
        UsageError: the request contradicts the path, or both roles exist and none was chosen.
    """
    if not path.exists():
        raise UnknownFormatError(f"{path}: there is no such file or directory")
    start = path.parent.resolve() / path.name if path.is_file() else path.resolve()
    if _is_checkpoint_file(start):
        folder = start.parent
        file = Location(folder, folder, _step(folder.name), None, "model", WHOLE_FILES, start)
        return [_choose(start, [file], request, explicit=True)]
    place = start.parent if start.is_file() else start
    found = _in_step(place, sharded=True)
    steps = [] if found else _in_run(place, request, depth=_NESTED_RUNS)
    if not found and not any(at.format.sharded for at in steps):
        found = _in_step(place, sharded=False)
    if found:
        return [_choose(place, _about(start, found), request, explicit=True)]
    if steps:
        return steps
    for above in list(place.parents)[:_UPWARD]:
        found = _in_step(above, sharded=True)
        if found:
            inside = [at for at in found if start.is_relative_to(at.weights_dir)]
            return [_choose(above, inside or found, request, explicit=True)]
    for name in _RUN_FOLDERS:
        if (place / name).is_dir():
            return discover(place / name, request)
    raise _nothing_found(path)


def _is_checkpoint_file(path: Path) -> bool:
    """Tell whether a path is a file of weights that is no part of a larger set."""
    is_weights = path.is_file() and path.suffix.lower() in _WEIGHT_FILES
    if _TRAINING_STATE.fullmatch(path.name):
        return False
    return is_weights and not any(one.claims(path.name) for one in FORMATS)


def _about(start: Path, found: list[Location]) -> list[Location]:
    """Tell the readers which file the path names, if it names one."""
    if not start.is_file():
        return found
    return [replace(at, file=start) if at.weights_dir == start.parent else at for at in found]


def _in_step(place: Path, *, sharded: bool) -> list[Location]:
    """Return every set of weights that `place` holds, if it is a step or weights directory."""
    here = format_in(place, sharded=sharded)
    if here is not None:
        named = place.name in _ROLES or _FSDP_FOLDER.fullmatch(place.name)
        inner = named or (place.name in _FOLDERS and _step(place.parent.name) is not None)
        return [_location(place, place.parent if inner else place, here)]
    return [
        _location(folder, place, form)
        for folder in _folders(place)
        if (form := _format_of(folder, sharded=sharded)) is not None
    ]


def _folders(place: Path) -> list[Path]:
    if not place.is_dir():
        return []
    names = sorted(child.name for child in place.iterdir() if _FSDP_FOLDER.fullmatch(child.name))
    return [place / name for name in (*_ROLES, *sorted(names, reverse=True), *_FOLDERS)]


def _format_of(folder: Path, *, sharded: bool) -> Format | None:
    """Return a folder's format; lmms-engine may leave its EMA folder empty."""
    found = format_in(folder, sharded=sharded)
    if found is None and sharded and folder.name == _EMA_DIR and folder.is_dir():
        return RANK_FILES if _in_step(folder.with_name(_MODEL_DIR), sharded=True) else None
    return found


def _location(folder: Path, step_dir: Path, form: Format) -> Location:
    role = folder.name if folder.name in _ROLES else None
    weights = "ema" if folder.name == _EMA_DIR else "model"
    return Location(folder, step_dir, _step(step_dir.name), role, weights, form)


def _step(name: str) -> int | None:
    """Return the training step that a directory's name states."""
    matches = (pattern.fullmatch(name) for pattern in _STEPS)
    return next((int(match[1]) for match in matches if match), None)


def _choose(place: Path, found: list[Location], request: Request, *, explicit: bool) -> Location:
    if request.step is not None and explicit and found[0].step != request.step:
        raise UsageError(
            f"{place} is step {found[0].step}, but --step {request.step} was asked for",
            hint="give the directory that holds all steps, or leave --step out",
        )
    sets = sorted({at.weights for at in found}, reverse=True)
    wanted = request.weights or ("model" if "model" in sets else sets[0])
    kept = [at for at in found if at.weights == wanted]
    if not kept:
        raise UnknownFormatError(
            f"{place}: holds no {wanted} weights",
            expected=_EMA_DIR if wanted == "ema" else f"{_MODEL_DIR} or rank files",
            found=", ".join(at.weights_dir.name for at in found),
        )
    location = _choose_role(place, kept, request.role)
    if next(location.weights_dir.iterdir(), None) is None:
        raise IncompleteError(
            f"{location.weights_dir}: is empty: this run saved no {wanted} weights at this step"
        )
    return location


def _choose_role(place: Path, found: list[Location], role: Role | None) -> Location:
    roles = {at.role: at for at in found}
    if role is not None:
        if role not in roles:
            there = ", ".join(at.role or at.weights_dir.name for at in found)
            raise UnknownFormatError(f"{place}: holds no {role}", found=there)
        return roles[role]
    if len(found) > 1:
        names = " and ".join(at.role or at.weights_dir.name for at in found)
        hint = "say which one: --role actor|critic" if None not in roles else "give one of them"
        raise UsageError(f"{place}: holds {names}", hint=hint)
    return found[0]


def _steps(run: Path) -> list[tuple[int, Path]]:
    """Return the step directories of a run, the highest step first."""
    if not run.is_dir():
        return []
    found = [
        (step, child)
        for child in run.iterdir()
        if (step := _step(child.name)) is not None and child.is_dir()
    ]
    return sorted(found, reverse=True)


def _in_run(run: Path, request: Request, *, depth: int) -> list[Location]:
    """Return what the steps of a run hold; verl's torchtitan engine has steps within steps."""
    steps = _steps(run)
    if steps and request.step is not None:
        there = ", ".join(str(step) for step, _ in reversed(steps))
        steps = [(step, place) for step, place in steps if step == request.step]
        if not steps:
            raise UnknownFormatError(f"{run}: holds no step {request.step}", found=f"steps {there}")
    locations: list[Location] = []
    empty: list[Path] = []
    for _, place in steps:
        found = _in_step(place, sharded=True) or _in_step(place, sharded=False)
        if found:
            locations.append(_choose(place, found, request, explicit=False))
        elif depth and (inner := _in_run(place, replace(request, step=None), depth=depth - 1)):
            locations += inner
        elif not locations:
            empty.append(place)
    return [replace(at, empty=tuple(empty)) for at in locations]


def all_steps(run: Path, request: Request) -> list[Location]:
    """Return the checkpoints of all steps of a run, the lowest step first.

    Of a path that is one checkpoint, or lies inside one, there are none.

    Raises:
        CheckpointError: see `discover`.
    """
    place = run.resolve()
    found = discover(run, request)
    return [one for one in found[::-1] if place in one.step_dir.parents]


def step_numbers(run: Path) -> list[int]:
    """Return the steps of which a run has directories, whatever they hold, the lowest first."""
    for folder in (run, *(run / name for name in _RUN_FOLDERS)):
        if steps := _steps(folder):
            return sorted({step for step, _ in steps})
    return []


def _nothing_found(path: Path) -> UnknownFormatError:
    folder = path if path.is_dir() else path.parent
    steps = _steps(folder)
    if steps:
        folder = steps[0][1]
    files = sorted(
        child for child in folder.iterdir() if child.suffix and _is_checkpoint_file(child)
    )
    there = sorted(child.name + ("/" if child.is_dir() else "") for child in folder.iterdir())
    shown = ", ".join(there[:12]) + (f" and {len(there) - 12} more" if len(there) > 12 else "")
    return UnknownFormatError(
        f"{folder if steps else path}: no checkpoint that this version reads",
        expected="model_world_size_W_rank_R.pt (verl, lmms-engine), .metadata and *.distcp (torch "
        "DCP), pytorch_model_fsdp_0/ (accelerate, HF Trainer), shard-*-model-*.safetensors or "
        "model.safetensors, here, in actor/, critic/, model/ or in step directories "
        "(global_step_N, checkpoint-N, step-N)",
        found=shown or "an empty directory",
        hint=f"give the file itself: {files[0]}" if files else "",
    )


def is_ema_there(location: Location) -> bool:
    """Tell whether EMA weights lie in the same step directory."""
    return format_in(location.step_dir / _EMA_DIR, sharded=True) is not None


def regular_of(location: Location) -> Location | None:
    """Return where the regular weights beside EMA weights lie, if they are there."""
    folder = location.step_dir / _MODEL_DIR
    form = format_in(folder, sharded=True)
    return (
        None
        if form is None
        else replace(location, weights_dir=folder, weights="model", format=form)
    )
