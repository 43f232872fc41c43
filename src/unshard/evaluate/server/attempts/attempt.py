"""One attempt at a job, from its checkpoint to its metrics, also across a restart of the server."""

import logging
import math
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple

from unshard.errors import StoreError, UnshardError
from unshard.evaluate.jobs import Job, Phase
from unshard.evaluate.process import Process
from unshard.evaluate.server.attempts.merging import (
    CheckpointGoneError,
    CrashedError,
    GivenUpError,
    Merger,
    PassingError,
    ask_disk,
)
from unshard.evaluate.server.attempts.recipe import make_recipe
from unshard.evaluate.server.config.arguments import fill
from unshard.evaluate.server.endings import (
    SHOWN_LINES,
    Cancelled,
    Cause,
    Expired,
    Failed,
    Left,
    Lost,
    Outcome,
    OutOfMemory,
    Postponed,
    add_log,
    judge,
)
from unshard.evaluate.server.evaluators.work import EvalInput, Profile, Scores, WarmEngine
from unshard.evaluate.server.gpus import Gpus, describe_slots, gpus_of
from unshard.evaluate.server.joblog import log_event
from unshard.evaluate.server.pinning import Pins
from unshard.evaluate.server.processes.gpu_users import read_use
from unshard.evaluate.server.processes.launching import evaluator_environment, start_supervisor
from unshard.evaluate.server.processes.supervise import Exit, Order, has_begun, read_exit
from unshard.evaluate.server.processes.table import is_alive, kill_group
from unshard.evaluate.server.store.store import Store
from unshard.evaluate.server.warm.engines import Engines, engine_key
from unshard.evaluate.server.warm.worker import REPLACE
from unshard.stores.remote_path import is_url

_log = logging.getLogger(__name__)

_MARGIN_S = 30.0
_BEGUN = "begun"  # the file that the evaluator makes when a cluster has started it
_READING = "reading"  # a file with a byte for every server that reads the results
_KIND = "kind"  # the file with the evaluator's kind; attempts of older servers lack it
_MOST_FATAL = 2
_CARRIED_S = 30.0
_LOOK_S = 3.0
_VISIBLE_S = 60.0  # a network file system may show files of another machine later


class Limits(NamedTuple):
    """Times for every attempt: for processes to end when asked to, and between two polls."""

    grace_s: float = 10.0
    poll_s: float = 0.2


class Halt(Enum):
    """Why an attempt must stop."""

    CANCELLED = auto()
    LEAVE = auto()
    END = auto()


@dataclass(frozen=True, slots=True)
class Attempt:
    """A job, its evaluator, and where it runs."""

    job: Job
    profile: Profile
    gpus: tuple[str, ...]
    directory: Path

    def make_work(self, model: Path) -> EvalInput:
        """Return the input of the evaluator."""
        output = self.directory / "output"
        return EvalInput(model, output, self.directory, self.job.request, self.profile)


