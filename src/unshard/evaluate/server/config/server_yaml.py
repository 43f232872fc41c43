"""The server's YAML: its keys and their types, and what is wrong with a file, in our words.

Defaults are those of `ServerConfig` and `Profile`: only what the file gives is passed to them.
"""

import shutil
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal, Required, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    with_config,
)
from pydantic_core import ErrorDetails, PydanticCustomError
from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from unshard.errors import CheckpointError, UsageError, raise_all
from unshard.evaluate.server.config.arguments import join_arguments
from unshard.evaluate.server.config.gpus import (
    as_gpus,
    first_gpus,
    gpus_expected,
    gpus_here,
)
from unshard.evaluate.server.config.placeholders import PLACEHOLDERS, placeholders_in
from unshard.evaluate.server.config.profiles import (
    Keep,
    Kind,
    Launcher,
    Profile,
    ServerConfig,
    default_profiles,
    model_of,
)
from unshard.evaluate.values import LARGEST, Scalar, expects, problem_of, shown
from unshard.read.beside.model_config import read_config

__all__ = ["PROFILE_KEYS", "SERVER_KEYS", "read_server_yaml"]

Value = TypeVar("Value")

_CHECKED = ConfigDict(extra="forbid")
_NULL_MEANS_NO_LIMIT = frozenset({"keep_days", "count", "bytes"})
_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$"
_COMMAND = (
    "a list of arguments, which may have "
    + ", ".join(f"{{{name}}}" for name in sorted(PLACEHOLDERS))
    + "; {{ and }} are braces"
)
_PROGRAM = "a program that can be run"
_RESULTS = "a file below the output directory"
_MODEL_CONFIG = "a config.json, or a directory with config.json and tokenizer"
_ENVIRONMENT = 'a mapping of names to strings or numbers (`"true"` in quotes)'


def _must(holds: Callable[[Value], bool]) -> AfterValidator:
    """Make a validator of what a type cannot say."""

    def check(value: Value) -> Value:
        if not holds(value):
            raise ValueError
        return value

    return AfterValidator(check)


def _list(value: object) -> object:
    return value if isinstance(value, list) else [value]


def _absolute(value: object, info: ValidationInfo[Path]) -> Path:
    """Return a path; a relative one starts at the file's directory, which is the context."""
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError
    return info.context / Path(value).expanduser()


def _program(text: str, info: ValidationInfo[Path]) -> str:
    """Return a program that exists. A link is not resolved: it is what names an environment."""
    program = str(_absolute(text, info)) if "/" in text else text
    if shutil.which(program) is None:
        raise PydanticCustomError("expected", "a program", {"expected": _PROGRAM})
    return program


def _started(command: tuple[str, ...], info: ValidationInfo[Path]) -> tuple[str, ...]:
    """Return a command whose program exists, if it is a path: others may be in another PATH."""
    if "/" not in command[0]:
        return command
    return (_program(command[0], info), *command[1:])


def _number_as_text(value: object) -> object:
    """Return a number as text; not a boolean, because YAML makes one of yes, no, on and off."""
    return str(value) if type(value) in {int, float} else value


def _gpu_names(value: object) -> tuple[str, ...]:
    is_list = isinstance(value, list) and all(type(one) in {int, str} for one in value)
    gpus = as_gpus(map(str, value)) if is_list and isinstance(value, list) else None
    if gpus is None:
        raise ValueError
    return gpus


def _is_model_config(path: Path) -> bool:
    try:
        read_config(path / "config.json" if path.is_dir() else path)
    except (CheckpointError, OSError):
        return False
    return True


def _are_folders(paths: tuple[Path, ...]) -> bool:
    return all(path.is_dir() for path in paths)


def _has_known_placeholders(command: tuple[str, ...]) -> bool:
    return placeholders_in(command) <= PLACEHOLDERS


def _is_below_output(text: str) -> bool:
    return not Path(text).is_absolute() and ".." not in Path(text).parts


def _without_nulls(value: object) -> object:
    """Leave out keys without a value, but for those of which null means something."""
    if not isinstance(value, dict):
        return value
    return {
        key: item for key, item in value.items() if item is not None or key in _NULL_MEANS_NO_LIMIT
    }


