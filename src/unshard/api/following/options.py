"""The options of `follow` as one value, and the command of `--exec`."""

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from os import PathLike, fspath
from pathlib import Path

from unshard.api.options import MergeOptions
from unshard.errors import UnshardError, UsageError
from unshard.read.format import EVERY_ROLE
from unshard.signals import how
from unshard.stores.remote_path import RemotePath, as_given
from unshard.write.hub import check_repo

_TIME = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """The options of `follow`, which explains each.

    Raises:
        UsageError: a value is invalid.
    """

    newest: bool = False
    keep: int | None = None
    exec: str | Sequence[str] | None = None
    retry: int = 0
    until: int | None = None
    idle: float | str | None = None
    interval: float = 5.0

    def __post_init__(self) -> None:
        for name in ("keep", "until", "retry", "interval"):
            value, kind = getattr(self, name), Real if name == "interval" else int
            if not isinstance(value, kind) and (value is not None or name == "retry"):
                raise UsageError(f"{name}: {value!r} is not a number")
        for name, value, least in (("keep", self.keep, 1), ("retry", self.retry, 0)):
            if value is not None and value < least:
                raise UsageError(f"⟦--{name} {value}⟧: at least {least} is needed")
        if not (isfinite(self.interval) and self.interval > 0):
            raise UsageError(f"⟦--interval {self.interval}⟧: seconds above 0 are needed")
        if self.exec is not None:
            object.__setattr__(self, "exec", command_of(self.exec))
        if self.idle is not None:
            object.__setattr__(self, "idle", seconds_of(self.idle))


def seconds_of(time: float | str) -> float:
    """Return the seconds of a time such as "90", "90s", "30m", "2h" or "1d"."""
    match = _TIME.fullmatch(str(time))
    if match is None:
        raise UsageError(f"⟦--idle {time}⟧: is not a time", expected="30m, 2h, 90s")
    return float(match[1]) * _SECONDS[match[2]]


def check_options(options: MergeOptions, output: Path) -> None:
    """Refuse options that do not fit all steps, and uploads from a store."""
    if options.role == EVERY_ROLE:
        raise UsageError(
            "⟦--follow⟧ follows one model of a step, and ⟦--role all⟧ selects several",
            hint="follow each into a directory of its own: ⟦--role actor⟧, ⟦--role critic⟧",
        )
    if options.step is not None:
        raise UsageError(f"⟦--follow⟧ and ⟦--step {options.step}⟧ exclude each other")
    if options.dry_run:
        raise UsageError("⟦--follow⟧ and ⟦--dry-run⟧ exclude each other")
    if options.push_to_hub is None:
        return
    if isinstance(output, RemotePath):
        raise UsageError(
            f"⟦--push-to-hub⟧ needs outputs on a disk, and {as_given(output)} is in an object store"
        )
    check_repo(options.push_to_hub, may_ask=True)


_FIELD = re.compile(r"\{(output|step)\}")
_STDERR = 2
_GRACE_S = 10.0


def command_of(text: str | Sequence[str | PathLike[str]]) -> tuple[str, ...]:
    """Return a command as its arguments; a text is split like a shell's, but no shell runs it.

    Raises:
        UsageError: there is no such program, or the text cannot be split.
    """
    try:
        command = shlex.split(text) if isinstance(text, str) else [fspath(part) for part in text]
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
