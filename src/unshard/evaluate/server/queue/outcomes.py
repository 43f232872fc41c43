"""How a job continues, and whether its merged model stays, when an attempt has ended."""

import logging
import shutil
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import assert_never

from unshard.errors import UnshardError
from unshard.evaluate.jobs import Filters, Job, Status, backoff
from unshard.evaluate.server.attempts.attempt import Attempt
from unshard.evaluate.server.attempts.merging import Merger
from unshard.evaluate.server.endings import (
    Absent,
    Cancelled,
    Cause,
    Expired,
    Failed,
    Left,
    Lost,
    Outcome,
    OutOfMemory,
    Postponed,
)
from unshard.evaluate.server.evaluators.profiles import profile_named
from unshard.evaluate.server.evaluators.work import Profile, Scores
from unshard.evaluate.server.pinning import Pins
from unshard.evaluate.server.store.statements import LONGEST_WAIT_S
from unshard.evaluate.server.store.store import Store
from unshard.evaluate.server.telling import tell, tell_outcome
from unshard.evaluate.settings import Settings

_log = logging.getLogger(__name__)

_AGAIN_S = 1.0
_MOST_IN_A_ROW = {
    Cause.HINDERED: 20,
    Cause.MEMORY: 20,
    Cause.KILLED: 2,  # an evaluator that takes all memory would be killed forever
    Cause.DIED: 10,  # not fewer: what ended the server may have been another job, or the machine
}


class Outcomes:
    """Records outcomes, removes the merged models that need not stay, and lets go of pins.

    `backoff_s` is between the first failure of a job and its next attempt; `is_stopped` is whether
    to stop waiting for the database.
    """

    def __init__(
        self,
        store: Store,
        merger: Merger,
        pins: Pins,
        backoff_s: float,
        *,
        is_stopped: Callable[[], bool],
    ) -> None:
        self._store = store
        self._merger = merger
        self._backoff_s = backoff_s
        self._pins = pins
        self._is_stopped = is_stopped
        self._tidying = threading.Lock()

    def record(self, attempt: Attempt, outcome: Outcome) -> None:
        """Record the outcome of an attempt, whose processes have ended.

        If that is not possible, the job fails.
        """
        job_id = attempt.job.id
        if not isinstance(outcome, Scores):
            self._merger.remove(job_id)
        for step in (
            lambda: self._write(attempt, outcome),
            lambda: self._keep(job_id, attempt.profile),
            lambda: self.release_pin(job_id),
        ):
            try:
                self._persist(step)
            except Exception as error:  # noqa: BLE001  otherwise the job would run forever
                _log.exception("the outcome of job %s cannot be recorded", job_id)
                self._persist(partial(self._store.fail, job_id, repr(error), None))
        now = self._job(job_id)
        if now is not None:
            tell_outcome(attempt.job, outcome, now)

    def _job(self, job_id: str) -> Job | None:
        """Return a job for the log; None if the database does not answer."""
        try:
            return self._store.get(job_id)
        except sqlite3.Error:
            return None

    def requeue(self, job_id: str, why: str) -> None:
        """Record that an attempt was lost."""
        self._persist(lambda: self._store.requeue(job_id, why))
        self._persist(lambda: self.release_pin(job_id))
        self.tell(job_id, f"queued again: {why}")

    def record_death(self, job_id: str, why: str) -> None:
        """Record that an attempt ended together with its server, before it had a process."""
        self._persist(lambda: self._postpone(job_id, Cause.DIED, why))
        self._persist(lambda: self.release_pin(job_id))
        self.tell(job_id, f"queued again: {why}")

    def tell(self, job_id: str, what: str) -> None:
        """Log a step on a job's way."""
        if (job := self._job(job_id)) is not None:
            tell(job, what)

    def release_pin(self, job_id: str) -> None:
        """Let go of a job's pin, if the job has ended."""
        job = self._store.get(job_id)
        if job is not None and job.status.is_final:
            self._pins.release(job)

    def tidy_up(self, profiles: Mapping[str, Profile]) -> None:
        """Remove the merged models that an earlier server should have removed."""
        self._merger.recover()
        running = {job.id for job in self._store.running()}
        for job_id in set(self._merger.list_kept()) - running:
            job = self._store.get(job_id)
            if job is None or job.status is not Status.COMPLETED:
                self._merger.remove(job_id)
                continue
            try:
                self._keep(job_id, profile_named(profiles, job.request.profile))
            except UnshardError:
                _log.warning("the merged model of job %s stays: its profile is gone", job_id)

    def _write(self, attempt: Attempt, outcome: Outcome) -> None:
        job, store = attempt.job, self._store
        match outcome:
            case Scores():
                self._complete(attempt, outcome)
            case OutOfMemory(why, used) if used:
                self._postpone(job.id, Cause.MEMORY, why)
            case Failed(error) | OutOfMemory(error):
                may_retry = not isinstance(outcome, Failed) or outcome.may_retry
                is_last = not may_retry or job.failures >= attempt.profile.retries
                retry_at = self._due_at(job.failures)
                store.fail(job.id, error, None if is_last else retry_at)
            case Postponed(why, cause):
                self._postpone(job.id, cause, why)
            case Expired(why):
                store.expire(job.id, why)
            case Lost(why) | Absent(why):
                store.requeue(job.id, why)
            case Cancelled():
                store.release(job.id)
            case Left():
                pass
            case _:
                assert_never(outcome)

    def _postpone(self, job_id: str, cause: Cause, why: str) -> None:
        """Queue a job again; after too many such attempts in a row it fails."""
        count = self._store.count_in_a_row(job_id, cause)
        if count < _MOST_IN_A_ROW[cause]:
            self._store.postpone(job_id, cause, why, self._due_at(count))
        else:
            self._store.fail(job_id, f"{why}\nThis has happened {count + 1} times in a row.", None)

    def _due_at(self, failures: int) -> float:
        return time.time() + backoff(failures, first_s=self._backoff_s, most_s=LONGEST_WAIT_S)

    def _complete(self, attempt: Attempt, done: Scores) -> None:
        """Record a job's results, and remove the directories of its other attempts."""
        job_id = attempt.job.id
        place = attempt.directory.parent
        try:  # now, because a server that is killed afterwards would leave them
            others = set(place.iterdir()) - {attempt.directory}
        except OSError as error:
            _log.warning("%s: other attempts are not removed: %s", place, error)
            others = set()
        for other in others:
            shutil.rmtree(other, ignore_errors=True)
        settings = replace(attempt.job.settings or Settings(), evaluator=done.evaluator)
        facts = {task: (of.version, of.n_shot, of.n_samples) for task, of in done.tasks.items()}
        self._store.describe(job_id, settings, facts)
        if self._store.complete(job_id, done.metrics, done.file, done.errors, done.directions):
            return
        now = self._store.get(job_id)
        if now is None or now.status in {Status.CANCELLED, Status.SUPERSEDED}:
            self._merger.remove(job_id)

    def _keep(self, job_id: str, profile: Profile) -> None:
        """Remove the merged models that need not stay, if a job is completed."""
        with self._tidying:
            job = self._store.get(job_id)
            if job is None or job.status is not Status.COMPLETED:
                return
            of_run = Filters(Status.COMPLETED, run=job.run.id, weights=job.request.weights)
            alike = replace(of_run, profile=job.request.profile)
            # With "none" the others have nothing to lose, and they may be thousands.
            completed = [] if profile.keep == "none" else self._store.jobs(alike)
            if profile.keep != "none" and profile.best_metric is not None:  # before others go
                # The base model is not merged: however good it is, no merged model goes for it.
                merged, every = set(self._merger.list_kept()), completed
                completed = [one for one in every if one.id in merged]
                self._link_best(job, profile.best_metric, every, completed)
            for other in find_removable(job, profile, completed):
                self._merger.remove(other)

    def _link_best(
        self, job: Job, metric: str, completed: Sequence[Job], merged: Sequence[Job]
    ) -> None:
        """Link the best merged model of a run, of the settings that most of its steps have."""
        name = metric.removeprefix("-")
        shown = [one for one in completed if one.hidden is None and name in one.metrics]
        in_order = sorted(shown, key=lambda one: one.completed_at or 0)
        steps = {(one.settings_id, one.request.step): None for one in in_order}
        counts = Counter(settings for settings, _ in steps)
        usual = max(counts, key=counts.__getitem__, default=None)
        best = find_best(metric, [one for one in merged if one.settings_id == usual])
        place = self._store.runs.place_of(job.run.id)
        self._merger.link_best(place, job.request, None if best is None else best.id)

    def _persist(self, record: Callable[[], object]) -> None:
        """Try until the database accepts it; after a stop the next server finds out by itself."""
        while True:
            try:
                record()
            except sqlite3.OperationalError:
                _log.exception("the database of jobs does not answer; trying again")
                if self._is_stopped():
                    return
                time.sleep(_AGAIN_S)
            else:
                return


