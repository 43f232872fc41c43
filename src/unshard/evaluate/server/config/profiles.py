"""The evaluators that a server is configured with (profiles), and which one a client's name means.

Everything that decides which program runs, with which code, is here, on the server; a client only
chooses a profile by its name. A profile is what server.yaml has below that name. When a file is
read, it is pydantic's context: relative paths start at its directory, and programs must exist.
"""

import re
import shutil
import sys
from collections.abc import Mapping
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal, TypeGuard

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from unshard.errors import CheckpointError, UsageError
from unshard.evaluate.server.config.arguments import PLACEHOLDERS, placeholders_in
from unshard.evaluate.server.config.harmless import CHECKPOINT_KEYS, GUARDED_TYPES, MODEL_TYPES
from unshard.evaluate.values import Scalar, expected, expects, whole
from unshard.read.model_config import read_config
from unshard.stores.remote_path import is_url, path_of

COMMAND_EXPECTED = (
    "a list of arguments, which may have "
    + ", ".join(f"{{{name}}}" for name in sorted(PLACEHOLDERS))
    + "; {{ and }} are braces"
)
_VLLM = "vllm"
DIRECT_MODELS = ("hf", _VLLM)
"""The types of model of lm-eval that can be made of shards."""

_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", re.ASCII)


def drop_nulls(value: object) -> object:
    """Leave out keys without a value, but for `keep_days`, where null means no limit."""
    if isinstance(value, BaseModel):
        return value
    if not isinstance(value, dict):
        raise expected("a mapping")
    # Keys become texts, because YAML makes a boolean of a bare `on`.
    return {str(key): one for key, one in value.items() if one is not None or key == "keep_days"}


def _list(value: object) -> object:
    return value if isinstance(value, list | tuple) else [value]


def _absolute(value: object, info: ValidationInfo[Path | None]) -> Path:
    if isinstance(value, Path):
        return value
    if info.context is None or not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError
    return info.context.absolute().parent / Path(value).expanduser()


def _absolute_or_address(value: object, info: ValidationInfo[Path | None]) -> Path:
    """Return a directory, or an address in an object store."""
    return path_of(value) if isinstance(value, str) and is_url(value) else _absolute(value, info)


def _program(text: str, info: ValidationInfo[Path | None]) -> str:
    """Return a program that exists. A link is not resolved: it is what names an environment."""
    if info.context is None:
        return text
    program = str(_absolute(text, info)) if "/" in text else text
    if shutil.which(program) is None:
        raise expected("a program that can be run")
    return program


def _started(command: tuple[str, ...], info: ValidationInfo[Path | None]) -> tuple[str, ...]:
    """Return a command whose program exists, if it is a path: others may be in another PATH."""
    return (_program(command[0], info), *command[1:]) if "/" in command[0] else command


def _placed(command: tuple[str, ...], info: ValidationInfo[Path | None]) -> tuple[str, ...]:
    """Return a command whose program, if it is a path, starts at the file's directory."""
    if info.context is None or not command or "/" not in command[0]:
        return command
    return (str(_absolute(command[0], info)), *command[1:])


def _as_text(value: object) -> object:
    """Return a number as text; not a boolean, because YAML makes one of yes, no, on and off."""
    return str(value) if type(value) in {int, float} else value


def _is_model_config(path: Path) -> bool:
    try:
        read_config(path / "config.json" if path.is_dir() else path)
    except (CheckpointError, OSError):
        return False
    return True


def _are_folders(paths: tuple[Path, ...]) -> bool:
    return all(path.is_dir() for path in paths)


def _is_command(command: tuple[str, ...]) -> bool:
    return command != () and placeholders_in(command) <= PLACEHOLDERS


def _is_below_output(text: str) -> bool:
    return not Path(text).is_absolute() and ".." not in Path(text).parts


Bare = Annotated[str, Field(strict=True, pattern=r"^[^\x00]*[^\x00\s][^\x00]*$")]
NonEmptyText = Annotated[Bare, expects("a string that is not empty")]
Texts = Annotated[tuple[Bare, ...], BeforeValidator(_list), expects("a list of strings")]
Place = Annotated[Path, BeforeValidator(_absolute), expects("a string that is not empty")]
Places = Annotated[tuple[Place, ...], BeforeValidator(_list), expects("a list of strings")]
Root = Annotated[
    Path, BeforeValidator(_absolute_or_address), expects("a directory, or s3://bucket/folder")
]
Roots = Annotated[tuple[Root, ...], BeforeValidator(_list), expects("a list of strings")]
Folders = Annotated[Places, expects("directories that exist", _are_folders)]
Environment = Annotated[
    Mapping[
        Annotated[str, Field(strict=True, pattern=r"^[^=\x00]+$")],
        Annotated[str, BeforeValidator(_as_text), Field(strict=True, pattern=r"^[^\x00]*$")],
    ],
    expects('a mapping of names to strings or numbers (`"true"` in quotes)'),
]
ModelConfig = Annotated[
    Place,
    expects("a config.json, or a directory with config.json and tokenizer", _is_model_config),
]
ModelArgs = Annotated[
    Mapping[Annotated[str, Field(min_length=1)], Scalar],
    expects("a mapping of names to strings, numbers or booleans"),
]
PlacedCommand = Annotated[Texts, expects("a list of arguments"), AfterValidator(_placed)]
Command = Annotated[Texts, expects(COMMAND_EXPECTED, _is_command), AfterValidator(_started)]


