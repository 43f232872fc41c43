"""The server's configuration: the keys of its YAML, and our messages for pydantic's errors."""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import ErrorDetails

from unshard.errors import UsageError, raise_all
from unshard.evaluate.pins.pin import Quota
from unshard.evaluate.server.config.keys import NonEmptyText, OnResult, Place, Roots, drop_nulls
from unshard.evaluate.server.evaluators.command import COMMAND_EXPECTED
from unshard.evaluate.server.evaluators.profiles import KINDS, ProfileKeys, default_profiles
from unshard.evaluate.server.evaluators.work import OwnArguments, Profile
from unshard.evaluate.server.gpus import as_gpus, find_gpus, first_gpus, gpus_expected
from unshard.evaluate.values import expects, problem_of, shown, whole
from unshard.evaluate.yaml_files import read_yaml

LOG_FORMATS = ("text", "json")
ROOT_PATH_EXPECTED = "a path such as /eval, without a slash at its end"
_LAUNCH = (
    "the server places no evaluators on Ray: give a profile `launch`, such as "
    "[srun, ...] or [ray, job, submit, ...], and `slots: N`"
)

_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$"
_MOST_GPUS = 1024
_GONE = {
    ("executor", "executor"): _LAUNCH,
    ("ray_address", "ray_address"): _LAUNCH,
    ("profiles", "resume"): "remove it: an evaluation that was interrupted begins from its start",
    ("on_result", "url"): "post by a command ([curl, ...]), or follow GET /api/v1/events",
    ("on_result", "backoff"): "remove it: a command that fails is not run again",
}
"""Removed keys, and their replacements."""


def _gpu_names(value: object, info: ValidationInfo[Path | None]) -> object:
    """Return the names of a count or a list of GPUs; None, which is refused, for a bad name."""
    if type(value) is int and 0 <= value <= _MOST_GPUS:
        return first_gpus(value, what=f"{info.context}: gpus {value}")
    if isinstance(value, list):
        are_names = all(type(name) in {int, str} for name in value)
        return as_gpus(map(str, value)) if are_names else None
    return value


def is_root_path(text: str) -> bool:
    """Return whether a text can be the path of the server behind a proxy; "" means no path."""
    # `/view` and the like begin the server's own addresses, so one could not tell them apart.
    names = r"(/(?!\.{1,2}(?:/|$))[A-Za-z0-9_.~-]+)*"
    return re.fullmatch(rf"(?!/(?:view|api|health|queue|metrics)(?:/|$)){names}", text) is not None


def _or_default(value: object, info: ValidationInfo) -> object:
    return default_profiles(info.data.get("gpus", ())) if value is None else value


def _fit(
    profiles: Mapping[str, Profile], info: ValidationInfo[Path | None]
) -> Mapping[str, Profile]:
    """Check the profiles of a file against the server; a profile without `gpus` gets one GPU."""
    if info.context is None or "gpus" not in info.data:
        return profiles
    available, fitting = len(info.data["gpus"]), dict[str, Profile]()
    for name, profile in profiles.items():
        where = f"{info.context}: profiles.{name} (kind {profile.kind})"
        profile.check(where)
        default = 1 if profile.launch else min(1, available)
        count = profile.gpus if "gpus" in profile.model_fields_set else default
        if count > available and not profile.launch:
            expected = gpus_expected(available)
            raise UsageError(f"{where}: gpus cannot be read", expected=expected, found=shown(count))
        fitting[name] = profile.model_copy(update={"gpus": count})
    return fitting