def find_removable(job: Job, profile: Profile, completed: Iterable[Job]) -> list[str]:
    """Return the jobs whose merged models are not needed once a job is completed.

    Args:
        job: the one that is completed.
        profile: keeps nothing, all, or the best by its metric.
        completed: the completed jobs of the same run, weights and profile, including this one. Of
            each of their settings the best is kept.
    """
    if profile.keep == "all":
        return []
    if profile.keep != "best" or profile.best_metric is None:
        return [job.id]
    everyone = sorted(completed, key=_rank)
    best = set[str]()
    for settings in {one.settings_id for one in everyone}:
        line = [one for one in everyone if one.settings_id == settings]
        found = find_best(profile.best_metric, line)
        best |= set() if found is None else {found.id}
    # Those that are hidden may be shown again.
    return [one.id for one in everyone if one.id not in best and (one.hidden is None or one is job)]


def find_best(best_metric: str, completed: Iterable[Job]) -> Job | None:
    """Return the best job by a metric, of equals that of the lowest step; None: none has it.

    Those whose results are hidden do not count.

    With a "-" before the metric, the lowest value is the best.
    """
    name = best_metric.removeprefix("-")
    sign = -1 if best_metric.startswith("-") else 1
    shown = [one for one in sorted(completed, key=_rank) if one.hidden is None]
    measured = [one for one in shown if name in one.metrics]
    return max(measured, key=lambda one: sign * one.metrics[name], default=None)


def _rank(job: Job) -> tuple[bool, int, float, str]:
    """Return what decides between jobs that are equally good."""
    step = job.request.step
    return step is None, step or 0, job.completed_at or 0, job.id
