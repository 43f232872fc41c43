"""How an attempt can end, and how an evaluator that ran to its end is judged."""

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
SHOWN_LINES = 20
"""How many lines or names an error shows at most."""

_KILLS = (signal.SIGKILL, *STOPS)
_ABSENT = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENOEXEC}
)
_FOR_GOOD = frozenset({0, errno.E2BIG, errno.EINVAL, errno.ENAMETOOLONG})
_NOT_FOUND = 127  # of shells and env
_SLURMS_MEMORY = 253  # of srun: the kernel ended a task because memory ran out
_SPACE_BYTES = 8 << 20  # with less an evaluator's failure is taken for the disk's


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt failed.

    Attributes:
        error: why.
        may_retry: another attempt might succeed.
        unknown: names tasks that the evaluator does not have.
    """

    error: str
    may_retry: bool
    unknown: UnknownTasksError | None = None


class Cause(StrEnum):
    """Why an attempt is postponed, as the database names its outcome.

    Attributes:
        HINDERED: it could not begin or merge, for a reason that may pass: no space, a killed
            worker.
        KILLED: a signal ended its evaluator that the server did not send, but perhaps the kernel.
        DIED: its processes ended together with the server that ran it; it may have ended the
            server.
        MEMORY: others had a part of its GPUs' memory, and it had too little.
    """

    HINDERED = "postponed"
    KILLED = "killed"
    DIED = "died"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Postponed:
    """The attempt did not fail by itself; there is another, up to a limit."""

    why: str
    cause: Cause = Cause.HINDERED


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The memory of its GPUs ran out; `used` says which of them others use, if they do."""

    error: str
    used: str = ""


@dataclass(frozen=True, slots=True)
class Expired:
    """The checkpoint is gone."""

    why: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The attempt was given up, for a reason outside of it."""

    why: str


@dataclass(frozen=True, slots=True)
class Absent:
    """The evaluator is not there, so the jobs of its profile wait for it."""

    why: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The result is no longer needed; the processes have ended."""


@dataclass(frozen=True, slots=True)
class Left:
    """The attempt continues without this server; the next server adopts it."""


Outcome = Scores | Failed | OutOfMemory | Postponed | Expired | Lost | Absent | Cancelled | Left


def judge(work: EvalInput, done: Exit) -> Outcome:
    """Return the outcome of an attempt whose evaluator ended like this."""
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
    """Return the outcome of an attempt without results: not all is the evaluator's mistake."""
    unknown = error if isinstance(error, UnknownTasksError) else None
    failed = Failed(add_log(str(error), work.directory), unknown is None, unknown)
    if full := _why_full(work.directory):
        return Postponed(f"{full}\n{failed.error}")
    is_killed = is_ended_by(_KILLS, done.returncode) or (
        bool(work.profile.launch) and done.returncode == _SLURMS_MEMORY
    )
    if not is_killed and (line := _find_memory(work.directory)):
        lacks = EvaluationError(f"{work.program}: out of GPU memory", found=line, hint=_MORE_MEMORY)
        return OutOfMemory(add_log(str(lacks), work.directory))
    if unknown is None:
        is_found = done.returncode != _NOT_FOUND
        absent = why_cannot_run(work.profile, work.directory) if is_found else failed.error
        if absent is not None:
            return _absent(failed.error if not is_found else f"{absent}\n{failed.error}", work)
    return Postponed(failed.error, Cause.KILLED) if is_killed else failed


def _find_memory(directory: Path) -> str | None:
    """Return the line of the log by which torch or vLLM says that a GPU's memory ran out."""
    lines = last_lines(directory / LOG_NAME, _MEMORY_LINES).splitlines()
    return next((line.strip()[:300] for line in lines if _MEMORY.search(line)), None)


def _absent(why: str, work: EvalInput) -> Outcome:
    """Return that an evaluator is gone; of a program that the request names, only the job waits."""
    return Postponed(why) if placeholders_in([work.profile.starter]) else Absent(why)


def add_log(why: str, directory: Path) -> str:
    """Return an error with the end of the log of the attempt in a directory."""
    lines = last_lines(directory / LOG_NAME, SHOWN_LINES)
    return f"{why}\n{LOG_MARK}\n{lines}" if lines else why


def _why_full(directory: Path) -> str | None:
    """Return why a few megabytes cannot be written to a directory; quotas count, too."""
    try:
        with TemporaryFile(dir=directory) as probe:
            probe.write(bytes(_SPACE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())  # some file systems find the space only then
    except OSError as error:
        return f"{directory}: cannot be written: {error.strerror}"
    return None
