"""Records the outcome of an attempt: the job's next state, its merged model and its pin."""

import logging
import shutil
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import assert_never

from unshard.errors import UnshardError
from unshard.evaluate.jobs import Filters, Job, Settings, Status, backoff
from unshard.evaluate.server.attempts.attempt import Attempt
from unshard.evaluate.server.attempts.merging import Merger, link_best, link_of
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
from unshard.evaluate.server.joblog import log_event, log_outcome
from unshard.evaluate.server.pinning import Pins
from unshard.evaluate.server.store.statements import LONGEST_WAIT_S
from unshard.evaluate.server.store.store import Store

_log = logging.getLogger(__name__)

_AGAIN_S = 1.0
_MOST_IN_A_ROW = {
    Cause.HINDERED: 20,
    Cause.MEMORY: 20,
    Cause.KILLED: 2,  # an evaluator that takes all memory would be killed forever
    Cause.DIED: 10,  # not fewer: another job, or the machine, may have ended the server
}


@dataclass(eq=False)
class Outcomes:
    """Records outcomes, removes merged models that are not to be kept, and releases pins.

    Attributes:
        backoff_s: the wait between the first failure of a job and its next attempt.
        is_stopped: whether to stop waiting for the database.
    """

    store: Store
    merger: Merger
    pins: Pins
    backoff_s: float
    is_stopped: Callable[[], bool]
    _tidying: threading.Lock = field(default_factory=threading.Lock)

    def record(self, attempt: Attempt, outcome: Outcome) -> None:
        """Record the outcome of an attempt, whose processes have ended.

        If that is not possible, the job fails.
        """
        job_id = attempt.job.id
        if not isinstance(outcome, Scores):
            self.merger.remove(job_id)
        for step in (
            lambda: self._write(attempt, outcome),
            lambda: self._keep(job_id, attempt.profile),
            lambda: self.release_pin(job_id),
        ):
            try:
                self._persist(step)
            except Exception as error:  # noqa: BLE001  otherwise the job would run forever
                _log.exception("the outcome of job %s cannot be recorded", job_id)
                self._persist(partial(self.store.fail, job_id, repr(error), None))
        now = self._job(job_id)
        if now is not None:
            log_outcome(attempt.job, outcome, now)

    def _job(self, job_id: str) -> Job | None:
        """Return a job for the log; None if the database does not answer."""
        try:
            return self.store.get(job_id)
        except sqlite3.Error:
            return None

    def requeue(self, job_id: str, why: str, *, is_dead: bool = False) -> None:
        """Record that an attempt was lost, or that it ended together with its server."""
        if is_dead:
            self._persist(lambda: self._postpone(job_id, Cause.DIED, why))
        else:
            self._persist(lambda: self.store.requeue(job_id, why))
        self._persist(lambda: self.release_pin(job_id))
        self.log_event(job_id, f"queued again: {why}")

    def log_event(self, job_id: str, event: str) -> None:
        """Log a change of a job."""
        if (job := self._job(job_id)) is not None:
            log_event(job, event)

    def release_pin(self, job_id: str) -> None:
        """Release a job's pin, if the job has ended."""
        job = self.store.get(job_id)
        if job is not None and job.status.is_final:
            self.pins.release(job)

    def tidy_up(self, profiles: Mapping[str, Profile]) -> None:
        """Remove the merged models that an earlier server should have removed."""
        self.merger.recover()
        running = {job.id for job in self.store.running()}
        for job_id in set(self.merger.list_kept()) - running:
            job = self.store.get(job_id)
            if job is None or job.status is not Status.COMPLETED:
                self.merger.remove(job_id)
                continue
            try:
                self._keep(job_id, profile_named(profiles, job.request.profile))
            except UnshardError:
                _log.warning("job %s: merged model kept: its profile no longer exists", job_id)

    def _write(self, attempt: Attempt, outcome: Outcome) -> None:
        job, store = attempt.job, self.store
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
        count = self.store.count_in_a_row(job_id, cause)
        if count < _MOST_IN_A_ROW[cause]:
            self.store.postpone(job_id, cause, why, self._due_at(count))
        else:
            self.store.fail(job_id, f"{why}\nThis has happened {count + 1} times in a row.", None)

    def _due_at(self, failures: int) -> float:
        return time.time() + backoff(failures, first_s=self.backoff_s, most_s=LONGEST_WAIT_S)

    def _complete(self, attempt: Attempt, scores: Scores) -> None:
        """Record a job's results, and remove the directories of its other attempts."""
        job_id, directory = attempt.job.id, attempt.directory.parent
        try:  # first: the next server would not remove them
            for other in set(directory.iterdir()) - {attempt.directory}:
                shutil.rmtree(other, ignore_errors=True)
        except OSError as error:
            _log.warning("%s: other attempts are not removed: %s", directory, error)
        settings = replace(attempt.job.settings or Settings(), evaluator=scores.evaluator)
        self.store.describe(job_id, settings, scores.tasks)
        if self.store.complete(
            job_id, scores.metrics, scores.file, scores.errors, scores.directions
        ):
            return
        now = self.store.get(job_id)
        if now is None or now.status in {Status.CANCELLED, Status.SUPERSEDED}:
            self.merger.remove(job_id)

    def _keep(self, job_id: str, profile: Profile) -> None:
        """Remove the merged models that the profile does not keep, if a job is completed."""
        with self._tidying:
            job = self.store.get(job_id)
            if job is None or job.status is not Status.COMPLETED:
                return
            of_run = Filters(Status.COMPLETED, run=job.run.id, weights=job.request.weights)
            alike = replace(of_run, profile=job.request.profile)
            # With "none" no other job has a merged model, and there may be thousands of jobs.
            completed = [] if profile.keep == "none" else self.store.jobs(alike)
            if profile.keep != "none" and profile.best_metric is not None:  # before others go
                # The base model is not merged: however good it is, no merged model goes for it.
                kept_ids, every = set(self.merger.list_kept()), completed
                completed = [other for other in every if other.id in kept_ids]
                self._link_best(job, profile.best_metric, every, completed)
            for removable in find_removable(job, profile, completed):
                self.merger.remove(removable)

    def _link_best(
        self, job: Job, metric: str, completed: Sequence[Job], merged: Sequence[Job]
    ) -> None:
        """Link the best merged model of a run, among jobs with the settings of most steps."""
        name = metric.removeprefix("-")
        candidates = [each for each in completed if each.hidden is None and name in each.metrics]
        in_order = sorted(candidates, key=lambda each: each.completed_at or 0)
        steps = {(each.settings_id, each.request.step): None for each in in_order}
        counts = Counter(settings for settings, _ in steps)
        usual = max(counts, key=counts.__getitem__, default=None)
        best = find_best(metric, [each for each in merged if each.settings_id == usual])
        request, place = job.request, self.store.runs.place_of(job.run.id)
        link = link_of(self.merger.directory, place, request.profile, request.weights)
        link_best(link, self.merger.directory, None if best is None else best.id)

    def _persist(self, record: Callable[[], object]) -> None:
        """Try until the database accepts it; after a stop, leave it to the next server."""
        while True:
            try:
                record()
            except sqlite3.OperationalError:
                _log.exception("the database of jobs does not answer; trying again")
                if self.is_stopped():
                    return
                time.sleep(_AGAIN_S)
            else:
                return


