"""Checks the requests of clients.

A client chooses the measurements; only the server decides which code runs, and with which rights.
So a task must not be a path (the YAML file of a task can run any Python); an argument must be
known to load nothing, or be allowed by the profile; and no value may contain a separator of an
evaluator's parser.
"""

import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec

from unshard.errors import UsageError, raise_all
from unshard.evaluate.jobs import Request
from unshard.evaluate.server.config.arguments import LONGEST_NAME, is_name, matches
from unshard.evaluate.server.evaluators.profiles import base_of
from unshard.evaluate.server.evaluators.work import Profile
from unshard.evaluate.server.gpus import gpus_expected
from unshard.evaluate.server.roots import not_accepted
from unshard.evaluate.server.server_yaml import ServerConfig

MOST_TASKS = 1000
_LONGEST_RUN = 200

# Every name that lm-eval 0.4.13 and lmms-eval 0.7.3 know has this form. A dot must be followed by a
# digit, so that a name cannot mean a file in the evaluator's working directory.
_TASK = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_()+-]|\.(?=[0-9]))*", re.ASCII)
_RUN = re.compile(r"[^\W_](?:[\w .+=@-]*[\w+=@-])?")


def check_request(request: Request, config: ServerConfig) -> None:
    """Raise a UsageError for all fields of a request, but its checkpoint, that are not allowed."""
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
    if wanted > there and not profile.launch:
        problems.append(not_accepted("num_gpus", wanted, expected=gpus_expected(there)))
    if request.run and not _is_run(request.run):
        form = f"letters, digits, `_.+=@-` and blanks inside, at most {_LONGEST_RUN} bytes"
        problems.append(not_accepted("run", request.run, expected=f"like a file's name: {form}"))
    raise_all(UsageError, "The request cannot be accepted", problems)


def list_unfitting(request: Request, profile: Profile) -> Iterator[UsageError]:
    """Yield the tasks and arguments of a request that a profile does not allow."""
    yield from _tasks(request, profile)
    yield from profile.list_unfitting(request.arguments)


def _installed(name: str, profile: Profile) -> Iterator[UsageError]:
    """Check the server's own interpreter; others are probed when the server starts."""
    is_ours = profile.start[0] == sys.executable and not profile.launch
    for module in profile.modules if is_ours else ():
        if find_spec(module) is None:
            yield UsageError(
                f"profile {name}: {module} is not installed for the server's Python",
                found=sys.executable,
                hint="install it there, or set another `interpreter` in the server's configuration",
            )


def _tasks(request: Request, profile: Profile) -> Iterator[UsageError]:
    if not 1 <= len(request.tasks) <= MOST_TASKS:
        yield not_accepted("tasks", len(request.tasks), expected=f"1 to {MOST_TASKS} names")
    for task in request.tasks[:MOST_TASKS]:
        if not is_name(task, _TASK):
            yield not_accepted(
                "tasks",
                task,
                expected=f"a task's name: letters, digits, `_-+()`, at most {LONGEST_NAME}",
                hint="a task's file must be in a directory that the server is configured with",
            )
        elif profile.allowed_tasks and not matches(task, profile.allowed_tasks):
            yield not_accepted("tasks", task, expected=", ".join(profile.allowed_tasks))


def _is_run(name: str) -> bool:
    printable = name.isprintable() and len(name.encode()) <= _LONGEST_RUN
    return printable and _RUN.fullmatch(name) is not None and ".." not in name
