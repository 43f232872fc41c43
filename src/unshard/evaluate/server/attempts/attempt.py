"""One attempt at a job, from its checkpoint to its metrics; or the rest of one, after a restart."""

import logging
import math
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path

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
from unshard.evaluate.server.pinning import Pins
from unshard.evaluate.server.processes.bounded_log import LOG_BYTES
from unshard.evaluate.server.processes.gpu_users import read_use
from unshard.evaluate.server.processes.launching import evaluator_environment, start_supervisor
from unshard.evaluate.server.processes.supervise import Exit, Order, has_begun, read_exit
from unshard.evaluate.server.processes.table import is_alive, kill_group
from unshard.evaluate.server.store.store import Store
from unshard.evaluate.server.telling import tell
from unshard.evaluate.server.warm.engines import Engines, engine_key
from unshard.evaluate.server.warm.worker import REPLACE
from unshard.stores.remote_path import is_url

_log = logging.getLogger(__name__)

_MARGIN_S = 30.0
_BEGUN = "begun"  # made when a cluster has found a place for the evaluator
_READING = "reading"  # a byte for every server that reads the results
_KIND = "kind"  # of the evaluator; attempts of older servers do not have it
_MOST_FATAL = 2
_CARRIED_S = 30.0
_LOOK_S = 3.0
_VISIBLE_S = 60.0  # a network file system may show what another machine has written later


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


