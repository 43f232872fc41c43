"""How a command ends when it fails: a message, JSON if asked for, and an exit code."""

import functools
import inspect
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import ParamSpec

import typer

from unshard import signals
from unshard.errors import UnshardError
from unshard.fronts import Command

__all__ = ["error_fields", "front_of", "guarded"]

P = ParamSpec("P")


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Turn the errors of a command into messages and the exit codes of `unshard.errors`.

    A KeyboardInterrupt may say in what state it leaves things.
    """

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except UnshardError as error:
            if kwargs.get("as_json"):
                print(json.dumps({"error": error_fields(error)}))
            error.front = front_of(command, kwargs)
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as error:
            signals.ignore()
            print(signals.message(error), file=sys.stderr)
            raise typer.Exit(signals.exit_code(error)) from error

    return run


def front_of(command: Callable[..., None], given: Mapping[str, object] | None = None) -> Command:
    """Return the options of a command; for all others `unshard merge` is named.

    Args:
        command: the function that typer calls.
        given: its arguments, as far as they are known.
    """
    names = [name.replace("_", "-") for name in inspect.signature(command).parameters]
    checkpoint = shlex.quote(str((given or {}).get("checkpoint", "CHECKPOINT")))
    own = {name: f"--{name}" for name in names}
    return Command(own, f"unshard merge {checkpoint} OUTPUT")


def error_fields(error: UnshardError) -> dict[str, object]:
    """Return an error as `--json` prints it."""
    return {
        "type": type(error).__name__,
        "code": error.exit_code,
        "message": error.subject,
        "expected": error.expected,
        "found": error.found,
        "hint": error.hint,
    }
