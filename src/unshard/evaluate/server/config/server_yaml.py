"""The server's YAML: its keys, and what is wrong with a file, in our words.

Defaults are those of `ServerConfig` and `Profile`: only what the file gives is passed to them.
"""

from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from unshard.errors import UsageError, raise_all
from unshard.evaluate.server.config.arguments import join_arguments
from unshard.evaluate.server.config.profiles import (
    COMMAND_EXPECTED,
    PROFILE_KEYS,
    Keep,
    Kind,
    NonEmptyText,
    Place,
    Places,
    Profile,
    ServerConfig,
    default_profiles,
    model_of,
)
from unshard.evaluate.server.gpus import as_gpus, find_gpus, first_gpus, gpus_expected
from unshard.evaluate.values import expected, expects, problem_of, shown, whole

__all__ = ["SERVER_KEYS", "read_server_yaml"]

_NULL_MEANS_NO_LIMIT = frozenset({"keep_days", "count", "bytes"})
_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$"


def _given(value: object) -> object:
    """Leave out keys without a value, but for those of which null means something."""
    if not isinstance(value, dict):
        return value
    kept = _NULL_MEANS_NO_LIMIT
    return {key: one for key, one in value.items() if one is not None or key in kept}


def _mapping(value: object) -> dict[str, object]:
    """Return what a mapping gives; nothing for any other value, which is reported elsewhere."""
    given = _given(value)
    return {str(key): one for key, one in given.items()} if isinstance(given, dict) else {}


def _profiles_in(document: object) -> dict[str, object]:
    return _mapping(_mapping(document).get("profiles"))


def _fields_given(value: object) -> object:
    """Return the fields of a profile that are given, and its type of model."""
    if not isinstance(value, dict):
        raise expected("a mapping")
    given = _mapping(value)
    return {"name": "", "kind": None, "model": model_of(given.get("kind")), **given}


def _gpu_names(value: object) -> object:
    """Return a list of GPUs as names; None, which is refused, if one is not a number or an id."""
    if isinstance(value, list):
        are_names = all(type(one) in {int, str} for one in value)
        return as_gpus(map(str, value)) if are_names else None
    return value


class PinQuotaKeys(TypedDict, total=False):
    """How much the pins of a run may keep."""

    count: Annotated[int, whole(0)] | None
    bytes: Annotated[int, whole(0)] | None


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
    profiles: dict[
        Annotated[str, Field(pattern=_NAME)], Annotated[Profile, BeforeValidator(_fields_given)]
    ]


_FILE = TypeAdapter(ServerKeys)
SERVER_KEYS = frozenset(ServerKeys.__annotations__)


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
    document = {} if document is None else _given(document)
    problems, keys = list(_unknown_keys(path, document)), ServerKeys()
    try:
        keys = _FILE.validate_python(document, context=path.absolute())
    except ValidationError as error:
        problems += [_problem(path, document, one) for one in error.errors(include_url=False)]
    raise_all(UsageError, f"{path} cannot be read", problems)

    wanted = keys.pop("gpus", None)
    if gpus is not None:
        there = gpus
    elif isinstance(wanted, int):
        there = first_gpus(wanted, what=f"{path}: gpus {wanted}")
    else:
        there = find_gpus() if wanted is None else wanted
    quota = {f"pin_{name}": value for name, value in keys.pop("pin_quota", {}).items()}
    profiles = keys.pop("profiles", None)
    if profiles is None:
        profiles = default_profiles(there)
    for name, given in _profiles_in(document).items():
        profiles[name] = _checked(path, name, given, profiles[name], gpus=len(there))
    return ServerConfig(gpus=there, profiles=profiles, **keys, **quota)  # type: ignore[arg-type,misc]  # validated


def _checked(path: Path, name: str, given: object, profile: Profile, *, gpus: int) -> Profile:
    """Return a profile, after what concerns several of its keys, or the machine, is checked."""
    where, keys = _place(path, name, given), _mapping(given)
    join_arguments(profile.model_args, what=f"{where}: model_args")
    count = profile.gpus if "gpus" in keys else min(1, gpus)
    if count > gpus:
        raise UsageError(
            f"{where}: gpus cannot be read", expected=gpus_expected(gpus), found=shown(count)
        )
    if profile.kind is Kind.LMMS_EVAL and len(profile.include_paths) > 1:
        raise UsageError(
            f"{where}: include_paths cannot be read",
            expected="at most 1 directory",
            found=shown(keys["include_paths"]),
        )
    if profile.kind is Kind.COMMAND and not profile.command:
        raise UsageError(f"{where}: command is missing", expected=COMMAND_EXPECTED)
    if profile.keep is Keep.BEST and profile.best_metric is None:
        raise UsageError(
            f"{where}: best_metric is missing", expected="TASK/METRIC, because of `keep: best`"
        )
    return replace(profile, name=name, gpus=count)


def _place(path: Path, name: object, profile: object) -> str:
    """Return how an error names a profile: with its kind, if that is one."""
    kind = _kind_in(profile)
    return f"{path}: profiles.{name}" + ("" if kind is None else f" (kind {kind})")


def _kind_in(profile: object) -> Kind | None:
    kind = _mapping(profile).get("kind")
    return next((one for one in Kind if one == kind), None)


def _unknown_keys(path: Path, document: object) -> Iterator[UsageError]:
    quota = _mapping(document).get("pin_quota")
    places = [
        (str(path), document, SERVER_KEYS),
        (f"{path}: pin_quota", quota, frozenset(PinQuotaKeys.__annotations__)),
    ]
    for name, one in _profiles_in(document).items():
        if (kind := _kind_in(one)) is not None:
            places.append((_place(path, name, one), one, PROFILE_KEYS[kind]))
    for where, given, known in places:
        for key in (one for one in _mapping(given) if one not in known):
            close = get_close_matches(str(key), known, 1)
            yield UsageError(
                f"{where} has the unknown key {key!r}",
                expected=", ".join(sorted(known)),
                hint=f"did you mean {close[0]!r}?" if close else "",
            )


def _problem(path: Path, document: object, problem: ErrorDetails) -> UsageError:
    """Return what pydantic found, as an error that names the file and the key."""
    where, keys = str(path), list(problem["loc"])
    match problem["loc"]:
        case ("profiles", name, "[key]"):
            letters = "letters, digits, and `_`, `.`, `-`"
            return UsageError(f"{path}: profiles.{name} cannot be a name", expected=letters)
        case ("profiles", name, *keys):
            where = _place(path, name, _profiles_in(document).get(str(name)))
        case ("pin_quota", key):
            where, keys = f"{path}: pin_quota", [key]
    if problem["type"] == "dict_type":
        problem["ctx"] = {"expected": "a mapping"}
    return problem_of(problem, f"{': '.join([where, *map(str, keys)])} cannot be read")
