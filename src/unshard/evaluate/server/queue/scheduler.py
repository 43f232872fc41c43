"""The loop: claim a job when slots are free, run it in a thread, record the outcome."""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from unshard.errors import UnshardError
from unshard.evaluate.jobs import Job, Settings, Status
from unshard.evaluate.process import Process
from unshard.evaluate.run_folder import unlock
from unshard.evaluate.server.attempts.attempt import Attempt, AttemptRunner, Halt, Limits
from unshard.evaluate.server.attempts.merging import Merger
from unshard.evaluate.server.endings import Absent, Failed, Left, Outcome, Postponed
from unshard.evaluate.server.evaluators.installed import UnknownTasks
from unshard.evaluate.server.evaluators.profiles import base_of, profile_named
from unshard.evaluate.server.evaluators.work import Profile, Scores
from unshard.evaluate.server.gpus import Slots, describe_slots
from unshard.evaluate.server.joblog import log_event, short_id
from unshard.evaluate.server.pinning import Pins
from unshard.evaluate.server.queue.allotment import Allotment
from unshard.evaluate.server.queue.choosing import NextJob
from unshard.evaluate.server.queue.job_files import JOBS, Retention
from unshard.evaluate.server.queue.outcomes import Outcomes
from unshard.evaluate.server.queue.work_lock import lock
from unshard.evaluate.server.store.store import Store
from unshard.evaluate.server.warm.engines import Engines
from unshard.evaluate.server.warm.worker import EngineWorker

_log = logging.getLogger(__name__)

