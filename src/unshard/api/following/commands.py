"""Run the command of `--exec` for an output, and report its failure."""

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from os import PathLike, fspath

from unshard.errors import UnshardError, UsageError
from unshard.signals import how

_FIELD = re.compile(r"\{(output|step)\}")
_STDERR = 2
_GRACE_S = 10.0


def command_of(text: str | Sequence[str | PathLike[str]]) -> tuple[str, ...]:
    """Return a command as its arguments; a text is split like a shell's, but no shell runs it.

    Raises:
        UsageError: there is no such program, or the text cannot be split.
    """
    try:
        command = shlex.split(text) if isinstance(text, str) else list(map(fspath, text))
    except (ValueError, TypeError) as error:
        raise UsageError(f"⟦--exec {text}⟧: {error}") from error
    if not command or shutil.which(command[0]) is None:
        raise UsageError(
            f"⟦--exec {text}⟧: there is no program {command[0] if command else 'in it'}",
            expected="a program and its arguments; use a script for features of a shell",
        )
    return tuple(command)


def run_command(command: Sequence[str], *, output: str, step: str) -> None:
    """Run a command; `{output}` and `{step}` in its arguments are replaced.

    Its output goes to stderr, because stdout has reports. If this process is interrupted, the
    command and its process group are ended, too.

    Raises:
        UnshardError: the command could not be run, or did not exit with 0.
    """
    values = {"output": output, "step": step}
    arguments = [_FIELD.sub(lambda match: values[match[1]], argument) for argument in command]
    line = f"the command for step {step}: {shlex.join(arguments)}"
    try:
        running = subprocess.Popen(  # noqa: S603 (the user's own command)
            arguments, stdin=subprocess.DEVNULL, stdout=_STDERR, process_group=0
        )
    except OSError as error:
        raise UnshardError(f"cannot run {line}", found=str(error)) from error
    try:
        code = running.wait()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            error.args = (f"{how(error)}, and so was {line}",)
        _end(running)
        raise
    if code:
        end = f"exit code {code}" if code > 0 else f"signal {-code}"
        raise UnshardError(f"{end} of {line}")


def _end(running: "subprocess.Popen[bytes]") -> None:
    """End a command and its process group."""
    with suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            running.wait(_GRACE_S)
        os.killpg(running.pid, signal.SIGKILL)
