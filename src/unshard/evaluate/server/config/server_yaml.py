"""The server's YAML: its keys, and what is wrong with a file, in our words.

Defaults are those of `ServerConfig` and `Profile`: only what the file gives is passed to them.
"""

import shutil
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal, Required

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
from pydantic_core import ErrorDetails
from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from unshard.errors import CheckpointError, UsageError, raise_all
from unshard.evaluate.server.config.arguments import PLACEHOLDERS, join_arguments, placeholders_in
from unshard.evaluate.server.config.profiles import (
    Keep,
    Kind,
    Launcher,
    Profile,
    ServerConfig,
    default_profiles,
    model_of,
)
from unshard.evaluate.server.gpus import as_gpus, find_gpus, first_gpus, gpus_expected
from unshard.evaluate.values import Scalar, expected, expects, problem_of, shown, whole
from unshard.read.beside.model_config import read_config

__all__ = ["PROFILE_KEYS", "SERVER_KEYS", "read_server_yaml"]

_NULL_MEANS_NO_LIMIT = frozenset({"keep_days", "count", "bytes"})
_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$"

_COMMAND_EXPECTED = (
    "a list of arguments, which may have "
    + ", ".join(f"{{{name}}}" for name in sorted(PLACEHOLDERS))
    + "; {{ and }} are braces"
)


def _list(value: object) -> object:
    return value if isinstance(value, list) else [value]


def _absolute(value: object, info: ValidationInfo[Path]) -> Path:
    """Return a path; a relative one starts at the directory of the file, which is the context."""
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError
    return info.context.parent / Path(value).expanduser()


def _program(text: str, info: ValidationInfo[Path]) -> str:
    """Return a program that exists. A link is not resolved: it is what names an environment."""
    program = str(_absolute(text, info)) if "/" in text else text
    if shutil.which(program) is None:
        raise expected("a program that can be run")
    return program


def _started(command: tuple[str, ...], info: ValidationInfo[Path]) -> tuple[str, ...]:
    """Return a command whose program exists, if it is a path: others may be in another PATH."""
    return (_program(command[0], info), *command[1:]) if "/" in command[0] else command


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
Environment = Annotated[
    Mapping[
        Annotated[str, Field(strict=True, pattern=r"^[^=\x00]+$")],
        Annotated[str, BeforeValidator(_as_text), Field(strict=True, pattern=r"^[^\x00]*$")],
    ],
    expects('a mapping of names to strings or numbers (`"true"` in quotes)'),
]
Folders = Annotated[Places, expects("directories that exist", _are_folders)]


def _given(value: object) -> object:
    """Leave out keys without a value, but for those of which null means something."""
    if not isinstance(value, dict):
        raise expected("a mapping")
    kept = _NULL_MEANS_NO_LIMIT  # keys become texts, because YAML makes a boolean of a bare `on`
    return {str(key): one for key, one in value.items() if one is not None or key in kept}


def _gpu_names(value: object) -> object:
    """Return a list of GPUs as names; None, which is refused, if one is not a number or an id."""
    if isinstance(value, list):
        are_names = all(type(one) in {int, str} for one in value)
        return as_gpus(map(str, value)) if are_names else None
    return value


@with_config(ConfigDict(extra="forbid"))
class _CommonKeys(TypedDict, total=False):
    environment: Environment
    allowed_tasks: Texts
    timeout: Annotated[float, Field(strict=True, gt=0, le=1e9), expects("seconds, above zero")]
    retries: Annotated[int, whole(0, 100)]
    gpus: Annotated[int, whole(0)]
    keep: Annotated[Keep, expects(", ".join(Keep))]
    best_metric: NonEmptyText
    config: Annotated[
        Place,
        expects("a config.json, or a directory with config.json and tokenizer", _is_model_config),
    ]
    results_bytes: Annotated[int, whole(1)]


class _HarnessKeys(_CommonKeys, total=False):
    interpreter: Annotated[NonEmptyText, AfterValidator(_program)]
    model: NonEmptyText
    checkpoint_key: NonEmptyText
    model_args: Annotated[
        Mapping[Annotated[str, Field(min_length=1)], Scalar],
        expects("a mapping of names to strings, numbers or booleans"),
    ]
    allowed_model_args: Texts
    launcher: Annotated[Launcher, expects(", ".join(Launcher))]


class LmEvalKeys(_HarnessKeys, total=False):
    """A profile of lm-eval."""

    kind: Required[Literal["lm-eval"]]
    include_paths: Folders


class LmmsEvalKeys(_HarnessKeys, total=False):
    """A profile of lmms-eval."""

    kind: Required[Literal["lmms-eval"]]
    include_paths: Annotated[Folders, Field(max_length=1)]
    allowed_models: Texts


class CommandKeys(_CommonKeys, total=False):
    """A profile of a command."""

    kind: Required[Literal["command"]]
    command: Required[
        Annotated[Texts, expects(_COMMAND_EXPECTED, _is_command), AfterValidator(_started)]
    ]
    results: Annotated[NonEmptyText, expects("a file below the output directory", _is_below_output)]


ProfileKeys = Annotated[
    LmEvalKeys | LmmsEvalKeys | CommandKeys,
    Field(discriminator="kind"),
    BeforeValidator(_given),
]
"""A profile in the file: other keys than those of its kind are refused."""