@dataclass(eq=False)
class AttemptRunner:
    """Runs attempts; any number at once, each in a thread of its own.

    `halt` returns why the attempt of a job must stop, or None. It is polled frequently.
    """

    store: Store
    merger: Merger
    pins: Pins
    engines: Engines
    limits: Limits
    halt: Callable[[str], Halt | None]
    _reading: threading.Lock = field(default_factory=threading.Lock)

    def run(self, attempt: Attempt) -> Outcome:
        """Merge, evaluate, and read the scores."""
        outcome = self._catch(attempt.job, lambda: self._run(attempt))
        if isinstance(outcome, Failed | OutOfMemory | Expired):
            now = self.store.get(attempt.job.id)
            if now is not None and now.pin not in {None, attempt.job.pin}:
                return Lost("the checkpoint was saved again; its newer pin is evaluated")
        return outcome

    def _run(self, attempt: Attempt) -> Outcome:
        job, directory = attempt.job, attempt.directory
        (directory / "output").mkdir(parents=True)
        (directory / _KIND).write_text(attempt.profile.kind)
        if is_url(job.request.checkpoint) and (failed := self._fail_if_rewritten(attempt)):
            return failed  # before the download
        model = self.merger.prepare(
            job, attempt.profile, directory=directory, is_given_up=self._is_given_up(job)
        )
        if model == self.merger.merged(job.id):
            log_event(job, "merged")
        return self._fail_if_rewritten(attempt) or self._evaluate(attempt, attempt.make_work(model))

    def _is_given_up(self, job: Job) -> Callable[[], bool]:
        return lambda: self.halt(job.id) is not None

    def _catch(self, job: Job, attempted: Callable[[], Outcome]) -> Outcome:
        """Return the outcome of a call, also where it raises an error."""
        try:
            return attempted()
        except CheckpointGoneError as error:
            root = self.pins.find_empty_root(job)
            why = f"the root {root} is empty or missing: is it mounted?"
            return Postponed(why) if root else Expired(_name_submitted(error, job))
        except GivenUpError:
            if self.halt(job.id) is Halt.CANCELLED:
                return Cancelled()
            return Lost("the server was stopped while it read the checkpoint")
        except (PassingError, StoreError, OSError) as error:
            return Postponed(_name_submitted(error, job))
        except UnshardError as error:
            return Failed(_name_submitted(error, job), may_retry=isinstance(error, CrashedError))

    def resume(self, attempt: Attempt, process: Process) -> Outcome:
        """Continue an attempt of an earlier server as if this server had begun it."""
        with suppress(OSError):
            if (attempt.directory / _KIND).read_text() != attempt.profile.kind:
                has_ended = self.end(attempt.job.id, process)
                return Lost("its profile is now of another kind") if has_ended else Left()
        was_alive = is_alive(process)
        work = attempt.make_work(self.merger.model_of(attempt.job))
        outcome = self._catch(attempt.job, lambda: self._conclude(attempt, work, process))
        is_lost = not was_alive and read_exit(attempt.directory) is None
        match outcome:
            case Postponed(why, Cause.KILLED) if is_lost:
                why = f"its processes ended together with the server\n{why}"
                return Postponed(why, Cause.DIED)
        return outcome

    def end(self, job_id: str, process: Process) -> bool:
        """End all processes of an attempt, however long it takes: they hold its GPUs.

        Returns:
            Whether they are gone; processes that cannot be ended are left to the next server.
        """
        while not kill_group(process, grace_s=self._grace_s(process.gpus)):
            _log.error("process group %d cannot be ended; its slots stay taken", process.pid)
            if self.halt(job_id) in {Halt.LEAVE, Halt.END}:
                return False
        return True

    def _grace_s(self, slots: Gpus) -> float:
        """Return how long an attempt may take to end: a cluster passes the signal on to a node."""
        return self.limits.grace_s + (_CARRIED_S if gpus_of(slots) is None else 0.0)

    def _fail_if_rewritten(self, attempt: Attempt) -> Failed | None:
        files = ask_disk(
            lambda: self.pins.list_changed(attempt.job),
            timeout_s=attempt.profile.timeout,
            is_given_up=self._is_given_up(attempt.job),
        )
        if not files:
            return None
        names = ", ".join(files[:SHOWN_LINES])
        why = f"the checkpoint was rewritten or replaced while it was waiting: {names}"
        return Failed(why, may_retry=False)

    def _evaluate(self, attempt: Attempt, work: EvalInput) -> Outcome:
        job, profile, directory = attempt.job, attempt.profile, str(attempt.directory)
        gpus, grace_s = gpus_of(attempt.gpus), self._grace_s(attempt.gpus)
        command, own, suffix, begins = profile.command_line(work), profile.environment, "", ""
        recipe = make_recipe(job, work, command, gpus or (), self.merger.merged(job.id))
        self.store.record_recipe(job.id, *recipe)
        if engine := profile.engine:
            worker, is_new = self._find_engine(attempt, engine, work)
            command, own = [*command, str(worker)], {}  # the worker has the profile's environment
            suffix = f" with {'a new' if is_new else 'the running'} engine"
        environment = evaluator_environment(own, program=command[0], gpus=gpus, directory=directory)
        if profile.launch:
            command, begins = _write_launched(work, command), _BEGUN
        order = Order(command, environment, directory, profile.timeout, grace_s, begins)
        child = start_supervisor(gpus=attempt.gpus, directory=attempt.directory)
        try:
            self.store.record_process(job.id, child.process)
            self.store.record_phase(job.id, Phase.EVALUATING)
        except BaseException:
            child.reap()  # without an order, so that no process runs that is not recorded
            raise
        child.give(order)
        started = f"started: attempt {job.attempts}{suffix}, {job.request.profile}"
        log_event(job, f"{started} on {describe_slots(attempt.gpus)}")
        outcome: Outcome | None = None
        try:
            outcome = self._conclude(attempt, work, child.process)
        finally:
            if isinstance(outcome, Left):
                child.leave()
            else:
                child.reap()
        return outcome

    def _find_engine(
        self, attempt: Attempt, engine: WarmEngine, work: EvalInput
    ) -> tuple[Path, bool]:
        """Return the directory of the worker that runs the job, and whether it is new."""
        request = attempt.job.request
        key = engine_key(attempt.profile, request.arguments.model_args, work.model)
        worker = self.engines.ready(attempt.gpus, request.profile, engine, key)
        if worker is None:
            raise GivenUpError("the engine of another job cannot be ended")
        return worker

    def _conclude(self, attempt: Attempt, work: EvalInput, process: Process) -> Outcome:
        """Wait for a process, end all processes of the attempt, and judge it."""
        # The supervisor enforces the timeout; this deadline is for a supervisor that cannot. An
        # evaluator that is launched may wait in a cluster's queue for any time before.
        allowed_s = attempt.profile.timeout + 2 * self.limits.grace_s + _MARGIN_S
        is_launched = gpus_of(attempt.gpus) is None
        deadline = time.monotonic() + (math.inf if is_launched else allowed_s)
        halt: Halt | None = None
        try:
            while halt is None and is_alive(process) and time.monotonic() < deadline:
                halt = self.halt(attempt.job.id)
                if halt is None:
                    time.sleep(self.limits.poll_s)
            if halt is None and read_exit(attempt.directory) is None:
                halt = self.halt(attempt.job.id)  # one signal may have ended process and server
        except BaseException:
            if not self.end(attempt.job.id, process):
                return Left()
            raise
        if halt is Halt.LEAVE or not self.end(attempt.job.id, process):
            return Left()
        if halt is not None:
            return Cancelled() if halt is Halt.CANCELLED else Lost("the server was stopped")
        return self._judge_ended(attempt, work)

    def _judge_ended(self, attempt: Attempt, work: EvalInput) -> Outcome:
        """Judge an attempt whose processes have ended by its files."""
        exit_record = read_exit(attempt.directory)
        if exit_record is None and not has_begun(attempt.directory):
            return Postponed("the supervisor exited before it was given a command")
        if exit_record is None:
            why = add_log("the evaluator and its supervisor were killed", attempt.directory)
            return Postponed(why, Cause.KILLED)
        if attempt.profile.engine and exit_record.returncode == REPLACE:
            return Lost(add_log("the engine did not take the checkpoint", attempt.directory))
        outcome = self._judge_once(work, exit_record)
        is_elsewhere = gpus_of(attempt.gpus) is None and exit_record.returncode == 0
        deadline = time.monotonic() + (_VISIBLE_S if is_elsewhere else 0.0)
        while not isinstance(outcome, Scores) and time.monotonic() < deadline:
            if self.halt(attempt.job.id) is not None:
                break
            time.sleep(_LOOK_S)
            outcome = self._judge_once(work, exit_record)
        if isinstance(outcome, OutOfMemory):
            # The memory that a kept engine uses is its own, not that of other users.
            gpus = None if attempt.profile.engine else gpus_of(attempt.gpus)
            used = read_use(gpus or ())
            return replace(outcome, error=f"{used}\n{outcome.error}".strip(), used=used)
        is_merged = work.model == self.merger.merged(attempt.job.id)
        if is_merged or not isinstance(outcome, Scores):
            return outcome
        return self._fail_if_rewritten(attempt) or outcome

    def _judge_once(self, work: EvalInput, done: Exit) -> Outcome:
        # Results may take many times their size in memory, so they are read one after the other.
        # The count is inside the lock: a job that waits for its turn cannot kill the server.
        with self._reading, _counted(work.directory) as fatal:
            if fatal >= _MOST_FATAL:
                why = f"the server was killed {fatal} times while it read the results"
                return Failed(why, may_retry=False)
            return judge(work, done)