def find_removable(job: Job, profile: Profile, completed: Iterable[Job]) -> list[str]:
    """Return the jobs whose merged models are not needed once `job` is completed.

    `completed` has all completed jobs of its run, weights and profile; with `keep: best`, the best
    of each settings is kept.
    """
    if profile.keep == "all":
        return []
    if profile.keep != "best" or profile.best_metric is None:
        return [job.id]
    ranked = sorted(completed, key=_rank)
    best = set[str]()
    for settings in {each.settings_id for each in ranked}:
        alike = [each for each in ranked if each.settings_id == settings]
        if (winner := find_best(profile.best_metric, alike)) is not None:
            best.add(winner.id)
    # Other hidden jobs may be shown again, so they keep their models.
    others = (each.id for each in ranked if each.hidden is None or each is job)
    return [job_id for job_id in others if job_id not in best]


def find_best(best_metric: str, completed: Iterable[Job]) -> Job | None:
    """Return the best job by a metric, the lowest step of equals; None if no job has the metric.

    Hidden jobs do not count. With a "-" before the metric, the lowest value is the best.
    """
    name = best_metric.removeprefix("-")
    sign = -1 if best_metric.startswith("-") else 1
    visible = [each for each in sorted(completed, key=_rank) if each.hidden is None]
    measured = [each for each in visible if name in each.metrics]
    return max(measured, key=lambda each: sign * each.metrics[name], default=None)


def _rank(job: Job) -> tuple[bool, int, float, str]:
    """Return a key that orders equally good jobs: the lowest step first."""
    step = job.request.step
    return step is None, step or 0, job.completed_at or 0, job.id
