"""A command as a process: how it begins and ends, alone or as one of a torchrun's.

At first only the signal handlers are imported, so that they handle a signal during all other
imports.
"""

import sys
from collections.abc import Callable
from typing import NoReturn

from unshard import signals

__all__ = ["run"]

_FAILED = 1
_NO_DIRECTORY = (
    "the current directory has been deleted\n  hint:     cd to another one, or give absolute paths"
)
_NO_MEMORY = (
    "not enough memory, or a limit on it (ulimit -v) is too low\n"
    "  hint:     raise the limit, or run it where more memory is free"
)


def run(
    command: Callable[[], None], *, failed: str = "error: ", failure: int | None = None
) -> NoReturn:
    """Run a command and end the process with its exit code.

    Under torchrun the process of rank 0 runs it. The others only move bytes for that one, and end
    with the same exit code.

    Args:
        command: ends by itself or with SystemExit.
        failed: what is printed before the message of an error.
        failure: the exit code after an error; None: that of its class.
    """
    signals.end_at_once()
    from unshard.cli.running import streams
    from unshard.engines.crew import is_started_by_torchrun

    streams.make_safe()

    def alone() -> int:
        return _exit_code(lambda: _returned(command), failed, failure)

    def together() -> int:
        from unshard.engines.crew import as_one_of_torchrun

        return as_one_of_torchrun(alone)

    code = _exit_code(together, failed, failure) if is_started_by_torchrun() else alone()
    signals.ignore_for_good()
    raise SystemExit(code)


def _returned(command: Callable[[], None]) -> int:
    """Run a command; return the exit code that it ends with."""
    try:
        command()
    except SystemExit as end:
        return _number(end.code)
    return 0


def _exit_code(command: Callable[[], int], failed: str, failure: int | None) -> int:
    """Run a command to its end, its output flushed; return its exit code."""
    from unshard.cli.running.streams import flushed
    from unshard.errors import UnshardError
    from unshard.fronts import PYTHON, Command

    try:
        code = command()
        signals.ignore()
    except UnshardError as error:
        signals.ignore()
        if error.front is PYTHON:
            error.front = Command({})
        print(f"{failed}{error}", file=sys.stderr)
        code = failure or error.exit_code
    except KeyboardInterrupt as error:
        signals.ignore()
        print(signals.message(error), file=sys.stderr)
        code = signals.exit_code(error)
    except MemoryError:
        signals.ignore()
        print(f"{failed}{_NO_MEMORY}", file=sys.stderr)
        code = _FAILED
    except Exception as error:  # noqa: BLE001 (a defect of ours: shown as Python does, code included)
        signals.ignore()
        if isinstance(error, FileNotFoundError) and not _has_directory():
            print(f"{failed}{_NO_DIRECTORY}", file=sys.stderr)
        else:
            sys.excepthook(*sys.exc_info())
        code = _FAILED
    lost = flushed()
    if lost is not None and code == 0:
        print(
            f"error: standard output cannot be written: {lost.strerror}\n"
            "  the command did its work; what it printed is incomplete",
            file=sys.stderr,
        )
        code = _FAILED
    return code


def _has_directory() -> bool:
    """Return whether the current directory still exists: no relative path means anything in it."""
    from pathlib import Path

    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True


def _number(code: object) -> int:
    """Return the exit code that SystemExit means: None is 0, a text is printed."""
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return _FAILED
