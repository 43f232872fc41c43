"""The process of a command: its start, its streams and its exit."""

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

DIFFERENT = 1
"""Exit code of commands that compare, if there is a difference."""

_FAILED = 70  # EX_SOFTWARE of sysexits.h, because 1 means "different" where models are compared
# Imports and plans make many objects and hardly any garbage cycles. With Python's own threshold,
# collections took a tenth of the start and a quarter of planning 36,000 experts.
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
    """Run a command and exit with its code.

    Under torchrun, only rank 0 runs it; the other processes exit at once with 0.

    Args:
        command: returns or raises SystemExit.
        failed: the prefix of an error's message.
        failure: the exit code after an error; None: the code of its class.
    """
    signals.end_at_once()
    if "RANK" in os.environ:  # perhaps set by torchrun
        from unshard.cli import torchrun

        if not torchrun.begin():
            raise SystemExit(0)
    gc.set_threshold(_YOUNG_OBJECTS)
    _make_streams_safe()
    code = _run_to_end(command, failed, failure)
    signals.ignore_for_good()
    raise SystemExit(code)


def _run_to_end(command: Callable[[], None], failed: str, failure: int | None) -> int:
    """Run a command, flush its output, and return its exit code."""
    try:
        try:
            command()
            code = 0
        finally:
            signals.ignore()
            _flush()  # so that an error follows the earlier output in a log of both streams
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
    except Exception as error:  # noqa: BLE001 (also our own defects)
        code = _report_failure(error, failed)
        code = failure or code
    lost = _flush()
    if lost is not None and code == 0:
        print(
            f"error: standard output cannot be written: {lost.strerror}\n"
            "  the command did its work, but its printed output is incomplete",
            file=sys.stderr,
        )
        code = failure or _FAILED
    return code


def _advise(error: UnshardError) -> None:
    from unshard.cli import torchrun

    torchrun.advise(error)


def _report_failure(error: Exception, failed: str) -> int:
    """Print an unexpected error, a defect of ours with its traceback; return the exit code."""
    if isinstance(error, MemoryError):
        print(f"{failed}{_NO_MEMORY}", file=sys.stderr)
        return _FAILED
    try:
        if isinstance(error, FileNotFoundError):
            Path.cwd()
    except FileNotFoundError:
        print(f"{failed}{_NO_DIRECTORY}", file=sys.stderr)
        return UsageError.exit_code
    sys.excepthook(type(error), error, error.__traceback__)
    return _FAILED


def import_numpy() -> None:
    """Import numpy with one thread for linear algebra, in this process alone.

    Starting a BLAS thread for each core takes half as long as a small merge, and a merge has its
    own threads.
    """
    is_set = _BLAS_THREADS in os.environ
    os.environ.setdefault(_BLAS_THREADS, "1")
    import numpy  # noqa: F401, ICN001 (for its effect)

    if not is_set:
        del os.environ[_BLAS_THREADS]  # child processes must not inherit it


def guarded(
    command: Callable[P, None], before: Callable[[], None] | None = None
) -> Callable[P, None]:
    """Turn the errors of a command into messages, JSON with `--json`, and exit codes.

    The message of a KeyboardInterrupt, if any, is printed. `before` is called first.
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
    """Return the front of a command: its options, and the values that the user gave.

    Args:
        command: the function that is called.
        given: its arguments, as far as they are known; other names are ignored.
    """
    from unshard.cli.parser.parameters import Spec, spec_of
    from unshard.stores.remote_path import as_given

    values = {**(given or {}), **(given or {}).get("given", {})}  # a command's `**given`
    arguments: list[str] = []
    own, options, shared = dict[str, str](), dict[str, Any](), dict[str, Any]()
    for name, parameter in inspect.signature(command).parameters.items():
        if name == "context":
            continue
        is_shared = isinstance(parameter.default, Spec)  # with `unshard merge`
        spec = spec_of(parameter)
        flag = [*spec.flags, name.replace("_", "-")][0].removeprefix("--")
        own[flag] = f"--{flag}"
        value = values.get(name)
        texts = [as_given(item) for item in (value if isinstance(value, list) else [value])]
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
    engine = ["", *getattr(values.get("context"), "args", ())]
    arguments += ["SECRET" if _SECRET.match(a) else b for a, b in pairwise(engine)]
    itself = Call(f"unshard {command.__name__}", arguments, options) if is_repeated else None
    return Command(own, Call("unshard merge", (checkpoint, "OUTPUT"), shared), itself)


def error_fields(error: UnshardError) -> dict[str, object]:
    """Return the fields of an error for `--json`."""
    return {
        "type": type(error).__name__,
        "code": error.exit_code,
        "message": error.subject,
        "expected": error.expected,
        "found": error.found,
        "hint": error.hint,
    }


class _UnfailingFile(io.FileIO):
    """Writes to a descriptor; keeps the first error, and drops all data after it."""

    error: OSError | None = None

    def write(self, data: object, /) -> int:
        """Write all of the data, or drop it."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        done = 0
        while self.error is None and done < len(view):
            try:
                done += super().write(view[done:]) or 0
            except OSError as error:
                self.error = error
        return len(view)


class _EscapingStream(io.TextIOWrapper):
    """Escapes control characters, because commands also print text that others wrote.

    A command prints in the main thread. Other threads print messages of libraries, such as Ray's
    about a lost node; they go to stderr, because stdout may be one JSON object.
    """

    def write(self, text: str, /) -> int:
        """Write a text."""
        if threading.current_thread() is not threading.main_thread():
            return sys.stderr.write(printable(text))
        return super().write(printable(text))


def _make_streams_safe() -> None:
    """Make stdout and stderr accept any text, and survive a failure to write.

    stdout escapes control characters. stderr does not, because progress bars use them; `say`
    escapes messages.
    """
    sys.stdout = _make_safe(sys.stdout, 1, _EscapingStream)
    sys.stderr = _make_safe(sys.stderr, 2, io.TextIOWrapper)


def _make_safe(stream: TextIO | None, number: int, kind: type[io.TextIOWrapper]) -> TextIO:
    """Return a replacement of one of Python's streams; None: a closed stream."""
    if stream is None:
        fd = os.open(os.devnull, os.O_RDWR)
        if fd != number:  # otherwise the next opened file would get this number
            os.dup2(fd, number)
            os.close(fd)
        stream = io.TextIOWrapper(io.FileIO(number, "w", closefd=False), encoding="utf-8")
    raw = _UnfailingFile(number, "w", closefd=False)
    return kind(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=number == 2 or raw.isatty(),
    )


def say(text: object) -> None:
    """Print a message on stderr, escaped: it may quote a server or an evaluator."""
    print(printable(str(text)), file=sys.stderr, flush=True)


def _flush() -> OSError | None:
    """Flush both streams; return the error of stdout, if any.

    A closed pipe (`| head`) is not an error.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    error = raw.error if isinstance(raw, _UnfailingFile) else None
    return None if error is None or error.errno == errno.EPIPE else error
