"""One attempt at a job, from its checkpoint to its metrics; or the rest of one, after a restart."""

import errno
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from tempfile import TemporaryFile

from unshard.errors import UnshardError
from unshard.evaluate.jobs import Job, Phase, Process
from unshard.evaluate.server.attempts.endings import (
    Cancelled,
    Completed,
    Died,
    Expired,
    Failed,
    Killed,
    Left,
    Lost,
    Outcome,
    Postponed,
)
from unshard.evaluate.server.attempts.merging import (
    CrashedError,
    GivenUpError,
    GoneError,
    Merger,
    PassingError,
    answered,
)
from unshard.evaluate.server.config.profiles import Profile
from unshard.evaluate.server.evaluators.work import Evaluator, UnknownTasksError, Work
from unshard.evaluate.server.gpus import shown_slots
from unshard.evaluate.server.pinning import Pins
from unshard.evaluate.server.processes.bounded_log import LOG_BYTES, last_lines
from unshard.evaluate.server.processes.environment import evaluator_environment
from unshard.evaluate.server.processes.launching import start_supervisor
from unshard.evaluate.server.processes.supervise import (
    LOG_NAME,
    STOPS,
    Exit,
    Order,
    has_begun,
    is_ended_by,
    read_exit,
)
from unshard.evaluate.server.processes.table import is_alive, kill_group
from unshard.evaluate.server.store.store import Store
from unshard.evaluate.server.telling import LOG_MARK, tell

__all__ = ["Attempt", "Halt", "Limits", "Runner"]

_log = logging.getLogger(__name__)

_SHOWN_LINES = 20
_MARGIN_S = 30.0
_READING = "reading"  # a byte for every server that reads the results
_MOST_FATAL = 2
_KILLS = (signal.SIGKILL, *STOPS)
_PASSING = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC})
_SPACE_BYTES = 8 << 20  # with less an evaluator's failure is taken for the disk's


@dataclass(frozen=True, slots=True)
class Limits:
    """Knobs of every attempt.

    Attributes:
        grace_s: how long processes may take to end when they are asked to.
        poll_s: the interval between two looks at a running evaluator.
        log_bytes: the bound of its log.
    """

    grace_s: float = 10.0
    poll_s: float = 0.2
    log_bytes: int = LOG_BYTES


class Halt(Enum):
    """Why an attempt should not go on."""

    CANCELLED = auto()
    LEAVE = auto()
    END = auto()


@dataclass(frozen=True, slots=True)
class Attempt:
    """A job, its evaluator, and where it runs."""

    job: Job
    profile: Profile
    evaluator: Evaluator
    gpus: tuple[str, ...]
    directory: Path

    def work(self, model: Path) -> Work:
        """Return the input of the evaluator."""
        output = self.directory / "output"
        return Work(model, output, self.directory, self.job.request, self.profile)


