"""The command of `--exec`: what is run for each output, and how its failure is reported."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence

from unshard.errors import UnshardError, UsageError
from unshard.signals import how

_FIELD = re.compile(r"\{(output|step)\}")
_GRACE_S = 10.0


def command_of(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return a command as its arguments; a text is split as a shell does, and no shell runs it.

    Raises:
        UsageError: there is no such program, or the text cannot be split.
    """
    try:
        command = tuple(shlex.split(given) if isinstance(given, str) else given)
    except ValueError as error:
        raise UsageError(f"⟦--exec {given}⟧: {error}") from error
    if not command or shutil.which(command[0]) is None:
        raise UsageError(
            f"⟦--exec {given}⟧: there is no program {command[0] if command else 'in it'}",
            expected="a program and its arguments; for what only a shell can do: sh -c '…'",
        )
    return command


def run_command(command: Sequence[str], *, output: str, step: str) -> None:
    """Run a command; `{output}` and `{step}` in its arguments are replaced.

    What it prints goes to stderr: stdout has reports. If this process is ended meanwhile, so is the
    command.

    Raises:
        UnshardError: it could not be run, or did not end with 0.
    """
    values = {"output": output, "step": step}
    arguments = [_FIELD.sub(lambda found: values[found[1]], one) for one in command]
    line = shlex.join(arguments)
    try:
        running = subprocess.Popen(  # noqa: S603 (the user's own command)
            arguments, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno()
        )
    except OSError as error:
        raise UnshardError(f"cannot be run: {line}", found=str(error)) from error
    try:
        code = running.wait()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            error.args = (f"{how(error)}, and so was {line}",)
        running.terminate()
        try:
            running.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            running.kill()
        raise
    if code:
        end = f"exit code {code}" if code > 0 else f"signal {-code}"
        raise UnshardError(f"ended with {end}: {line}")
