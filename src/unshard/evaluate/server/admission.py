"""What a client may ask the server for.

A client chooses what is measured; the server alone decides which code runs, and with which rights.
A task may therefore not be a path (the YAML file of a task can run any Python); an argument must be
known to load nothing, or be allowed by the profile; and no value may contain a character that an
evaluator's parser takes for a separator.
"""

import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec

from unshard.errors import UsageError, raise_all
from unshard.evaluate.jobs import OPTIONS, Arguments, Request
from unshard.evaluate.server.config.arguments import has_separator, parse_arguments, placeholders_in
from unshard.evaluate.server.config.harmless import GENERATION_ARGUMENTS, MODEL_ARGUMENTS
from unshard.evaluate.server.config.profiles import CommandProfile, Profile, base_of, keeps_engine
from unshard.evaluate.server.config.server_yaml import ServerConfig
from unshard.evaluate.server.evaluators.installed import modules_of
from unshard.evaluate.server.gpus import gpus_expected
from unshard.evaluate.server.roots import not_accepted
from unshard.evaluate.values import LARGEST, Scalar

MOST_TASKS = 1000
_MOST_ARGUMENTS = 64
_LONGEST_NAME = 200
_LONGEST_VALUE = 4000
_LONGEST_RUN = 200

# Every name that lm-eval 0.4.13 and lmms-eval 0.7.3 know has this form. A dot must be followed by a
# digit, so that a name cannot mean a file in the evaluator's working directory.
_TASK = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_()+-]|\.(?=[0-9]))*", re.ASCII)
_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_]*", re.ASCII)
_RUN = re.compile(r"[^\W_](?:[\w .+=@-]*[\w+=@-])?")


def check_request(request: Request, config: ServerConfig) -> None:
    """Raise unless everything in a request is allowed; the checkpoint is not checked here.

    Raises:
        UsageError: names every field that is not allowed, and what would be.
    """
    profile = config.profiles.get(request.profile)
    if profile is None:
        raise not_accepted(
            "profile", request.profile, expected=", ".join(config.profiles) or "none"
        )
    problems = [
        *_installed(base_of(request.profile), profile),
        *list_unfitting(request, profile),
    ]
    wanted, there = request.arguments.num_gpus or 0, len(config.gpus)
    if wanted > there:
        problems.append(not_accepted("num_gpus", wanted, expected=gpus_expected(there)))
    if request.run and not _is_run(request.run):
        form = f"letters, digits, `_.+=@-` and blanks inside, at most {_LONGEST_RUN} bytes"
        problems.append(not_accepted("run", request.run, expected=f"like a file's name: {form}"))
    raise_all(UsageError, "The request cannot be accepted", problems)


def list_unfitting(request: Request, profile: Profile) -> Iterator[UsageError]:
    """Yield what a profile does not allow, or no longer allows, of a request."""
    yield from _tasks(request, profile)
    yield from _arguments(request.arguments, profile)
    if not keeps_engine(profile):
        return
    chosen = {**request.arguments.model_args, **profile.model_args}
    if (count := chosen.get("data_parallel_size", 1)) != 1:
        yield UsageError(
            "data_parallel_size is not possible with `weights: direct`, which keeps one engine",
            expected="1",
            found=str(count),
            hint="jobs on other GPUs have engines of their own; several GPUs of one engine are "
            "used by tensor_parallel_size",
        )


def _installed(name: str, profile: Profile) -> Iterator[UsageError]:
    """Check the server's own interpreter only: the others are probed when the server starts."""
    if isinstance(profile, CommandProfile) or profile.interpreter != sys.executable:
        return
    for module in modules_of(profile):
        if find_spec(module) is None:
            yield UsageError(
                f"profile {name}: {module} is not installed for the server's Python",
                found=sys.executable,
                hint="install it there, or name another `interpreter` in the server's "
                "configuration",
            )


def _tasks(request: Request, profile: Profile) -> Iterator[UsageError]:
    if not 1 <= len(request.tasks) <= MOST_TASKS:
        yield not_accepted("tasks", len(request.tasks), expected=f"1 to {MOST_TASKS} names")
    for task in request.tasks[:MOST_TASKS]:
        if not _is_name(task, _TASK):
            yield not_accepted(
                "tasks",
                task,
                expected=f"a task's name: letters, digits, `_-+()`, at most {_LONGEST_NAME}",
                hint="a task's file must be in a directory that the server is configured with",
            )
        elif profile.allowed_tasks and not _matches(task, profile.allowed_tasks):
            yield not_accepted("tasks", task, expected=", ".join(profile.allowed_tasks))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _arguments(chosen: Arguments, profile: Profile) -> Iterator[UsageError]:
    if isinstance(profile, CommandProfile):
        taken = {"num_gpus", *placeholders_in(profile.command)}
        for name, value in chosen.given().items():
            if name not in taken:  # it would be ignored silently
                why = f"has no {{{name}}}" if name in OPTIONS else f"takes no {name}"
                yield not_accepted(name, value, expected=f"nothing: the profile's command {why}")
        return
    more = profile.allowed_model_args
    yield from _pairs("model_args", chosen.model_args, MODEL_ARGUMENTS, more)
    fixed = {profile.checkpoint_key, *profile.model_args}
    for key in sorted(fixed.intersection(chosen.model_args)):
        yield not_accepted(
            "model_args", key, expected="an argument that the server does not set itself"
        )
    if chosen.gen_kwargs is None:
        return
    try:
        pairs = parse_arguments(chosen.gen_kwargs, what="gen_kwargs")
    except UsageError as error:
        yield error
    else:
        yield from _pairs("gen_kwargs", pairs, GENERATION_ARGUMENTS, more)


def _pairs(
    field: str, pairs: Mapping[str, Scalar], harmless: Collection[str], more: Sequence[str]
) -> Iterator[UsageError]:
    if len(pairs) > _MOST_ARGUMENTS:
        yield not_accepted(field, len(pairs), expected=f"at most {_MOST_ARGUMENTS}")
        return
    for key, value in pairs.items():
        if not _is_name(key, _KEY):
            yield not_accepted(
                field, key, expected="an identifier of ASCII letters, digits and `_`"
            )
        elif key not in harmless and not _matches(key, more):
            yield not_accepted(
                field,
                key,
                expected="an argument that is known to load neither code nor another model",
                hint="the profile can allow it by `allowed_model_args`, or set it by `model_args`",
            )
        elif not _is_plain(value):
            yield not_accepted(
                f"{field}: {key}",
                value,
                expected="a finite number, a boolean, or one line of text without comma, equals "
                "sign, quotes, brackets and slashes, and not only dots",
            )


def _is_name(value: object, form: re.Pattern[str]) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_NAME and bool(form.fullmatch(value))


def _is_plain(value: object) -> bool:
    """Return whether a value is plain: one with a slash may be a path, or a repository of code."""
    if isinstance(value, bool):
        return True
    if isinstance(value, int | float):
        return abs(value) <= LARGEST  # false for NaN, too
    return (
        isinstance(value, str)
        and 0 < len(value) <= _LONGEST_VALUE
        and value.isprintable()
        and not has_separator(value)
        and "/" not in value
        and set(value) != {"."}
    )


def _is_run(name: str) -> bool:
    printable = name.isprintable() and len(name.encode()) <= _LONGEST_RUN
    return printable and _RUN.fullmatch(name) is not None and ".." not in name