_MERGES = 2  # at once
_STOP_S = 60.0  # for threads that end processes and record it; a disk may never answer


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Settings of a scheduler.

    Attributes:
        work_dir: for attempts, logs and merged models.
        limits: of every attempt.
        backoff_s: the wait after a job's first failure; doubled each time, an hour at most.
        keep_days, keep_gb, keep_samples_mb: see `job_files.Retention`.
        unknown: the tasks that evaluators do not know.
        pass_at_most: how many jobs may pass a job that needs more GPUs than are free.
    """

    work_dir: Path
    limits: Limits = field(default_factory=Limits)
    backoff_s: float = 30.0
    keep_days: float | None = None
    keep_gb: float | None = None
    keep_samples_mb: int = 64
    unknown: UnknownTasks = field(default_factory=UnknownTasks)
    pass_at_most: int = 0


class Scheduler:
    """Runs the jobs of a store as slots are free, in the order that `choosing` describes.

    Attributes:
        is_draining: whether no more jobs begin.
        is_drained: whether, in addition, none runs any more.
    """

    def __init__(
        self,
        store: Store,
        slots: Slots,
        profiles: Mapping[str, Profile],
        pins: Pins,
        settings: SchedulerSettings,
    ) -> None:
        self._store, self._slots = store, slots
        self._profiles, self._settings = profiles, settings
        self._work_dir = settings.work_dir.absolute()
        self._halt: Halt | None = None
        merger, limits = Merger(self._work_dir / "merged", at_once=_MERGES), settings.limits
        self._engines = engines = Engines(
            self._work_dir / "engines", limits.grace_s, self._is_stopped
        )
        self._runner = AttemptRunner(store, merger, pins, engines, limits, self._halt_of)
        self._outcomes = Outcomes(store, merger, pins, settings.backoff_s, self._is_stopped)
        self._allotment = Allotment(
            store, slots, profiles, engines, settings.pass_at_most, self._retire
        )
        keep = settings.keep_days, settings.keep_gb, settings.keep_samples_mb
        self._retention = Retention(store, self._work_dir, *keep)
        self.is_draining = self.is_drained = False
        self._wake = threading.Event()
        self._threads: set[threading.Thread] = set()
        self._loop_thread: threading.Thread | None = None
        self._lock: int | None = None

    def lock(self) -> None:
        """Lock the directory until `stop`; UsageError if another server uses it."""
        if self._lock is None:
            self._lock = lock(self._work_dir)

    def start(self) -> None:
        """Lock the directory, adopt or end an earlier server's processes, run jobs until `stop`."""
        self.lock()
        workers = self._engines.find()
        for job in self._store.running():
            self._take_up(job)
            if job.process is not None:
                workers.pop(job.process.gpus, None)
        for worker in workers.values():
            self._take_up_idle(worker)
        self._outcomes.tidy_up(self._profiles)
        self._loop_thread = self._spawn(self._loop, "scheduler")

    def stop(self, *, end: bool) -> None:
        """Begin no more jobs, and return when nothing more is recorded.

        A thread that waits for a disk that does not answer is left behind: the next server takes
        its job up.

        Args:
            end: end running evaluators, whose jobs are queued again; or else leave them to the
                next server. Merges are interrupted in any case.
        """
        self._halt = Halt.END if end else Halt.LEAVE
        self._wake.set()
        if self._loop_thread is not None:
            self._loop_thread.join()  # it starts the other threads
        for gpus in self._engines.take_overdue(are_all=True):
            self._retire(gpus)
        deadline = time.monotonic() + _STOP_S + self._settings.limits.grace_s
        for thread in list(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _log.error("%s does not end; it is left to the next server", thread.name)
        self._engines.leave()
        if self._lock is not None:
            unlock(self._lock)
            self._lock = None

    def wake(self) -> None:
        """Look for jobs at once: one was submitted."""
        self._wake.set()

    def drain(self) -> None:
        """Begin no more jobs; running jobs go on, queued jobs stay in the queue.

        A signal handler may call it: it only sets flags, and reads no database. See `is_drained`.
        """
        self.is_draining = True
        self._wake.set()

    def cancel(self, job_id: str) -> bool:
        """Cancel a queued or running job; return whether it was one.

        The processes of a running job end a little later.
        """
        is_cancelled = self._store.cancel(job_id)
        if is_cancelled:
            self._finish_stopped(job_id, "cancelled")
        return is_cancelled

    def supersede(self, job_id: str, by: str) -> None:
        """End a job that another replaces, as `cancel` does; also a failed job."""
        if self._store.supersede(job_id, by):
            self._finish_stopped(job_id, f"superseded by job {short_id(by)}")

    def arrange(self, job: Job) -> None:
        """Apply `order` and `max_lag` of a submitted job's profile to the queue."""
        profile, step = profile_named(self._profiles, job.request.profile), job.request.step
        if job.status is not Status.QUEUED or not step:
            return
        if profile.max_lag is not None:
            for other in self._store.ordering.skip(job, profile.max_lag):
                self._finish_stopped(other, f"skipped: step {step} was submitted (max_lag)")
        if profile.order == "newest":
            self._store.ordering.put_newest_first(job)

    def _finish_stopped(self, job_id: str, event: str) -> None:
        self._allotment.forget(job_id)
        self._outcomes.log_event(job_id, event)
        if job_id not in {job.id for job in self._store.running()}:
            self._outcomes.release_pin(job_id)

    def waits_for(self, job: Job) -> str | None:
        """Return why a queued job cannot begin, besides its turn; None if it can.

        The database does not have it, because the next server may be configured otherwise.
        """
        if job.status is not Status.QUEUED:
            return None
        if (why := self._allotment.why_not(job.request)) is not None:
            return f"the server's configuration: {why}"
        return self._allotment.why_gpus_wait(job.request)

    def directory_of(self, job: Job) -> Path:
        """Return the directory of a job's last attempt; it contains the log."""
        return self._work_dir / JOBS / job.id / str(job.attempts)

    def _is_stopped(self) -> bool:
        return self._halt is not None

    def _spawn(self, target: Callable[[], None], name: str) -> threading.Thread:
        def body() -> None:
            try:
                target()
            finally:
                self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=body, name=name, daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except BaseException:
            self._threads.discard(thread)
            raise
        return thread

    def _loop(self) -> None:
        while self._halt is None:
            self._wake.clear()
            try:
                if self._retention.begin_turn():
                    self._spawn(self._sweep, "retention")
                for gpus in self._engines.take_overdue(are_all=False):
                    self._retire(gpus)
                if self.is_draining:
                    self.is_drained = not self._store.running()
                while not self.is_draining and (choice := self._allotment.choose(time.time())):
                    if not self._begin(choice):
                        break
            except Exception:  # noqa: BLE001  the jobs after it must not wait forever
                _log.exception("no job can be started; trying again")
            self._wake.wait(self._settings.limits.poll_s)

    def _sweep(self) -> None:
        try:
            self._retention.sweep(self._is_stopped)
        except sqlite3.Error:
            _log.exception("directories of old jobs are removed later")

    def _halt_of(self, job_id: str) -> Halt | None:
        if self._halt is not None:
            return self._halt
        try:
            job = self._store.get(job_id)
        except sqlite3.Error:
            _log.exception("the database of jobs does not answer; trying again")
            return None
        return None if job is not None and job.status is Status.RUNNING else Halt.CANCELLED

    def _begin(self, choice: NextJob) -> bool:
        """Begin an attempt at a job; return whether to choose another job."""
        job = self._store.get(choice.job.job_id)
        if self._halt is not None or job is None:
            return False
        if (why := self._allotment.why_not(job.request)) is not None:
            log_event(job, f"waits: {why}")
            self._allotment.pass_over_unfit()
            return True
        profile, count = self._allotment.find(job.request)
        gpus = self._allotment.take(job.request.profile, profile, count)
        if gpus is None:
            return False
        claimed = None
        try:
            claimed = self._store.claim(time.time(), job.id, gpus)
        finally:
            if claimed is None:
                self._allotment.return_unused(gpus)
        if claimed is None:
            return True
        self._allotment.count(choice)
        attempt = Attempt(claimed, profile, gpus, self.directory_of(claimed))
        try:
            self._spawn(lambda: self._perform(attempt, None), f"job {job.id}")
        except RuntimeError as error:  # too many processes or threads of this user
            _log.exception("job %s cannot be started", job.id)
            self._close(attempt, Postponed(f"its thread could not be started: {error}"))
            return False
        return True

    def _with_settings(self, attempt: Attempt) -> Attempt:
        """Record the settings of an attempt: its profile's, when it begins."""
        job, profile = attempt.job, attempt.profile
        arguments = profile.chosen(job.request.arguments).given()
        basis = profile.revision(with_arguments=False)
        settings = Settings(arguments, profile.revision(), basis=basis)
        self._store.describe(job.id, settings, {})
        return replace(attempt, job=replace(job, settings=settings))

    def _retire(self, gpus: tuple[str, ...], *, has_slots: bool = True) -> None:
        """End an engine that no job uses, and give its slots back."""

        def body() -> None:
            self._engines.end(gpus, lambda: self._slots.give_back(gpus) if has_slots else None)
            self._wake.set()

        self._spawn(body, f"ending the engine on {describe_slots(gpus)}")

    def _take_up_idle(self, worker: EngineWorker) -> None:
        """Adopt an engine of an earlier server that no job uses, or end it."""
        gpus = worker.process.gpus
        has_slots = self._slots.adopt(gpus)
        profile = self._profiles.get(worker.profile)
        if not (has_slots and profile and profile.engine and self._engines.rest(gpus)):
            self._retire(gpus, has_slots=has_slots)

    def _take_up(self, job: Job) -> None:
        """Adopt an attempt of an earlier server, or end its processes."""
        process = job.process
        if process is None:
            self._outcomes.requeue(job.id, "the server ended while it merged", is_dead=True)
            return
        has_slots = self._slots.adopt(process.gpus)
        try:
            profile, _ = self._allotment.find(job.request)
        except UnshardError as error:
            log_event(job, f"not adopted: {error}")
        else:
            if has_slots:
                directory = Path(process.directory)
                attempt = Attempt(job, profile, process.gpus, directory)
                log_event(job, f"adopted: attempt {job.attempts} on {describe_slots(process.gpus)}")
                self._spawn(lambda: self._perform(attempt, process), f"job {job.id}")
                return
            log_event(job, "not adopted: its GPUs are not this server's")
        self._spawn(lambda: self._discard(job, process, has_slots=has_slots), f"job {job.id}")

    def _discard(self, job: Job, process: Process, *, has_slots: bool) -> None:
        """End an attempt of an earlier server, and queue its job again."""
        if not self._runner.end(job.id, process) or not self._engines.end(process.gpus):
            return
        try:
            self._outcomes.requeue(job.id, "the server that ran it was replaced by another")
        finally:
            if has_slots:
                self._slots.give_back(process.gpus)
            self._wake.set()

    def _perform(self, attempt: Attempt, process: Process | None) -> None:
        """Run an attempt, or the rest of an adopted one, to its end, and record it."""
        try:
            if process is None:
                attempt = self._with_settings(attempt)
                outcome = self._runner.run(attempt)
            else:
                outcome = self._runner.resume(attempt, process)
        except sqlite3.OperationalError as error:
            _log.exception("job %s is tried again", attempt.job.id)
            outcome = Postponed(f"the database of jobs does not answer: {error}")
        except Exception as error:  # noqa: BLE001  an evaluator's mistake must not cost the server
            _log.exception("job %s failed with an unexpected error", attempt.job.id)
            outcome = Failed(f"unexpected error: {error!r}", may_retry=False)
        if not isinstance(outcome, Left):
            self._close(attempt, outcome)

    def _close(self, attempt: Attempt, outcome: Outcome) -> None:
        """Record the outcome of an attempt, and give its slots back.

        Its engine, if it has one, keeps them after a completed job. After any other it is ended,
        because it may be the cause, or may still be working on the job.
        """
        if isinstance(outcome, Absent):
            self._allotment.hold(attempt.job.request.profile, outcome.why)
        if isinstance(outcome, Failed) and outcome.unknown is not None:
            self._settings.unknown.add(base_of(attempt.job.request.profile), outcome.unknown)
        try:
            self._outcomes.record(attempt, outcome)
        finally:
            may_stay = isinstance(outcome, Scores) and self._halt is None
            if not (may_stay and self._engines.rest(attempt.gpus)):
                self._engines.end(attempt.gpus, lambda: self._slots.give_back(attempt.gpus))
            self._wake.set()