Bare = Annotated[str, Field(strict=True, pattern=r"^[^\x00]*[^\x00\s][^\x00]*$")]
Text = Annotated[Bare, expects("a string that is not empty")]
Texts = Annotated[tuple[Bare, ...], BeforeValidator(_list), expects("a list of strings")]
Place = Annotated[Path, BeforeValidator(_absolute), expects("a string that is not empty")]
Places = Annotated[tuple[Place, ...], BeforeValidator(_list), expects("a list of strings")]
Count = Annotated[int, Field(strict=True, ge=0, le=LARGEST), expects("a whole number, at least 0")]
Positive = Annotated[
    int, Field(strict=True, ge=1, le=LARGEST), expects("a whole number, at least 1")
]
Retries = Annotated[int, Field(strict=True, ge=0, le=100), expects("a whole number, 0 to 100")]
Port = Annotated[int, Field(strict=True, ge=0, le=65535), expects("a whole number, 0 to 65535")]
Seconds = Annotated[float, Field(strict=True, gt=0, le=1e9), expects("seconds, above zero")]
Gpus = Annotated[
    Annotated[int, Field(strict=True, ge=0, le=1024)]
    | Annotated[tuple[str, ...], BeforeValidator(_gpu_names)],
    expects("how many, or a list of their numbers or ids"),
]
Program = Annotated[Text, AfterValidator(_program)]
Folders = Annotated[Places, _must(_are_folders), expects("directories that exist")]
Environment = Annotated[
    dict[
        Annotated[str, Field(strict=True, pattern=r"^[^=\x00]+$")],
        Annotated[str, BeforeValidator(_number_as_text), Field(strict=True, pattern=r"^[^\x00]*$")],
    ],
    expects(_ENVIRONMENT),
]
ModelArgs = Annotated[
    dict[Annotated[str, Field(min_length=1)], Scalar],
    expects("a mapping of names to strings, numbers or booleans"),
]


@with_config(_CHECKED)
class PinQuota(TypedDict, total=False):
    """How much the pins of a run may keep."""

    count: Count | None
    bytes: Count | None


class CommonKeys(TypedDict, total=False):
    """The keys that profiles of every kind have."""

    environment: Environment
    allowed_tasks: Texts
    timeout: Seconds
    retries: Retries
    gpus: Count
    keep: Annotated[Keep, expects(", ".join(Keep))]
    best_metric: Text
    results_bytes: Positive
    config: Annotated[Place, _must(_is_model_config), expects(_MODEL_CONFIG)]


class HarnessKeys(CommonKeys, total=False):
    """The keys that lm-eval and lmms-eval have."""

    interpreter: Program
    model: Text
    checkpoint_key: Text
    model_args: ModelArgs
    allowed_model_args: Texts
    launcher: Annotated[Launcher, expects(", ".join(Launcher))]


@with_config(_CHECKED)
class LmEvalKeys(HarnessKeys, total=False):
    """The keys of a profile for lm-eval."""

    kind: Required[Literal[Kind.LM_EVAL]]
    include_paths: Folders


@with_config(_CHECKED)
class LmmsEvalKeys(HarnessKeys, total=False):
    """The keys of a profile for lmms-eval."""

    kind: Required[Literal[Kind.LMMS_EVAL]]
    include_paths: Annotated[Folders, Field(max_length=1), expects("at most 1 directory")]
    allowed_models: Texts


@with_config(_CHECKED)
class CommandKeys(CommonKeys, total=False):
    """The keys of a profile for a command."""

    kind: Required[Literal[Kind.COMMAND]]
    command: Required[
        Annotated[
            Texts,
            Field(min_length=1),
            _must(_has_known_placeholders),
            expects(_COMMAND),
            AfterValidator(_started),
        ]
    ]
    results: Annotated[
        Text,
        _must(_is_below_output),
        expects(_RESULTS),
    ]


ProfileKeys = Annotated[
    LmEvalKeys | LmmsEvalKeys | CommandKeys,
    Field(discriminator="kind"),
    BeforeValidator(_without_nulls),
]


@with_config(_CHECKED)
class ServerKeys(TypedDict, total=False):
    """The keys of the file."""

    roots: Places
    gpus: Gpus
    host: Text
    port: Port
    token_file: Place
    work_directory: Place
    pin_quota: Annotated[PinQuota, BeforeValidator(_without_nulls)]
    keep_days: Positive | None
    profiles: dict[Annotated[str, Field(pattern=_NAME)], ProfileKeys]


_FILE = TypeAdapter(Annotated[ServerKeys, BeforeValidator(_without_nulls)])

SERVER_KEYS = frozenset(ServerKeys.__annotations__)
PROFILE_KEYS: Mapping[Kind, frozenset[str]] = {
    Kind.LM_EVAL: frozenset(LmEvalKeys.__annotations__),
    Kind.LMMS_EVAL: frozenset(LmmsEvalKeys.__annotations__),
    Kind.COMMAND: frozenset(CommandKeys.__annotations__),
}
"""The keys of a profile, by its kind."""