class AttemptRunner:
    """Runs attempts; any number at once, each in a thread of its own.

    Args:
        store: the truth.
        merger: makes the models.
        pins: know which files of a checkpoint were rewritten since it was submitted.
        engines: those that are kept between jobs.
        limits: of every attempt.
        halt: returns why the job's attempt must stop, or None. Polled frequently.
    """

    def __init__(  # noqa: PLR0913 (what an attempt needs on its way)
        self,
        store: Store,
        merger: Merger,
        pins: Pins,
        engines: Engines,
        limits: Limits,
        *,
        halt: Callable[[str], Halt | None],
    ) -> None:
        self._store = store
        self._merger = merger
        self._limits = limits
        self._halt = halt
        self._pins = pins
        self._engines = engines
        self._reading = threading.Lock()

    def run(self, attempt: Attempt) -> Outcome:
        """Merge, evaluate, and read what was measured."""
        outcome = self._catch(attempt.job, lambda: self._run(attempt))
        if isinstance(outcome, Failed | OutOfMemory | Expired):
            now = self._store.get(attempt.job.id)
            if now is not None and now.pin not in {None, attempt.job.pin}:
                return Lost("the checkpoint was saved again; its newer pin is evaluated")
        return outcome

    def _run(self, attempt: Attempt) -> Outcome:
        job = attempt.job
        (attempt.directory / "output").mkdir(parents=True)
        (attempt.directory / _KIND).write_text(attempt.profile.kind)
        if is_url(job.request.checkpoint) and (why := self._fail_if_rewritten(attempt)):
            return why  # nothing is downloaded in vain
        model = self._merger.prepare(
            job,
            attempt.profile,
            directory=attempt.directory,
            is_given_up=lambda: self._halt(job.id) is not None,
        )
        if model == self._merger.merged(job.id):
            tell(job, "merged")
        return self._fail_if_rewritten(attempt) or self._evaluate(attempt, attempt.make_work(model))

    def _catch(self, job: Job, attempted: Callable[[], Outcome]) -> Outcome:
        """Return an outcome, or what an error means that ended the attempt."""
        try:
            return attempted()
        except CheckpointGoneError as error:
            root = self._pins.find_empty_root(job)
            why = f"the root {root} is empty, or not there: is it mounted?"
            return Postponed(why) if root else Expired(_name_submitted(error, job))
        except GivenUpError:
            if self._halt(job.id) is Halt.CANCELLED:
                return Cancelled()
            return Lost("the server was stopped while it read the checkpoint")
        except (PassingError, StoreError, OSError) as error:
            return Postponed(_name_submitted(error, job))
        except UnshardError as error:
            return Failed(_name_submitted(error, job), may_retry=isinstance(error, CrashedError))

    def resume(self, attempt: Attempt, process: Process) -> Outcome:
        """Continue an attempt of an earlier server, as if this one had begun it."""
        with suppress(OSError):
            if (attempt.directory / _KIND).read_text() != attempt.profile.kind:
                gone = self.end(attempt.job.id, process)
                return Lost("its profile is now of another kind") if gone else Left()
        was_alive = is_alive(process)
        work = attempt.make_work(self._merger.model_of(attempt.job))
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
            if self._halt(job_id) in {Halt.LEAVE, Halt.END}:
                return False
        return True

    def _grace_s(self, slots: Gpus) -> float:
        """Return how long an attempt may take to end: a cluster carries the signal to a node."""
        return self._limits.grace_s + (_CARRIED_S if gpus_of(slots) is None else 0.0)

    def _fail_if_rewritten(self, attempt: Attempt) -> Failed | None:
        job = attempt.job
        files = ask_disk(
            lambda: self._pins.list_changed(job),
            timeout_s=attempt.profile.timeout,
            is_given_up=lambda: self._halt(job.id) is not None,
        )
        if not files:
            return None
        shown = ", ".join(files[:SHOWN_LINES])
        return Failed(
            f"the checkpoint was rewritten or replaced while it was waiting: {shown}",
            may_retry=False,
        )

    def _evaluate(self, attempt: Attempt, work: EvalInput) -> Outcome:
        profile, directory = attempt.profile, str(attempt.directory)
        command, own, what = profile.command_line(work), profile.environment, ""
        merged, gpus = self._merger.merged(attempt.job.id), gpus_of(attempt.gpus) or ()
        recipe = make_recipe(attempt.job, work, command, gpus, merged)
        self._store.record_recipe(attempt.job.id, *recipe)
        if engine := profile.engine:
            place, is_new = self._find_engine(attempt, engine, work)
            command, own = [*command, str(place)], {}  # its worker has the profile's
            what = f" with {'a new' if is_new else 'the running'} engine"
        environment = evaluator_environment(
            own, program=command[0], gpus=gpus_of(attempt.gpus), directory=directory
        )
        grace_s, begins = self._grace_s(attempt.gpus), ""
        if profile.launch:
            command, begins = _write_launched(work, command), _BEGUN
        log_bytes = self._limits.log_bytes
        order = Order(command, environment, directory, profile.timeout, grace_s, log_bytes, begins)
        child = start_supervisor(gpus=attempt.gpus, directory=attempt.directory)
        try:
            self._store.record_process(attempt.job.id, child.process)
            self._store.record_phase(attempt.job.id, Phase.EVALUATING)
        except BaseException:
            child.reap()  # without an order: nothing runs that the database does not have
            raise
        child.give(order)
        started = f"started: attempt {attempt.job.attempts}{what}, {attempt.job.request.profile}"
        tell(attempt.job, f"{started} on {describe_slots(attempt.gpus)}")
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
        found = self._engines.ready(attempt.gpus, request.profile, engine, key)
        if found is None:
            raise GivenUpError("the engine of another job cannot be ended")
        return found

    def _conclude(self, attempt: Attempt, work: EvalInput, process: Process) -> Outcome:
        """Wait for a process, leave nothing of it behind, and judge what it did."""
        # The supervisor keeps to the timeout; this is for one that cannot. In a cluster's queue an
        # evaluator may wait before, for any time.
        allowed_s = attempt.profile.timeout + 2 * self._limits.grace_s + _MARGIN_S
        is_launched = gpus_of(attempt.gpus) is None
        deadline = time.monotonic() + (math.inf if is_launched else allowed_s)
        halt: Halt | None = None
        try:
            while halt is None and is_alive(process) and time.monotonic() < deadline:
                halt = self._halt(attempt.job.id)
                if halt is None:
                    time.sleep(self._limits.poll_s)
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
        return self._judge_left(attempt, work)

    def _judge_left(self, attempt: Attempt, work: EvalInput) -> Outcome:
        """Judge what an attempt's processes, which are gone, have left."""
        done = read_exit(attempt.directory)
        if done is None and not has_begun(attempt.directory):
            return Postponed("its supervisor ended before it got its order")
        if done is None:
            why = add_log("the evaluator and its supervisor were killed", attempt.directory)
            return Postponed(why, Cause.KILLED)
        if attempt.profile.engine and done.returncode == REPLACE:
            return Lost(add_log("the engine did not take the checkpoint", attempt.directory))
        outcome = self._judge_once(work, done)
        is_elsewhere = gpus_of(attempt.gpus) is None and done.returncode == 0
        deadline = time.monotonic() + (_VISIBLE_S if is_elsewhere else 0.0)
        while not isinstance(outcome, Scores) and time.monotonic() < deadline:
            if self._halt(attempt.job.id) is not None:
                break
            time.sleep(_LOOK_S)
            outcome = self._judge_once(work, done)
        if isinstance(outcome, OutOfMemory):  # of an engine that is kept the rest is its own
            gpus = None if attempt.profile.engine else gpus_of(attempt.gpus)
            used = read_use(gpus or ())
            return replace(outcome, error=f"{used}\n{outcome.error}".strip(), used=used)
        is_merged = work.model == self._merger.merged(attempt.job.id)
        if is_merged or not isinstance(outcome, Scores):
            return outcome
        return self._fail_if_rewritten(attempt) or outcome

    def _judge_once(self, work: EvalInput, done: Exit) -> Outcome:
        # Results may take many times their size in memory, so they are read one after the other;
        # a job that waits for its turn is not counted as one that ended the server.
        with self._reading, _counted(work.directory) as fatal:
            if fatal >= _MOST_FATAL:
                why = f"the server was killed {fatal} times while it read the results"
                return Failed(why, may_retry=False)
            return judge(work, done)


def _write_launched(work: EvalInput, command: Sequence[str]) -> list[str]:
    """Write the script that runs a command in the attempt's directory; return what launches it.

    A script, because launchers quote arguments, and start in directories, in ways of their own.
    """
    request, directory = work.request, work.directory
    script = directory / "launched.sh"
    place = shlex.quote(str(directory))
    script.write_text(f"cd {place} && : > {_BEGUN} && exec {shlex.join(command)}\n")
    values = {
        "gpus": str(work.gpus),
        "job": directory.parent.name,
        "attempt": directory.name,
        "run": request.run,
        "step": "" if request.step is None else str(request.step),
    }
    return [*(fill(part, values) for part in work.profile.launch), "/bin/sh", str(script)]


def _name_submitted(error: Exception, job: Job) -> str:
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