@with_config(ConfigDict(extra="forbid"))
class PinQuotaKeys(TypedDict, total=False):
    """How much the pins of a run may keep."""

    count: Annotated[int, whole(0)] | None
    bytes: Annotated[int, whole(0)] | None


@with_config(ConfigDict(extra="forbid"))
class ServerKeys(TypedDict, total=False):
    """The keys of the file."""

    roots: Places
    gpus: Annotated[
        Annotated[int, whole(0, 1024)] | tuple[str, ...],
        BeforeValidator(_gpu_names),
        expects("how many, or a list of their numbers or ids"),
    ]
    host: NonEmptyText
    port: Annotated[int, whole(0, 65535)]
    token_file: Place
    work_directory: Place
    pin_quota: Annotated[PinQuotaKeys, BeforeValidator(_given)]
    keep_days: Annotated[int, whole(1)] | None
    profiles: dict[Annotated[str, Field(pattern=_NAME)], ProfileKeys]


_FILE = TypeAdapter[ServerKeys](Annotated[ServerKeys, BeforeValidator(_given)])
SERVER_KEYS = frozenset(ServerKeys.__annotations__)
PROFILE_KEYS = {
    Kind.LM_EVAL: frozenset(LmEvalKeys.__annotations__),
    Kind.LMMS_EVAL: frozenset(LmmsEvalKeys.__annotations__),
    Kind.COMMAND: frozenset(CommandKeys.__annotations__),
}
"""The keys of a profile in the file, by its kind."""


def read_server_yaml(path: Path, gpus: tuple[str, ...] | None = None) -> ServerConfig:
    """Read a configuration file; what it does not give is as in `ServerConfig.default`.

    Relative paths start at the file's directory. `gpus` replaces the file's.

    Raises:
        UsageError: the file cannot be read, or a key is unknown or has a wrong value.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read", found=str(error)) from error
    try:
        keys = _FILE.validate_python({} if document is None else document, context=path.absolute())
    except ValidationError as error:
        problems = [_problem(path, one) for one in error.errors(include_url=False)]
        raise_all(UsageError, f"{path} cannot be read", problems)
        raise

    wanted = keys.pop("gpus", None)
    if gpus is not None:
        there = gpus
    elif isinstance(wanted, int):
        there = first_gpus(wanted, what=f"{path}: gpus {wanted}")
    else:
        there = find_gpus() if wanted is None else wanted
    quota = {f"pin_{name}": value for name, value in keys.pop("pin_quota", {}).items()}
    given = keys.pop("profiles", None)
    if given is None:
        profiles = default_profiles(there)
    else:
        profiles = {name: _profile(path, name, one, len(there)) for name, one in given.items()}
    return ServerConfig(gpus=there, profiles=profiles, **keys, **quota)  # type: ignore[arg-type,misc]  # validated


def _profile(path: Path, name: str, keys: ProfileKeys, gpus: int) -> Profile:
    """Return a profile, after what concerns several of its keys, or the machine, is checked."""
    kind = Kind(keys["kind"])
    values = {"timeout_s" if key == "timeout" else key: value for key, value in keys.items()}
    values = {"gpus": min(1, gpus), "model": model_of(kind), **values, "name": name, "kind": kind}
    profile = Profile(**values)  # type: ignore[arg-type]  # validated
    where = f"{path}: profiles.{name} (kind {kind})"
    join_arguments(profile.model_args, what=f"{where}: model_args")
    if profile.gpus > gpus:
        raise UsageError(
            f"{where}: gpus cannot be read", expected=gpus_expected(gpus), found=shown(profile.gpus)
        )
    if profile.keep is Keep.BEST and profile.best_metric is None:
        raise UsageError(
            f"{where}: best_metric is missing", expected="TASK/METRIC, because of `keep: best`"
        )
    return profile


def _problem(path: Path, problem: ErrorDetails) -> UsageError:
    """Return what pydantic found, as an error that names the file and the key."""
    where, known, keys = str(path), SERVER_KEYS, [str(key) for key in problem["loc"]]
    match keys:
        case ["profiles", name, "[key]"]:
            letters = "letters, digits, and `_`, `.`, `-`"
            return UsageError(f"{path}: profiles.{name} cannot be a name", expected=letters)
        case ["profiles", name, kind, *keys]:
            where, known = f"{path}: profiles.{name} (kind {kind})", PROFILE_KEYS[Kind(kind)]
        case ["profiles", name]:
            where, keys = f"{path}: profiles.{name}", []
        case ["pin_quota", *keys]:
            where, known = f"{path}: pin_quota", frozenset(PinQuotaKeys.__annotations__)
    match problem["type"]:
        case "extra_forbidden":
            close = get_close_matches(keys[-1], known, 1)
            return UsageError(
                f"{where} has the unknown key {keys[-1]!r}",
                expected=", ".join(sorted(known)),
                hint=f"did you mean {close[0]!r}?" if close else "",
            )
        case "missing":  # no other kind has a key that must be given
            return UsageError(f"{where}: {keys[-1]} is missing", expected=_COMMAND_EXPECTED)
        case "union_tag_invalid" | "union_tag_not_found":
            keys, problem["input"] = ["kind"], problem["input"].get("kind")
            problem["ctx"] = {"expected": ", ".join(Kind)}
        case "too_long":
            problem["ctx"] = {"expected": "at most 1 directory"}
        case "dict_type":
            problem["ctx"] = {"expected": "a mapping"}
    return problem_of(problem, f"{': '.join([where, *keys])} cannot be read")