def read_server_yaml(path: Path, gpus: tuple[str, ...] | None = None) -> ServerConfig:
    """Read a configuration file; what it does not give is as in `ServerConfig.default`.

    Relative paths start at the file's directory.

    Args:
        path: of the file.
        gpus: others than the file's.

    Raises:
        UsageError: the file cannot be read, or a key is unknown or has a wrong value.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read", found=str(error)) from error
    base = path.absolute().parent
    try:
        keys = _FILE.validate_python({} if document is None else document, context=base)
    except ValidationError as error:
        problems = [_problem(path, one) for one in error.errors(include_url=False)]
        raise_all(UsageError, f"{path} cannot be read", problems)
        raise
    return _server(path, keys, gpus)


def _server(path: Path, keys: ServerKeys, gpus: tuple[str, ...] | None) -> ServerConfig:
    wanted = keys.pop("gpus", None)
    gpus = _gpus(wanted, what=f"{path}: gpus {wanted}") if gpus is None else gpus
    quota = {f"pin_{name}": value for name, value in keys.pop("pin_quota", {}).items()}
    given = keys.pop("profiles", None)
    if given is None:
        profiles = default_profiles(gpus)
    else:
        profiles = {name: _profile(path, name, one, len(gpus)) for name, one in given.items()}
    return ServerConfig(gpus=gpus, profiles=profiles, **keys, **quota)  # type: ignore[arg-type,misc]  # validated


def _gpus(wanted: int | tuple[str, ...] | None, *, what: str) -> tuple[str, ...]:
    if wanted is None:
        return gpus_here()
    return first_gpus(wanted, what=what) if isinstance(wanted, int) else wanted


def _profile(path: Path, name: str, keys: ProfileKeys, gpus: int) -> Profile:
    """Return a profile, after what concerns several of its keys, or the machine, is checked."""
    values: dict[str, object] = {**keys}
    kind = keys["kind"]
    where = f"{path}: profiles.{name} (kind {kind})"
    if keys["kind"] is not Kind.COMMAND:
        join_arguments(keys.get("model_args", {}), what=f"{where}: model_args")
    count = keys.get("gpus", min(1, gpus))
    if count > gpus:
        raise UsageError(
            f"{where}: gpus cannot be read", expected=gpus_expected(gpus), found=shown(count)
        )
    if keys.get("keep") is Keep.BEST and "best_metric" not in keys:
        raise UsageError(
            f"{where}: best_metric is missing", expected="TASK/METRIC, because of `keep: best`"
        )
    if "timeout" in values:
        values["timeout_s"] = values.pop("timeout")
    return Profile(name, **{"model": model_of(kind), **values, "gpus": count})  # type: ignore[arg-type]  # validated


def _problem(path: Path, problem: ErrorDetails) -> UsageError:
    """Return what pydantic found, as an error that names the file and the key."""
    where, known, key = str(path), SERVER_KEYS, ""
    match problem["loc"]:
        case ("profiles", name, "[key]"):
            expected = "letters, digits, and `_`, `.`, `-`"
            return UsageError(f"{path}: profiles.{name} cannot be a name", expected=expected)
        case ("profiles", name):
            where = f"{path}: profiles.{name}"
        case ("profiles", name, kind, found):
            where, key = f"{path}: profiles.{name} (kind {kind})", str(found)
            known = PROFILE_KEYS[Kind(str(kind))]
        case ("pin_quota", found):
            where, key = f"{path}: pin_quota", str(found)
            known = frozenset(PinQuota.__annotations__)
        case (found,):
            key = str(found)
    match problem["type"]:
        case "union_tag_not_found" | "union_tag_invalid":
            chosen = problem["input"].get("kind")
            kinds = ", ".join(Kind)
            return UsageError(f"{where}: kind cannot be read", expected=kinds, found=shown(chosen))
        case "missing":
            return UsageError(f"{where}: {key} is missing", expected=_COMMAND)
        case "extra_forbidden":
            close = get_close_matches(key, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else ""
            listed = ", ".join(sorted(known))
            return UsageError(f"{where} has the unknown key {key!r}", expected=listed, hint=hint)
        case "dict_type" | "model_attributes_type":
            problem["ctx"] = {"expected": "a mapping"}
    return problem_of(
        problem, f"{where}: {key} cannot be read" if key else f"{where} cannot be read"
    )
