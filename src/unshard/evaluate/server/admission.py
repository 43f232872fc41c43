"""What a client may ask the server for, and which checkpoints the server may read for it.

A client chooses what is measured; the server alone decides which code runs, and with which rights.
A task may therefore not be a path (the YAML file of a task can run any Python); an argument must be
known to load nothing, or be allowed by the profile; and no value may contain a character that an
evaluator's parser takes for a separator.
"""

import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

from unshard.errors import UsageError, raise_all
from unshard.evaluate.jobs import OPTIONS, Arguments, Request
from unshard.evaluate.pins.files import list_checkpoint
from unshard.evaluate.server.config.arguments import has_separator, parse_arguments, placeholders_in
from unshard.evaluate.server.config.harmless import GENERATION_ARGUMENTS, MODEL_ARGUMENTS
from unshard.evaluate.server.config.profiles import CommandProfile, Profile, Weights, base_of
from unshard.evaluate.server.config.server_yaml import ServerConfig
from unshard.evaluate.server.evaluators.installed import modules_of
from unshard.evaluate.server.gpus import gpus_expected
from unshard.evaluate.values import LARGEST, Scalar
from unshard.read.beside.companions import companions_in
from unshard.read.finding.step_names import step_of
from unshard.stores.remote_path import RemotePath, is_url, path_of

__all__ = [
    "MOST_TASKS",
    "check_links",
    "check_merged",
    "check_request",
    "check_there",
    "not_readable",
    "resolve_checkpoint",
]

MOST_TASKS = 1000
_MOST_ARGUMENTS = 64
_LONGEST_NAME = 200
_LONGEST_VALUE = 4000
_LONGEST_PATH = 4096
_LONGEST_RUN = 200
_INNER = 2  # how deep a checkpoint may be below its step: global_step_10/actor

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
        raise _wrong("profile", request.profile, expected=", ".join(config.profiles) or "none")
    problems = [
        *_installed(base_of(request.profile), profile),
        *_tasks(request, profile),
        *_arguments(request.arguments, profile),
    ]
    wanted, there = request.arguments.num_gpus or 0, len(config.gpus)
    if wanted > there:
        problems.append(_wrong("num_gpus", wanted, expected=gpus_expected(there)))
    if request.run and not _is_run(request.run):
        form = f"letters, digits, `_.+=@-` and blanks inside, at most {_LONGEST_RUN} bytes"
        problems.append(_wrong("run", request.run, expected=f"like a file's name: {form}"))
    raise_all(UsageError, "The request cannot be accepted", problems)


def resolve_checkpoint(path: str, roots: Sequence[Path]) -> Path:
    """Return a checkpoint's path without symbolic links, if it is below one of the roots.

    The checkpoint need not exist: see `check_there`. A user who may write below a root can replace
    the checkpoint by a link after this check, and no check can prevent that: roots are for
    directories whose writers may read everything that the server can read.

    An address in an object store must be below a root that is one, too; nothing is asked of the
    store for that.

    Raises:
        UsageError: the path is not absolute, or is not below a root.
    """
    is_address = is_url(path)
    if not (path.startswith("/") or is_address) or _is_odd(path):
        raise _wrong("checkpoint", path, expected="an absolute path, or s3://bucket/folder")
    try:
        resolved = path_of(path).resolve()
        if not is_address:
            resolved.exists()  # raises where no file can have this name
        places = [root.resolve() for root in roots]
    except PermissionError as error:
        raise not_readable(error) from error
    except (OSError, RuntimeError) as error:
        raise _wrong("checkpoint", path, expected="a path that can be followed") from error
    if any(resolved.is_relative_to(place) for place in places):
        return resolved
    raise UsageError(
        "checkpoint: not under a directory that this server may read",
        expected="a directory below one of: "
        + (", ".join(map(str, roots)) or "none is configured"),
        found=path,
        hint="add its directory to the server's `roots`",
    )


def _is_odd(path: str) -> bool:
    """Return whether a path is too long, or has what only tricks need in an address."""
    is_trick = is_url(path) and (".." in path.split("/") or "%" in path or "\\" in path)
    return is_trick or len(path) > _LONGEST_PATH or not path.isprintable()


def check_merged(checkpoint: Path, profile: Profile) -> None:
    """Raise if a checkpoint in an object store is meant for an evaluator that reads it itself."""
    if isinstance(checkpoint, RemotePath) and profile.weights is Weights.DIRECT:
        raise UsageError(
            "checkpoint: the profile merges nothing, and evaluators get no credentials of stores",
            expected="a checkpoint on a disk, or a profile with `weights: merged`",
            found=str(checkpoint),
        )