class Weights(StrEnum):
    """How an evaluator gets the weights of a checkpoint; which of its weights, a request says."""

    MERGED = "merged"
    """It loads a merged model from the server's disk."""
    DIRECT = "direct"
    """It reads them from the shards, and nothing is merged."""


def _needed(metric: str | None, info: ValidationInfo) -> str | None:
    if metric is None and info.data.get("keep") == "best":
        because = "TASK/METRIC, because of `keep: best`"
        raise PydanticCustomError("missing", "missing", {"expected": because})
    return metric


class CommonKeys(BaseModel):
    """Keys of every profile; those that its kind does not have are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    environment: Environment = {}
    """Variables that the evaluator gets in addition to the server's."""
    allowed_tasks: Texts = ()
    """Shell patterns, one of which a task must match; empty: every task may run."""
    timeout: Annotated[float, Field(strict=True, gt=0, le=1e9), expects("seconds, above zero")] = (
        24 * 3600.0
    )
    """Seconds after which an attempt is ended."""
    retries: Annotated[int, whole(0, 100)] = 1
    """How many more attempts a failed one gets."""
    gpus: Annotated[int, whole(0)] = 0
    """How many a job gets that does not choose; in a file: 1, if the server has any."""
    order: Annotated[Literal["oldest", "newest"], expects("oldest, newest")] = "oldest"
    """Which of a run's queued steps is first: that which was submitted first, or the highest."""
    max_lag: Annotated[int, whole(1)] | None = None
    """How many steps of a run wait at most: lower ones are skipped; None: none is skipped."""
    weights: Annotated[Weights, expects(", ".join(Weights))] = Weights.MERGED
    """Whether the checkpoint is merged, or read by the evaluator itself."""
    keep: Annotated[Literal["none", "best", "all"], expects("none, best, all")] = "none"
    """Which merged models are kept after evaluation."""
    best_metric: Annotated[
        NonEmptyText | None, Field(validate_default=True), AfterValidator(_needed)
    ] = None
    """What "best" is measured by, "task/metric"; after a "-" the lowest value is the best."""
    config: ModelConfig | None = None
    """A config.json, or a directory with config and tokenizer, for checkpoints without one; None:
    only a command can evaluate those."""
    results_bytes: Annotated[int, whole(1)] = 64 << 20
    """The largest file of results that is read, in bytes."""


class HarnessKeys(CommonKeys):
    """Keys of the profiles of lm-eval and lmms-eval."""

    interpreter: Annotated[NonEmptyText, AfterValidator(_program)] = sys.executable
    """The Python that has the evaluator installed."""
    include_paths: Folders = ()
    """Directories with further tasks."""
    model: NonEmptyText
    """The type of model, as the evaluator calls it."""
    checkpoint_key: NonEmptyText = "pretrained"
    """The argument of the model that takes the checkpoint."""
    model_args: ModelArgs = {}
    """Arguments of the model that no client can change."""
    allowed_model_args: Texts = ()
    """Shell patterns of the arguments, of the model and of generation, that clients may choose in
    addition to those known to be harmless."""
    launcher: Annotated[Literal["accelerate", "none"], expects("accelerate, none")] = "accelerate"
    """How a job with several GPUs uses them: by a process for each, which has the whole model and a
    part of the data, or by one process, whose model spreads over them by itself (vllm)."""


class LmEvalProfile(HarnessKeys):
    """A profile of lm-eval."""

    kind: Literal["lm-eval"] = "lm-eval"
    model: NonEmptyText = "hf"
    idle_timeout: Annotated[
        float, Field(strict=True, gt=0, le=1e9), expects("seconds, above zero")
    ] = 600.0
    """Seconds for which an engine that is kept between jobs waits for the next one."""
    resume: Annotated[bool, Field(strict=True), expects("true or false", or_boolean=True)] = False
    """Whether an attempt continues with the answers of one that was interrupted before it."""


class LmmsEvalProfile(HarnessKeys):
    """A profile of lmms-eval."""

    kind: Literal["lmms-eval"] = "lmms-eval"
    include_paths: Annotated[Folders, Field(max_length=1)] = ()
    model: NonEmptyText = "huggingface"
    allowed_models: Texts = MODEL_TYPES
    """Shell patterns of the other types of model that clients may choose."""


