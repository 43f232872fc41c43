"""Which evaluators are installed, by looking for or importing their modules as a job does.

Which tasks an evaluator knows is found out only by running it, because a list of its tasks would
take half a minute and torch: the first job finds out, after its merge, and is not retried; later
submissions with the same task are refused.
"""

import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from unshard.errors import UsageError
from unshard.evaluate.jobs import EvaluationError
from unshard.evaluate.logs import one_line
from unshard.evaluate.server.config.arguments import placeholders_in
from unshard.evaluate.server.evaluators.work import Profile
from unshard.evaluate.server.processes.launching import run_python

_PACKAGES = {
    "lm_eval": "lm_eval[hf]",
    "torch": "unshard[torch]",
    "unshard": "unshard[torch]",
    "vllm": "unshard[vllm]",
}
_TIMEOUT_S = 30.0
_IMPORT_S = 300.0
_MISSING = 3
_CANNOT = "jobs cannot run"
_FIND = f"""
import sys
from importlib.util import find_spec
for module in sys.argv[1:]:
    if not find_spec(module):
        print(module)
        sys.exit({_MISSING})
"""
_VERSIONS = """
import platform, sys
from importlib import import_module, metadata
for module in sys.argv[1:]:
    import_module(module)
found = [f"Python {platform.python_version()}"]
for module in dict.fromkeys([*sys.argv[1:], "torch", "transformers"]):
    if module in sys.modules:
        names = metadata.packages_distributions().get(module) or [module]
        found.append(f"{module} {metadata.version(names[0])}")
print(", ".join(found))
"""
_MOST = 10_000
_REMEMBERED_S = 600.0  # then a task is tried again: the evaluator may have got it

_log = logging.getLogger(__name__)


class UnknownTasksError(EvaluationError):
    """An evaluator does not know tasks of its job; another attempt would not help."""

    def __init__(self, program: str, tasks: Iterable[str], *, hint: str) -> None:
        self.tasks = tuple(tasks)
        super().__init__(f"{program} does not know the task {', '.join(self.tasks)}", hint=hint)


class UnknownTasks:
    """The tasks that evaluators did not know in the last ten minutes; thread-safe."""

    def __init__(self) -> None:
        self._errors: dict[tuple[str, str], tuple[float, UnknownTasksError]] = {}
        self._lock = threading.Lock()

    def add(self, profile: str, error: UnknownTasksError) -> None:
        """Remember the tasks of an error of a profile's evaluator."""
        with self._lock:
            for task in error.tasks:
                self._errors.pop((profile, task), None)
                self._errors[profile, task] = time.monotonic(), error
            for oldest in list(self._errors)[: max(0, len(self._errors) - _MOST)]:
                del self._errors[oldest]

    def check(self, profile: str, tasks: Iterable[str]) -> None:
        """Raise a UsageError for tasks that the evaluator of a profile did not know."""
        since = time.monotonic() - _REMEMBERED_S
        with self._lock:
            errors = {task: self._errors.get((profile, task), (since, None)) for task in tasks}
        fresh = {task: error for task, (at, error) in errors.items() if error and at > since}
        for error in fresh.values():
            raise UsageError(
                f"profile {profile}: the evaluator does not know the task {', '.join(fresh)}",
                found="a job failed because of that less than ten minutes ago",
                hint=error.hint,
            )


def tell_missing(profiles: Mapping[str, Profile], directory: Path) -> None:
    """Log a line for every profile whose evaluator cannot be started.

    Nothing is imported: each interpreter looks for its evaluator's module in a process of its own,
    which is started in `directory`, as jobs are, not where the server was started.
    """
    for name, profile in profiles.items():
        if why := why_missing(profile, directory):
            _log.warning("profile %s: %s", name, one_line(why))


def why_missing(profile: Profile, directory: Path) -> str | None:
    """Return that jobs cannot run, or may not, why, and what to do; None if they can.

    Where a cluster starts the evaluator, only the program of `launch` is looked for.
    """
    if profile.modules and not profile.launch:
        return _why_no_module(profile, directory)
    if _find_program(profile) is None:
        key = "launch" if profile.launch else "command"
        program = f"the program {profile.starter}"
        return f"{_CANNOT}: {program} is not found; install it, or change `{key}`"
    return None


def _find_program(profile: Profile) -> str | None:
    path = profile.environment.get("PATH", os.environ.get("PATH", os.defpath))
    return shutil.which(profile.starter, path=path)


def why_cannot_run(profile: Profile, directory: Path) -> str | None:
    """Return why no job can run, if that is certain: its script or a module is gone."""
    if profile.launch:  # the nodes may have programs that this machine lacks
        return None
    if profile.modules:
        why = _why_no_module(profile, directory)
        return why if why is not None and why.startswith(_CANNOT) else None
    script = Path(*profile.start[1:2])
    is_gone = script.is_absolute() and not placeholders_in([str(script)]) and not script.exists()
    return f"{_CANNOT}: there is no {script}" if is_gone else None


def versions_of(profile: Profile, directory: Path) -> str:
    """Import a profile's evaluator as a job does; return the versions of the modules.

    For any other program, return its path.

    Raises:
        EvaluationError: jobs cannot run; it has the reason, and what to do.
    """
    if why := why_missing(profile, directory):
        raise EvaluationError(why)
    if profile.launch or not profile.modules:
        return str(_find_program(profile))
    answer = _ask(profile, directory, _VERSIONS, _IMPORT_S)
    if isinstance(answer, str):
        raise EvaluationError(answer)
    if answer.returncode:
        raise EvaluationError(_why_ended(profile.start[0], answer))
    return f"{profile.start[0]}: {_last_line(answer.stdout)}"


def _why_no_module(profile: Profile, directory: Path) -> str | None:
    answer = _ask(profile, directory, _FIND, _TIMEOUT_S)
    if isinstance(answer, str):
        return answer
    python = profile.start[0]
    if answer.returncode == 0:
        return None
    if answer.returncode != _MISSING:
        return _why_ended(python, answer)
    module = _last_line(answer.stdout)
    return (
        f"{_CANNOT}: {module} is not installed for {python}; install it ({python} -m pip install "
        f'"{_PACKAGES.get(module, module)}"), or set `interpreter` to a Python that has it'
    )


def _ask(
    profile: Profile, directory: Path, code: str, timeout_s: float
) -> "subprocess.CompletedProcess[bytes] | str":
    """Run code in a profile's interpreter, with its modules as arguments; or return why not."""
    python = profile.start[0]
    try:
        return run_python(
            [python, "-c", code, *profile.modules], profile.environment, str(directory), timeout_s
        )
    except subprocess.TimeoutExpired:
        return (
            f"jobs may not run: {python} did not answer within {timeout_s:g} s; if it is not "
            "merely slow, run it by hand to see why"
        )
    except OSError as error:
        return f"{_CANNOT}: {python} cannot be run: {error.strerror}; change `interpreter`"


def _why_ended(python: str, done: "subprocess.CompletedProcess[bytes]") -> str:
    ended = f"{python} ended with code {done.returncode}"
    return f"{_CANNOT}: {ended}: {_last_line(done.stderr) or 'it printed nothing'}"


def _last_line(printed: bytes) -> str:
    return printed.decode("utf-8", "replace").strip().rpartition("\n")[2]