def check_links(checkpoint: Path, run: Path, roots: Sequence[Path]) -> None:
    """Raise unless every file that would be pinned or merged is below a root, links followed.

    Object stores have no links. Files that no longer exist are ignored. A link that is made after
    this check is not found: see `resolve_checkpoint`.

    Args:
        checkpoint: a directory, or a file that is one.
        run: the directory above it that may contain its config and tokenizer.
        roots: the directories that may be read.

    Raises:
        UsageError: names the first file that is not.
    """
    if isinstance(checkpoint, RemotePath):
        return
    places = [root.resolve() for root in roots]
    try:
        for file in _files(checkpoint, run):
            found = file.resolve()
            if not any(found.is_relative_to(place) for place in places):
                raise UsageError(
                    f"{file}: leads out of the directories that this server may read",
                    found=str(found),
                    hint="put the file itself there, or add its directory to the server's `roots`",
                )
    except FileNotFoundError:
        return
    except (OSError, RuntimeError) as error:
        raise UsageError(f"{checkpoint}: cannot be followed", found=str(error)) from error


def _files(checkpoint: Path, run: Path) -> Iterator[Path]:
    above = [one for one in checkpoint.parents if one.is_relative_to(run)]
    for folder in (*above, *(one / "huggingface" for one in above)):
        own = companions_in(folder)
        yield from own.files.values()
        if own.config is not None:
            yield own.config
    is_folder = checkpoint.is_dir()
    for name in list_checkpoint(checkpoint).files:
        yield checkpoint / name if is_folder else checkpoint


def check_there(checkpoint: Path, *, is_step: bool) -> None:
    """Raise if the checkpoint does not exist, unless a trainer may have removed it since.

    Args:
        checkpoint: its path.
        is_step: whether the client gave a step; otherwise the name of the directory may have one.

    Raises:
        UsageError: neither it nor its run exists, or the server may not read it.
    """
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            checkpoint.stat()
            return
        places = (checkpoint, *checkpoint.parents[:_INNER])
        steps = [place for place in places if step_of(place.name) is not None]
        if is_step and not steps:
            steps = [checkpoint]
        if any(step.parent.is_dir() for step in steps):
            return
    except PermissionError as error:
        raise not_readable(error) from error
    raise UsageError(
        "the checkpoint does not exist, and neither does the directory of its run",
        expected="a checkpoint, or the directory of a run, as the server sees the path",
        found=str(checkpoint),
        hint="check the path; where the server sees the disk under another name, give that name",
    )


def not_readable(error: PermissionError) -> UsageError:
    """Return the error for a checkpoint, or its run, that the server may not read."""
    return UsageError(
        "the server is not allowed to read the checkpoint",
        found=f"{error.filename}: {error.strerror}",
        hint=f"give the server's user (uid {os.geteuid()}) the right to read and enter the "
        "directories of the run, or start the server as their owner",
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
        yield _wrong("tasks", len(request.tasks), expected=f"1 to {MOST_TASKS} names")
    for task in request.tasks[:MOST_TASKS]:
        if not _is_name(task, _TASK):
            yield _wrong(
                "tasks",
                task,
                expected=f"a task's name: letters, digits, `_-+()`, at most {_LONGEST_NAME}",
                hint="a task's file must be in a directory that the server is configured with",
            )
        elif profile.allowed_tasks and not _matches(task, profile.allowed_tasks):
            yield _wrong("tasks", task, expected=", ".join(profile.allowed_tasks))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _arguments(chosen: Arguments, profile: Profile) -> Iterator[UsageError]:
    if isinstance(profile, CommandProfile):
        taken = {"num_gpus", *placeholders_in(profile.command)}
        for name, value in chosen.given().items():
            if name not in taken:  # it would be ignored silently
                why = f"has no {{{name}}}" if name in OPTIONS else f"takes no {name}"
                yield _wrong(name, value, expected=f"nothing: the profile's command {why}")
        return
    more = profile.allowed_model_args
    yield from _pairs("model_args", chosen.model_args, MODEL_ARGUMENTS, more)
    fixed = {profile.checkpoint_key, *profile.model_args}
    for key in sorted(fixed.intersection(chosen.model_args)):
        yield _wrong("model_args", key, expected="an argument that the server does not set itself")
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
        yield _wrong(field, len(pairs), expected=f"at most {_MOST_ARGUMENTS}")
        return
    for key, value in pairs.items():
        if not _is_name(key, _KEY):
            yield _wrong(field, key, expected="an identifier of ASCII letters, digits and `_`")
        elif key not in harmless and not _matches(key, more):
            yield _wrong(
                field,
                key,
                expected="an argument that is known to load neither code nor another model",
                hint="the profile can allow it by `allowed_model_args`, or set it by `model_args`",
            )
        elif not _is_plain(value):
            yield _wrong(
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


def _wrong(field: str, found: object, *, expected: str, hint: str = "") -> UsageError:
    return UsageError(
        f"{field} cannot be accepted", expected=expected, found=f"{found!r:.200}", hint=hint
    )