class CommandProfile(CommonKeys):
    """A profile of any other program."""

    kind: Literal["command"] = "command"
    command: Command
    """The arguments, with placeholders such as {checkpoint}; no shell reads them."""
    results: Annotated[
        NonEmptyText, expects("a file below the output directory", _is_below_output)
    ] = "results.json"
    """The file below {output} that the command writes its numbers to."""


HarnessProfile = LmEvalProfile | LmmsEvalProfile
Profile = HarnessProfile | CommandProfile
ProfileKeys = Annotated[Profile, Field(discriminator="kind"), BeforeValidator(drop_nulls)]
"""A profile in a file, where `kind` must be given."""
KINDS: Mapping[str, type[Profile]] = {
    "lm-eval": LmEvalProfile,
    "lmms-eval": LmmsEvalProfile,
    "command": CommandProfile,
}


def default_profiles(gpus: tuple[str, ...]) -> dict[str, Profile]:
    """Return a profile of every kind, for a server with these GPUs.

    lm-eval and lmms-eval are those of this Python, if it has them; the command measures the weights
    themselves.
    """
    program = (sys.executable, "-m", "unshard.evaluate.server.evaluators.weights")
    return {
        "lm-eval": LmEvalProfile(gpus=min(1, len(gpus))),
        "lmms-eval": LmmsEvalProfile(gpus=min(1, len(gpus))),
        "command": CommandProfile(
            command=(*program, "{checkpoint}", "{output}/results.json", "{tasks}"),
            allowed_tasks=("size", "values"),
            gpus=0,
        ),
    }


def keeps_engine(profile: Profile) -> TypeGuard[LmEvalProfile]:
    """Return whether a profile's jobs run on an engine that is kept between them."""
    if not isinstance(profile, LmEvalProfile):
        return False
    return profile.weights is Weights.DIRECT and profile.model == _VLLM


def base_of(name: str) -> str:
    """Return the profile's own name in "profile:type", which names a type of model, too."""
    return name.partition(":")[0]


def profile_named(profiles: Mapping[str, Profile], name: str) -> Profile:
    """Return a profile; "name:type" is a profile of lmms-eval with another type of model.

    Raises:
        UsageError: no profile has this name, or it does not allow the type.
    """
    base, _, model = name.partition(":")
    if base not in profiles:
        known = ", ".join(sorted(profiles)) or "none"
        raise UsageError(f"unknown profile {base!r:.200}", expected=f"one of: {known}")
    profile = profiles[base]
    if name == base:
        return profile
    if not isinstance(profile, LmmsEvalProfile):
        raise UsageError(f"profile {base}: its model cannot be chosen", found=f"{name!r:.200}")
    if model == profile.model:
        return profile
    if not _MODEL.fullmatch(model) or not _allows_model(profile, model):
        raise UsageError(
            f"profile {base}: model {model!r:.200} is not allowed",
            expected=", ".join([profile.model, *profile.allowed_models]),
            hint="other types may run code of a checkpoint: the profile can allow them by "
            "`allowed_models`",
        )
    key = CHECKPOINT_KEYS.get(model, "pretrained")
    changed: dict[str, object] = {"model": model, "checkpoint_key": key}
    if not _is_trusted(profile, model):
        changed["model_args"] = {**profile.model_args, "trust_remote_code": False}
    return profile.model_copy(update=changed)


def resolve_name(profiles: Mapping[str, Profile], name: str) -> str:
    """Return the profile that a name means: its own, or "profile:type" for a type of model.

    lmms-engine and lmms-eval's clients name a type of model: then the best is a profile for
    lmms-eval of this type, else one that allows it.

    Raises:
        UsageError: no profile fits.
    """
    if ":" in name or name in profiles:
        return name
    lmms = {key: one for key, one in profiles.items() if isinstance(one, LmmsEvalProfile)}
    fitting = [key for key, profile in lmms.items() if profile.model == name]
    fitting += [f"{key}:{name}" for key, profile in lmms.items() if _allows_model(profile, name)]
    if fitting:
        return fitting[0]
    known = ", ".join(sorted(profiles)) or "none"
    raise UsageError(
        f"unknown profile {name!r:.200}"
        + (", and no profile for lmms-eval allows this type of model" if lmms else ""),
        expected=f"one of: {known}",
        hint="a profile can allow more types of model by `allowed_models`" if lmms else "",
    )


def _allows_model(profile: LmmsEvalProfile, model: str) -> bool:
    """Return whether a client may choose a type of model."""
    is_default = profile.allowed_models == MODEL_TYPES
    return _is_trusted(profile, model) or (is_default and model in GUARDED_TYPES)


def _is_trusted(profile: LmmsEvalProfile, model: str) -> bool:
    return any(fnmatchcase(model, pattern) for pattern in profile.allowed_models)