def _write_launched(work: EvalInput, command: Sequence[str]) -> list[str]:
    """Write a script that runs a command in the attempt's directory; return how to launch it.

    A script is needed because launchers differ in how they quote arguments and where they start.
    """
    request, directory = work.request, work.directory
    script = directory / "launched.sh"
    quoted = shlex.quote(str(directory))
    script.write_text(f"cd {quoted} && : > {_BEGUN} && exec {shlex.join(command)}\n")
    values = {
        "gpus": str(work.gpus),
        "job": directory.parent.name,
        "attempt": directory.name,
        "run": request.run,
        "step": "" if request.step is None else str(request.step),
    }
    return [*(fill(part, values) for part in work.profile.launch), "/bin/sh", str(script)]


def _name_submitted(error: Exception, job: Job) -> str:
    """Return an error with the submitted path instead of the pin's, which will be removed."""
    # `str` would write the options of `unshard merge` in Python's notation.
    text = error.text if isinstance(error, UnshardError) else str(error)
    submitted = Path(job.request.checkpoint)
    if job.pin is None:
        return text
    pin = Path(job.pin)
    return text.replace(str(pin), str(submitted)).replace(str(pin.parent), str(submitted.parent))


@contextmanager
def _counted(directory: Path) -> Iterator[int]:
    """Yield how many servers began to read the results of an attempt and never finished."""
    mark, before = directory / _READING, 0
    with suppress(OSError), mark.open("ab") as file:  # a full disk
        before = file.tell()
        file.write(b"x")
    try:
        yield before
    finally:
        mark.unlink(missing_ok=True)
