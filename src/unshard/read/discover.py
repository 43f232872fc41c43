"""Find the checkpoint that a path means, whatever level of its tree the path points to.

A *step directory* (`global_step_10`, `checkpoint-10`) holds one checkpoint; its weights lie in it,
or in a folder named after a role (verl) or a weight set (lmms-engine). A *run directory* holds
several step directories. Knows names and places; opens no file.

Sources: verl's FSDPCheckpointManager, lmms-engine's fsdp2_trainer.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unshard.errors import IncompleteError, UnknownFormatError, UsageError
from unshard.read.rank_files import rank_files

__all__ = ["Location", "Request", "Role", "Weights", "discover", "is_ema_there"]

Role = str  # "actor" | "critic"
Weights = str  # "model" | "ema"

_STEP = re.compile(r"(?:global_step_|checkpoint-|step-|step_)(\d+)")
_MODEL_DIR, _EMA_DIR = "pytorch_model_fsdp_0", "pytorch_ema_model_fsdp_0"
_ROLES = ("actor", "critic")
_UPWARD = 3
_OTHER_FORMATS = (
    (".metadata", "a torch DCP checkpoint (.metadata)"),
    ("*.metadata", "a torch DCP checkpoint saved without collectives"),
    ("*.distcp", "files of a torch DCP checkpoint"),
    ("shard-*-model-*-of-*.safetensors", "sharded safetensors (DCP's HuggingFaceStorageWriter)"),
    ("pytorch_model_fsdp*.bin", "an FSDP checkpoint of accelerate (pytorch_model_fsdp*.bin)"),
    ("mp_rank_*_model_states.pt", "a DeepSpeed checkpoint"),
    ("zero_pp_rank_*", "a DeepSpeed ZeRO checkpoint"),
    ("common.pt", "a Megatron-core distributed checkpoint"),
    ("*.safetensors", "a Hugging Face model that is whole already"),
)


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for beside the path: step, role, weight set; None for no preference."""

    step: int | None = None
    role: Role | None = None
    weights: Weights | None = None


@dataclass(frozen=True, slots=True)
class Location:
    """Where one set of weights lies.

    Attributes:
        weights_dir: the directory that holds the rank files.
        step_dir: the checkpoint's own directory; `weights_dir` itself or its parent.
        step: training step, where the step directory's name says it.
        role: "actor" or "critic" for verl's RL checkpoints, else None.
        weights: "model" or "ema".
    """

    weights_dir: Path
    step_dir: Path
    step: int | None
    role: Role | None
    weights: Weights

    @property
    def default_output(self) -> Path:
        """`merged/<step directory>[-critic][-ema]` beside the step directory."""
        suffix = "-critic" if self.role == "critic" else ""
        suffix += "-ema" if self.weights == "ema" else ""
        return self.step_dir.parent / "merged" / (self.step_dir.name + suffix)


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
    start = path.resolve()
    if start.is_file():
        start = start.parent
    for place in _upward(start):
        found = _in_step(place)
        if found:
            hinted = _narrow(start, place, found)
            return [_choose(place, hinted, request, explicit=True)]
        if place == start and (steps := _steps(start)):
            return _in_run(start, steps, request)
    raise _nothing_found(path)


def _upward(start: Path) -> Iterator[Path]:
    yield start
    yield from list(start.parents)[:_UPWARD]


def _in_step(place: Path) -> list[Location]:
    """Return every set of weights that `place` holds, if it is a step or weights directory."""
    if not place.is_dir():
        return []
    if rank_files(place):
        return [_of_weights_dir(place)]
    folders = [place / name for name in (*_ROLES, _MODEL_DIR, _EMA_DIR)]
    return [_of_weights_dir(folder) for folder in folders if _holds_weights(folder)]


def _holds_weights(folder: Path) -> bool:
    """Tell whether a folder is there for weights; lmms-engine may leave its EMA folder empty."""
    if not folder.is_dir():
        return False
    if folder.name == _EMA_DIR:
        return (folder.parent / _MODEL_DIR).is_dir() or bool(rank_files(folder))
    return bool(rank_files(folder))


def _of_weights_dir(folder: Path) -> Location:
    named = folder.name in (*_ROLES, _MODEL_DIR, _EMA_DIR)
    step_dir = folder.parent if named else folder
    match = _STEP.fullmatch(step_dir.name)
    role = folder.name if folder.name in _ROLES else None
    weights = "ema" if folder.name == _EMA_DIR else "model"
    return Location(folder, step_dir, int(match[1]) if match else None, role, weights)


def _narrow(start: Path, place: Path, found: list[Location]) -> list[Location]:
    """Keep the weights that a path inside the step directory points into, if any."""
    inside = [at for at in found if start.is_relative_to(at.weights_dir)]
    return inside if start != place and inside else found


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
    if not rank_files(location.weights_dir):
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
        names = " and ".join(str(at.role) for at in found)
        raise UsageError(f"{place}: holds {names}", hint="say which one: --role actor|critic")
    return found[0]


def _steps(run: Path) -> dict[int, Path]:
    """Return the step directories of a run, the highest step first."""
    if not run.is_dir():
        return {}
    found = {
        int(match[1]): child
        for child in run.iterdir()
        if (match := _STEP.fullmatch(child.name)) and child.is_dir()
    }
    return dict(sorted(found.items(), reverse=True))


def _in_run(run: Path, steps: dict[int, Path], request: Request) -> list[Location]:
    if request.step is not None:
        if request.step not in steps:
            there = ", ".join(map(str, sorted(steps)))
            raise UnknownFormatError(f"{run}: holds no step {request.step}", found=f"steps {there}")
        steps = {request.step: steps[request.step]}
    locations = []
    for place in steps.values():
        found = _in_step(place)
        if found:
            locations.append(_choose(place, found, request, explicit=False))
    if not locations:
        raise _nothing_found(next(iter(steps.values())))
    return locations


def _nothing_found(path: Path) -> UnknownFormatError:
    folder = path if path.is_dir() else path.parent
    recognised = [name for pattern, name in _OTHER_FORMATS if next(folder.glob(pattern), None)]
    there = sorted(child.name + ("/" if child.is_dir() else "") for child in folder.iterdir())
    shown = ", ".join(there[:12]) + (f" and {len(there) - 12} more" if len(there) > 12 else "")
    return UnknownFormatError(
        f"{path}: no checkpoint that this version reads",
        expected="model_world_size_W_rank_R.pt (verl, lmms-engine), here, in actor/, critic/, "
        f"{_MODEL_DIR}/ or in step directories (global_step_N, checkpoint-N)",
        found=(f"{recognised[0]}: " if recognised else "") + (shown or "an empty directory"),
    )


def is_ema_there(location: Location) -> bool:
    """Tell whether EMA weights lie in the same step directory."""
    folder = location.step_dir / _EMA_DIR
    return folder.is_dir() and bool(rank_files(folder))