class ServerConfig(BaseModel):
    """The server's configuration; without a file: this machine's GPUs, a profile of every kind."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    _read = model_validator(mode="before")(drop_nulls)

    roots: Roots = ()
    """Directories, or addresses such as s3://bucket/runs, below which checkpoints must be."""
    gpus: Annotated[
        tuple[str, ...],
        BeforeValidator(_gpu_names),
        expects("how many, or a list of their numbers or ids"),
    ] = Field(default_factory=find_gpus)
    """The GPUs of jobs: a count (the first of `CUDA_VISIBLE_DEVICES`, if that is set), or numbers
    and ids (`GPU-…`, `MIG-…`)."""
    cpu_slots: Annotated[int, whole(1, _MOST_GPUS)] = 2
    """How many jobs without GPUs run at once."""
    host: NonEmptyText = "127.0.0.1"
    """The address to listen on."""
    port: Annotated[int, whole(0, 65535)] = 8000
    """The port to listen on; 0 picks a free one."""
    root_path: Annotated[str, expects(ROOT_PATH_EXPECTED, is_root_path)] = ""
    """Path of the server behind a proxy, such as /eval."""
    token_file: Place | None = None
    """The file with the clients' token, 16 characters or more, or with a line `NAME ROLE TOKEN` for
    each user; readable by its owner alone."""
    work_directory: Place | None = None
    """The database, logs, results and merged models."""
    pin_quota: Annotated[
        Quota, BeforeValidator(lambda it: {"bytes": None, **it} if isinstance(it, dict) else it)
    ] = Quota(bytes=None)
    """How much of a run the server's own pins may keep: `count`, `bytes`; null for no limit."""
    keep_days: Annotated[int, whole(1)] | None = 30
    """Days for which the directory of an ended job is kept, with its log; None: forever."""
    keep_gb: Annotated[int, whole(1)] | None = None
    """GB that the directories of ended jobs may have together; None: any size."""
    keep_samples_mb: Annotated[int, whole(0)] = 64
    """MiB of a job's results and samples that are kept, compressed, for as long as the job."""
    log_format: Annotated[
        str, expects(" or ".join(LOG_FORMATS), lambda value: value in LOG_FORMATS)
    ] = "text"
    """Whether the server's log has lines of text or JSON objects."""
    pass_at_most: Annotated[int, whole(0)] = 8
    """How many jobs may pass a job that needs more GPUs than are free; 0: none."""
    on_result: OnResult | None = None
    """The command that is run for each job that is completed or has failed."""
    profiles: Annotated[
        Mapping[Annotated[str, Field(pattern=_NAME)], ProfileKeys],
        BeforeValidator(_or_default),
        AfterValidator(_fit),
        Field(validate_default=True),
    ] = None  # type: ignore[assignment]  # `_or_default` makes those of a server without a file
    """The evaluators, by the names that clients use."""


def read_server_yaml(path: Path, options: Mapping[str, object] | None = None) -> ServerConfig:
    """Read a configuration file; `options` replaces its values.

    Relative paths start at the file's directory.

    Raises:
        UsageError: the file cannot be read, or a key is unknown or has a wrong value.
    """
    try:
        document = read_yaml(path)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read", found=str(error)) from error
    document = {} if document is None else document
    if options and isinstance(document, dict):
        document = {**document, **options}
    try:
        return ServerConfig.model_validate(document, context=path)
    except ValidationError as error:
        problems = [_problem(path, detail) for detail in error.errors(include_url=False)]
        raise_all(UsageError, f"{path} cannot be read", problems)
        raise


def _problem(path: Path, problem: ErrorDetails) -> UsageError:
    """Return pydantic's error with the file and the key in its message."""
    keys = [str(key) for key in problem["loc"]]
    where, allowed = str(path), list(ServerConfig.model_fields)
    match keys:
        case ["profiles", name, "[key]"]:
            letters = "letters, digits, and `_`, `.`, `-`"
            return UsageError(f"{path}: profiles.{name} cannot be a name", expected=letters)
        case ["profiles", name, kind, *keys]:
            where = f"{path}: profiles.{name} (kind {kind})"
            allowed = list((OwnArguments if keys[0] == "arguments" else KINDS[kind]).model_fields)
        case ["profiles", name]:
            where, keys = f"{path}: profiles.{name}", []
        case ["on_result" | "pin_quota" as section, *keys]:
            fields = {"on_result": OnResult.model_fields, "pin_quota": Quota.__annotations__}
            where, allowed = f"{path}: {section}", list(fields[section])
    match problem["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument":
            return _unknown_key(where, str(problem["loc"][0]), keys[-1], allowed)
        case "missing":
            needed = problem.get("ctx", {}).get("expected", COMMAND_EXPECTED)
            return UsageError(f"{where}: {keys[-1]} is missing", expected=needed)
        case "union_tag_not_found" if "kind" not in problem["input"]:
            return UsageError(f"{where}: kind is missing", expected=", ".join(KINDS))
        case "union_tag_invalid" | "union_tag_not_found":
            keys, problem["input"] = ["kind"], problem["input"].get("kind")
            problem["ctx"] = {"expected": ", ".join(KINDS)}
        case "too_long":
            problem["ctx"] = {"expected": "at most 1 directory"}
    return problem_of(problem, f"{': '.join([where, *keys])} cannot be read")


def _unknown_key(where: str, section: str, key: str, allowed: list[str]) -> UsageError:
    if hint := _GONE.get((section, key)):
        return UsageError(f"{where}: {key!r} no longer exists", hint=hint)
    close = get_close_matches(key, allowed, 1)
    return UsageError(
        f"{where} has the unknown key {key!r}",
        expected=", ".join(sorted(allowed)),
        hint=f"did you mean {close[0]!r}?" if close else "",
    )
