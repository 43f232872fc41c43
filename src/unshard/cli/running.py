"""A command as a process: its streams, how it begins and how it ends."""

import errno
import functools
import gc
import inspect
import io
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TextIO

from unshard import signals
from unshard.errors import UnshardError, UsageError, printable
from unshard.fronts import Call, Command, Python

P = ParamSpec("P")

_FAILED = 70  # as EX_SOFTWARE of sysexits.h: 1 means different, where models are compared
# Imports and plans make many objects and hardly any garbage cycle: collections by Python's own
# threshold took a tenth of the start, and a quarter of planning 36,000 experts.
_YOUNG_OBJECTS = 50_000
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"
_SECRET = re.compile(r"--.*(api-key|token|password)$")  # options of engines
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

    Under torchrun the process of rank 0 runs it, and the others end at once with 0.

    Args:
        command: ends by itself or with SystemExit.
        failed: what is printed before the message of an error.
        failure: the exit code after an error; None: that of its class.
    """
    signals.end_at_once()
    if "RANK" in os.environ:  # torchrun's, perhaps
        from unshard.cli import torchrun

        if not torchrun.begin():
            raise SystemExit(0)
    gc.set_threshold(_YOUNG_OBJECTS)
    _make_streams_safe()
    code = _run_to_end(command, failed, failure)
    signals.ignore_for_good()
    raise SystemExit(code)


def _run_to_end(command: Callable[[], None], failed: str, failure: int | None) -> int:
    """Run a command to its end, its output flushed; return its exit code."""
    try:
        try:
            command()
            code = 0
        finally:
            signals.ignore()
            _flush()  # in a log of both streams, an error comes after what led to it
    except SystemExit as end:
        code = failure or _FAILED
        if end.code is None or isinstance(end.code, int):
            code = end.code or 0
        else:
            print(end.code, file=sys.stderr)
    except UnshardError as error:
        _advise(error)
        if isinstance(error.front, Python):
            error.front = Command({})
        print(f"{failed}{error}", file=sys.stderr)
        code = failure or error.exit_code
    except KeyboardInterrupt as error:
        print(signals.message(error), file=sys.stderr)
        code = signals.exit_code(error)
    except Exception as error:  # noqa: BLE001 (also a defect of ours)
        code = _tell(error, failed)
        code = failure or code
    lost = _flush()
    if lost is not None and code == 0:
        print(
            f"error: standard output cannot be written: {lost.strerror}\n"
            "  the command did its work; what it printed is incomplete",
            file=sys.stderr,
        )
        code = failure or _FAILED
    return code


def _tell(error: Exception, failed: str) -> int:
    """Print what ended a command, a defect of ours as Python does; return the exit code."""
    if isinstance(error, MemoryError):
        print(f"{failed}{_NO_MEMORY}", file=sys.stderr)
    elif isinstance(error, FileNotFoundError) and not _has_directory():
        print(f"{failed}{_NO_DIRECTORY}", file=sys.stderr)
        return UsageError.exit_code
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    return _FAILED


def _advise(error: UnshardError) -> None:
    """Add what helps under torchrun."""
    from unshard.cli import torchrun

    torchrun.advise(error)


def _has_directory() -> bool:
    """Return whether the current directory still exists: no relative path means anything in it."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True


def import_numpy() -> None:
    """Import numpy with one thread for linear algebra, for this process alone.

    To start one for each core takes as long as half a small merge, whose work is divided among
    threads of its own.
    """
    given = os.environ.get(_BLAS_THREADS)
    os.environ.setdefault(_BLAS_THREADS, "1")
    import numpy  # noqa: F401, ICN001 (for its effect)

    if given is None:
        del os.environ[_BLAS_THREADS]  # it is not meant for what this process starts


def guarded(
    command: Callable[P, None], before: Callable[[], None] | None = None
) -> Callable[P, None]:
    """Turn the errors of a command into messages, JSON if that is given, and exit codes.

    A KeyboardInterrupt may say in what state it leaves things. `before` is called first.
    """

    @functools.wraps(command)
    def run_guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            if before is not None:
                before()
            command(*args, **kwargs)
        except UnshardError as error:
            _advise(error)
            error.front = front_of(command, kwargs)
            if kwargs.get("as_json"):
                print(json.dumps({"error": error_fields(error)}))
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(error.exit_code) from error
        except KeyboardInterrupt as error:
            signals.ignore()
            print(signals.message(error), file=sys.stderr)
            raise SystemExit(signals.exit_code(error)) from error

    return run_guarded


