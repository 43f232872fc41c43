"""Whether the evaluators of the profiles are there: asked once, when the server starts.

Nothing is imported: each interpreter looks for its evaluator's module in a process of its own.
"""

import logging
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from unshard.evaluate.server.config.profiles import Kind, Profile
from unshard.evaluate.server.processes.launching import evaluator_environment
from unshard.evaluate.server.telling import one_line

__all__ = ["MODULES", "tell_missing", "why_missing"]

MODULES: Mapping[Kind, str] = {Kind.LM_EVAL: "lm_eval", Kind.LMMS_EVAL: "lmms_eval"}
"""What an evaluator is imported as."""

_PACKAGES: Mapping[Kind, str] = {Kind.LM_EVAL: "lm_eval[hf]", Kind.LMMS_EVAL: "lmms_eval"}
_TIMEOUT_S = 30.0
_MISSING = 3
_CANNOT = "jobs cannot run"
_FIND = f"""
import sys
from importlib.util import find_spec
sys.exit(0 if find_spec(sys.argv[1]) else {_MISSING})
"""

_log = logging.getLogger(__name__)


def tell_missing(profiles: Mapping[str, Profile], directory: Path) -> None:
    """Log a line for every profile whose evaluator cannot be started.

    Args:
        profiles: those of the server.
        directory: where the interpreters are started: as their jobs, not where the server was.
    """
    for name, profile in profiles.items():
        if why := why_missing(profile, directory):
            _log.warning("profile %s: %s", name, one_line(why))


def why_missing(profile: Profile, directory: Path) -> str | None:
    """Return that jobs cannot run, or may not, why, and what to do; None if nothing is wrong."""
    if profile.kind is not Kind.COMMAND:
        return _why_no_module(profile, directory)
    program = profile.command[0]
    path = profile.environment.get("PATH", os.environ.get("PATH", os.defpath))
    if shutil.which(program, path=path) is None:
        return f"{_CANNOT}: the program {program} is not found; install it, or change `command`"
    return None


def _why_no_module(profile: Profile, directory: Path) -> str | None:
    module, python = MODULES[profile.kind], profile.interpreter
    environment = evaluator_environment(
        profile.environment, program=python, gpus=(), directory=str(directory)
    )
    try:
        done = subprocess.run(  # noqa: S603  (the server's configuration names the interpreter)
            [python, "-c", _FIND, module],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return (
            f"jobs may not run: {python} did not answer within {_TIMEOUT_S:g} s; if it is not "
            "merely slow, run it by hand to see why"
        )
    except OSError as error:
        return f"{_CANNOT}: {python} cannot be run: {error.strerror}; change `interpreter`"
    if done.returncode == 0:
        return None
    if done.returncode != _MISSING:
        said = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        ended = f"{python} ended with code {done.returncode}"
        return f"{_CANNOT}: {ended}: {said or 'it said nothing'}"
    return (
        f"{_CANNOT}: {module} is not installed for {python}; install it ({python} -m pip install "
        f'"{_PACKAGES[profile.kind]}"), or set `interpreter` to a Python that has it'
    )