class Runner:
    """Runs attempts; any number at once, each in a thread of its own.

    Args:
        store: the truth.
        merger: makes the models.
        pins: know which files of a checkpoint were rewritten since it was submitted.
        limits: of every attempt.
        halt: returns why the job's attempt must stop, or None. Polled frequently.
    """

    def __init__(
        self,
        store: Store,
        merger: Merger,
        pins: Pins,
        limits: Limits,
        *,
        halt: Callable[[str], Halt | None],
    ) -> None:
        self._store = store
        self._merger = merger
        self._limits = limits
        self._halt = halt
        self._pins = pins
        self._reading = threading.Lock()

    def run(self, attempt: Attempt) -> Outcome:
        """Merge, evaluate, and read what was measured."""
        outcome = self._caught(attempt.job, lambda: self._run(attempt))
        if isinstance(outcome, Failed | Expired) and self._is_repinned(attempt.job):
            return Lost("the checkpoint was saved again; its newer pin is evaluated")
        return outcome

    def _is_repinned(self, job: Job) -> bool:
        now = self._store.get(job.id)
        return now is not None and now.pin is not None and now.pin != job.pin

    def _run(self, attempt: Attempt) -> Outcome:
        job = attempt.job
        (attempt.directory / "output").mkdir(parents=True)
        model = self._merger.prepare(
            job,
            attempt.profile,
            directory=attempt.directory,
            is_given_up=lambda: self._halt(job.id) is not None,
        )
        if model == self._merger.merged(job.id):
            tell(job, "merged")
        return self._rewritten(attempt) or self._evaluate(attempt, attempt.work(model))

    def _caught(self, job: Job, attempted: Callable[[], Outcome]) -> Outcome:
        """Return an outcome, or what an error means that ended the attempt."""
        try:
            return attempted()
        except GoneError as error:
            return Expired(_named(error, job))
        except GivenUpError:
            is_cancelled = self._halt(job.id) is Halt.CANCELLED
            return (
                Cancelled()
                if is_cancelled
                else Lost("the server was stopped while it read the checkpoint")
            )
        except (PassingError, OSError) as error:
            return Postponed(_named(error, job))
        except UnshardError as error:
            return Failed(_named(error, job), may_retry=isinstance(error, CrashedError))

    def resume(self, attempt: Attempt, process: Process) -> Outcome:
        """Continue an attempt of an earlier server, as if this one had begun it."""
        was_alive = is_alive(process)
        work = attempt.work(self._merger.model_of(attempt.job))
        outcome = self._caught(attempt.job, lambda: self._conclude(attempt, work, process))
        is_lost = not was_alive and read_exit(attempt.directory) is None
        if is_lost and isinstance(outcome, Killed):
            return Died(f"its processes ended together with the server\n{outcome.why}")
        return outcome

    def end(self, job_id: str, process: Process) -> bool:
        """End all processes of an attempt, however long it takes: they hold its GPUs.

        Returns:
            Whether they are gone; processes that cannot be ended are left to the next server.
        """
        while not kill_group(process, grace_s=self._limits.grace_s):
            _log.error("process group %d cannot be ended; its slots stay taken", process.pid)
            if self._halt(job_id) in {Halt.LEAVE, Halt.END}:
                return False
        return True

    def _rewritten(self, attempt: Attempt) -> Failed | None:
        job = attempt.job
        files = answered(
            lambda: self._pins.changed(job),
            timeout_s=attempt.profile.timeout_s,
            is_given_up=lambda: self._halt(job.id) is not None,
        )
        if not files:
            return None
        shown = ", ".join(files[:_SHOWN_LINES])
        return Failed(
            f"the checkpoint was rewritten or replaced while it was waiting: {shown}",
            may_retry=False,
        )

    def _evaluate(self, attempt: Attempt, work: Work) -> Outcome:
        order = self._order(attempt, attempt.evaluator.command(work))
        child = start_supervisor(gpus=attempt.gpus, directory=attempt.directory)
        try:
            self._store.attempt_started(attempt.job.id, child.process)
            self._store.phase(attempt.job.id, Phase.EVALUATING)
        except BaseException:
            child.drop()
            raise
        child.give(order)
        what = f"attempt {attempt.job.attempts}, {attempt.profile.name}"
        tell(attempt.job, f"started: {what} on {shown_slots(attempt.gpus)}")
        outcome: Outcome | None = None
        try:
            outcome = self._conclude(attempt, work, child.process)
        finally:
            if isinstance(outcome, Left):
                child.leave()
            else:
                child.reap()
        return outcome

    def _order(self, attempt: Attempt, command: list[str]) -> Order:
        environment = evaluator_environment(
            attempt.profile.environment,
            program=command[0],
            gpus=attempt.gpus,
            directory=str(attempt.directory),
        )
        return Order(
            command,
            environment,
            str(attempt.directory),
            attempt.profile.timeout_s,
            self._limits.grace_s,
            self._limits.log_bytes,
        )

    def _conclude(self, attempt: Attempt, work: Work, process: Process) -> Outcome:
        """Wait for a process, leave nothing of it behind, and judge what it did."""
        try:
            halt = self._wait(attempt, process)
            if halt is None and read_exit(attempt.directory) is None:
                halt = self._halt(attempt.job.id)  # the same signal may have ended both
        except BaseException:
            if not self.end(attempt.job.id, process):
                return Left()
            raise
        if halt is Halt.LEAVE or not self.end(attempt.job.id, process):
            return Left()
        if halt is not None:
            return Cancelled() if halt is Halt.CANCELLED else Lost("the server was stopped")
        return self._look_at(attempt, work)

    def _look_at(self, attempt: Attempt, work: Work) -> Outcome:
        """Judge what an attempt's processes, which are gone, have left."""
        done = read_exit(attempt.directory)
        if done is None and not has_begun(attempt.directory):
            return Postponed("its supervisor ended before it got its order")
        if done is None:
            return Killed(_with_log(attempt, "the evaluator and its supervisor were killed"))
        # Results may take many times their size in memory, so they are read one after the other;
        # a job that waits for its turn is not counted as one that ended the server.
        with self._reading, _counted(attempt.directory) as fatal:
            if fatal >= _MOST_FATAL:
                why = f"the server was killed {fatal} times while it read the results"
                return Failed(why, may_retry=False)
            outcome = self._judge(attempt, work, done)
        is_merged = work.model == self._merger.merged(attempt.job.id)
        if is_merged or not isinstance(outcome, Completed):
            return outcome
        return self._rewritten(attempt) or outcome

    def _wait(self, attempt: Attempt, process: Process) -> Halt | None:
        """Wait until a process ends, or must end; return why."""
        timeout_s = attempt.profile.timeout_s
        # The supervisor keeps to the timeout; this is for one that cannot.
        deadline = time.monotonic() + timeout_s + 2 * self._limits.grace_s + _MARGIN_S
        while is_alive(process) and time.monotonic() < deadline:
            halt = self._halt(attempt.job.id)
            if halt is not None:
                return halt
            time.sleep(self._limits.poll_s)
        return None

    def _judge(self, attempt: Attempt, work: Work, done: Exit) -> Outcome:
        match done.reason:
            case "timeout":
                return self._failed(attempt, f"timed out after {attempt.profile.timeout_s:g} s")
            case "stopped":
                return Postponed("the evaluator was stopped by a signal to its supervisor")
            case "not started":
                why = f"the evaluator cannot be started: {done.error}"
                return Postponed(why) if done.errno in _PASSING else Failed(why, may_retry=False)
        try:
            metrics = attempt.evaluator.metrics(work, done.returncode)
            results = attempt.evaluator.results_file(work)
        except UnknownTasksError as error:
            failed = Failed(_with_log(attempt, str(error)), may_retry=False, unknown=error)
        except (UnshardError, OSError) as error:
            failed = self._failed(attempt, str(error))
        else:
            return self._measured(attempt, metrics, results)
        return self._excused(attempt, failed, done)

    def _measured(
        self, attempt: Attempt, metrics: Mapping[str, float], results: Path | None
    ) -> Outcome:
        """Judge numbers that an evaluator left."""
        odd = [name for name, value in metrics.items() if not math.isfinite(value)]
        if odd:
            return self._failed(attempt, f"not finite: {', '.join(odd)}")
        return Completed(metrics, results)

    def _excused(self, attempt: Attempt, failed: Failed, done: Exit) -> Outcome:
        """Return a failure, or the outcome if the evaluator is not to blame."""
        full = _why_full(attempt.directory)
        if full:
            return Postponed(f"{full}\n{failed.error}")
        return Killed(failed.error) if is_ended_by(_KILLS, done.returncode) else failed

    def _failed(self, attempt: Attempt, why: str) -> Failed:
        return Failed(_with_log(attempt, why), may_retry=True)


def _with_log(attempt: Attempt, why: str) -> str:
    lines = last_lines(attempt.directory / LOG_NAME, _SHOWN_LINES)
    return f"{why}\n{LOG_MARK}\n{lines}" if lines else why


def _named(error: Exception, job: Job) -> str:
    """Return an error that names the checkpoint as it was submitted: its pin will be removed."""
    # `str` would put the options of a line of `unshard merge` into Python's notation.
    text = error.text if isinstance(error, UnshardError) else str(error)
    submitted = Path(job.request.checkpoint)
    if job.pin is None:
        return text
    pin = Path(job.pin)
    return text.replace(str(pin), str(submitted)).replace(str(pin.parent), str(submitted.parent))


@contextmanager
def _counted(directory: Path) -> Iterator[int]:
    """Yield how many servers began to read the results of an attempt and did not end it."""
    mark, before = directory / _READING, 0
    with suppress(OSError), mark.open("ab") as file:  # a full disk
        before = file.tell()
        file.write(b"x")
    try:
        yield before
    finally:
        mark.unlink(missing_ok=True)


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