def front_of(command: Callable[..., None], given: Mapping[str, Any] | None = None) -> Command:
    """Return the options of a command and what it was given; for all others `unshard merge`.

    Args:
        command: the function that is called.
        given: its arguments, as far as they are known; other names do not matter.
    """
    from unshard.cli.parser.parameters import Spec, spec_of
    from unshard.stores.remote_path import as_given

    known = {**(given or {}), **(given or {}).get("given", {})}  # a command's `**given`
    arguments: list[str] = []
    own, options, shared = dict[str, str](), dict[str, Any](), dict[str, Any]()
    for name, parameter in inspect.signature(command).parameters.items():
        if name == "context":
            continue
        is_shared = isinstance(parameter.default, Spec)  # with `unshard merge`
        spec = spec_of(parameter)
        flag = [*spec.flags, name.replace("_", "-")][0].removeprefix("--")
        own[flag] = f"--{flag}"
        value = known.get(name)
        texts = [as_given(one) for one in (value if isinstance(value, list) else [value])]
        if value in (None, [], spec.default) or name == "verbose":
            continue
        if spec.is_argument:
            arguments += texts
            continue
        text = texts if isinstance(value, list) else texts[0]
        options[flag] = isinstance(value, bool) or value == "ours" or text  # --overwrite
        shared |= {flag: options[flag]} if is_shared else {}
    checkpoint = options.get("against") or next(iter(arguments), "CHECKPOINT")
    is_repeated = arguments and command.__name__ != "inspect" and ".eval" not in command.__module__
    engine = ["", *getattr(known.get("context"), "args", ())]
    arguments += ["SECRET" if _SECRET.match(a) else b for a, b in pairwise(engine)]
    itself = Call(f"unshard {command.__name__}", arguments, options) if is_repeated else None
    return Command(own, Call("unshard merge", (checkpoint, "OUTPUT"), shared), itself)


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


class _Unfailing(io.FileIO):
    """Writes to a descriptor; after the first error, which it keeps, it drops what is written."""

    error: OSError | None = None

    def write(self, data: object, /) -> int:
        """Write, or drop, all of the data."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        done = 0
        while self.error is None and done < len(view):
            try:
                done += super().write(view[done:]) or 0
            except OSError as error:
                self.error = error
        return len(view)


class _Printable(io.TextIOWrapper):
    """Escapes what would control a terminal: what others wrote is printed, too.

    A command prints in the main thread. What is printed in another one is a library's message, such
    as Ray's that a node is lost: it goes to stderr, because stdout may be one JSON object.
    """

    def write(self, text: str, /) -> int:
        """Write a text."""
        if threading.current_thread() is not threading.main_thread():
            return sys.stderr.write(printable(text))
        return super().write(printable(text))


def _make_streams_safe() -> None:
    """Make stdout and stderr print any text in their encoding, and outlast their own failure.

    Nothing in stdout controls a terminal. In stderr progress bars must: a message is printed by
    `say`, which escapes it.
    """
    sys.stdout = _make_safe(sys.stdout, 1, _Printable)
    sys.stderr = _make_safe(sys.stderr, 2, io.TextIOWrapper)


def _make_safe(stream: TextIO | None, number: int, kind: type[io.TextIOWrapper]) -> TextIO:
    """Return a stream in the place of one of Python's own; None is one that was closed."""
    if stream is None:
        fd = os.open(os.devnull, os.O_RDWR)
        if fd != number:  # or else the next file that is opened would be taken for it
            os.dup2(fd, number)
            os.close(fd)
        stream = io.TextIOWrapper(io.FileIO(number, "w", closefd=False), encoding="utf-8")
    raw = _Unfailing(number, "w", closefd=False)
    return kind(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=number == 2 or raw.isatty(),
    )


def say(text: object) -> None:
    """Print a message on stderr. It may quote what servers and evaluators answered."""
    print(printable(str(text)), file=sys.stderr, flush=True)


def _flush() -> OSError | None:
    """Flush both streams; return why stdout could not be written.

    A reader that has gone (`| head`) has read what it wanted: this is not an error.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    error = raw.error if isinstance(raw, _Unfailing) else None
    return None if error is None or error.errno == errno.EPIPE else error
