"""The outcomes of an attempt, and the outcome of an evaluator by its exit, log and results."""

import errno
import os
import re
import signal
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryFile

from unshard.errors import UnshardError
from unshard.evaluate.jobs import EvaluationError
from unshard.evaluate.logs import LOG_MARK
from unshard.evaluate.server.config.arguments import placeholders_in
from unshard.evaluate.server.evaluators.installed import UnknownTasksError, why_cannot_run
from unshard.evaluate.server.evaluators.work import EvalInput, Scores
from unshard.evaluate.server.processes.bounded_log import last_lines
from unshard.evaluate.server.processes.supervise import LOG_NAME, STOPS, Exit, is_ended_by

_MEMORY = re.compile(
    r"(?:CUDA|HIP) out of memory|torch\.(?:cuda\.)?OutOfMemoryError"
    r"|No available memory for the cache blocks"  # vLLM's
    r"|Free memory on device .* is less than desired"
)
_MEMORY_LINES = 300
_MORE_MEMORY = (
    "choose a smaller batch_size, or for lm-eval `auto`, more GPUs (num_gpus), or for vLLM another "
    "gpu_memory_utilization"
)
SHOWN_LINES = 20  # how many lines or names an error shows at most
_KILLS = (signal.SIGKILL, *STOPS)
_ABSENT = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENOEXEC}
)
_FOR_GOOD = frozenset({0, errno.E2BIG, errno.EINVAL, errno.ENAMETOOLONG})
_NOT_FOUND = 127  # of shells and env
_SLURMS_MEMORY = 253  # of srun: the kernel ended a task because memory ran out
_SPACE_BYTES = 8 << 20  # with less free space, a failure is blamed on the disk


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt failed; `unknown` is the error if the evaluator does not know tasks."""

    error: str
    may_retry: bool
    unknown: UnknownTasksError | None = None


class Cause(StrEnum):
    """Why an attempt is postponed; the value is its outcome in the database.

    Attributes:
        HINDERED: it could not begin or merge, for a reason that may pass: no space, a killed
            worker.
        KILLED: its evaluator was ended by a signal that the server did not send, perhaps by the
            kernel.
        DIED: its processes ended together with the server, which they may have ended.
        MEMORY: other processes used memory of its GPUs, and too little was free.
    """

    HINDERED = "postponed"
    KILLED = "killed"
    DIED = "died"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Postponed:
    """The attempt was hindered; it is repeated, up to a limit."""

    why: str
    cause: Cause = Cause.HINDERED


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The memory of its GPUs ran out; `used` describes the use by others, if any."""

    error: str
    used: str = ""


@dataclass(frozen=True, slots=True)
class Expired:
    """The checkpoint is gone."""

    why: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The attempt was given up for an external reason."""

    why: str


@dataclass(frozen=True, slots=True)
class Absent:
    """The evaluator is missing, so the jobs of its profile wait for it."""

    why: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The result is no longer needed; the processes have ended."""


@dataclass(frozen=True, slots=True)
class Left:
    """The attempt continues without this server; the next server adopts it."""


Outcome = Scores | Failed | OutOfMemory | Postponed | Expired | Lost | Absent | Cancelled | Left


def judge(work: EvalInput, done: Exit) -> Outcome:
    """Return the outcome of an attempt by the exit of its evaluator."""
    match done.reason:
        case "timeout":
            why = f"timed out after {work.profile.timeout:g} s"
            return Failed(add_log(why, work.directory), may_retry=True)
        case "stopped":
            return Postponed("the evaluator was stopped by a signal to its supervisor")
        case "not started":
            why = f"the evaluator cannot be started: {done.error}"
            if done.errno in _FOR_GOOD:
                return Failed(why, may_retry=False)
            return _absent(why, work) if done.errno in _ABSENT else Postponed(why)
    try:
        return work.profile.read_scores(work, done.returncode)
    except (UnshardError, OSError) as error:
        return _judge_failure(work, done, error)


def _judge_failure(work: EvalInput, done: Exit, error: Exception) -> Outcome:
    """Return the outcome of an attempt without results, which may not be the evaluator's fault."""
    unknown = error if isinstance(error, UnknownTasksError) else None
    failed = Failed(add_log(str(error), work.directory), unknown is None, unknown)
    if full := _why_full(work.directory):
        return Postponed(f"{full}\n{failed.error}")
    is_killed = is_ended_by(_KILLS, done.returncode) or (
        bool(work.profile.launch) and done.returncode == _SLURMS_MEMORY
    )
    lines = last_lines(work.directory / LOG_NAME, _MEMORY_LINES).splitlines()
    line = next((line.strip()[:300] for line in lines if _MEMORY.search(line)), None)
    if line is not None and not is_killed:
        lacks = EvaluationError(f"{work.program}: out of GPU memory", found=line, hint=_MORE_MEMORY)
        return OutOfMemory(add_log(str(lacks), work.directory))
    if unknown is None:
        if done.returncode == _NOT_FOUND:
            return _absent(failed.error, work)
        if why := why_cannot_run(work.profile, work.directory):
            return _absent(f"{why}\n{failed.error}", work)
    return Postponed(failed.error, Cause.KILLED) if is_killed else failed


def _absent(why: str, work: EvalInput) -> Outcome:
    """Return that an evaluator is missing; if the request chose the program, only the job waits."""
    return Postponed(why) if placeholders_in([work.profile.starter]) else Absent(why)


def add_log(why: str, directory: Path) -> str:
    """Return an error with the end of the log of the attempt in a directory."""
    lines = last_lines(directory / LOG_NAME, SHOWN_LINES)
    return f"{why}\n{LOG_MARK}\n{lines}" if lines else why


def _why_full(directory: Path) -> str | None:
    """Return why a few megabytes cannot be written to a directory, also because of a quota."""
    try:
        with TemporaryFile(dir=directory) as probe:
            probe.write(bytes(_SPACE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())  # some file systems allocate the space only now
    except OSError as error:
        return f"{directory}: cannot be written: {error.strerror}"
    return None
