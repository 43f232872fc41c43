"""How a command ends when it fails: a message, JSON if asked for, and an exit code."""

import functools
import json
import sys
from collections.abc import Callable
from typing import ParamSpec

import typer

from unshard.errors import UnshardError

__all__ = ["guarded"]

_INTERRUPTED = 130

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
                print(_as_json(error))
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as error:
            print(str(error) or "interrupted: nothing was left half done", file=sys.stderr)
            raise typer.Exit(_INTERRUPTED) from error

    return run


def _as_json(error: UnshardError) -> str:
    fields = {
        "type": type(error).__name__,
        "code": error.exit_code,
        "message": error.subject,
        "expected": error.expected,
        "found": error.found,
        "hint": error.hint,
    }
    return json.dumps({"error": fields})
