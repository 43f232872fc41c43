"""Send a spool's submissions to the server and fetch its results, in rounds; without a thread.

The server may be away, may have lost a job (then it is submitted again), or may refuse a submission
(then it is set aside with the answer). Pins are removed when no job needs them any more.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from unshard.errors import UnshardError
from unshard.evaluate.client.lmms import Answer
from unshard.evaluate.client.v1 import EvalClient, RefusedError, ServerAwayError
from unshard.evaluate.jobs import EvaluationError, Status, backoff
from unshard.evaluate.pins.files import ExpiredError
from unshard.evaluate.pins.pin import list_pins, read_pin, sweep, unpin
from unshard.evaluate.run_folder import leave_alone
from unshard.evaluate.sinks.base import name_metrics
from unshard.evaluate.trainer.config import EvalConfig
from unshard.evaluate.trainer.recorder import Recording
from unshard.evaluate.trainer.spool import Entry, Spool

_TIMEOUT = 10.0  # seconds for a request
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0  # seconds between attempts while the server is away
_NOT_ALLOWED = (401, 403)
_RETRY_REFUSED = 300.0  # seconds until refused submissions are sent again
_LOST = 404
_RESUBMISSIONS = 3
_ABANDONED = 3600.0  # seconds after which a pin without a submission is removed

log = logging.getLogger(__name__)


class Courier:
    """Sends a spool's submissions and fetches their results.

    Args:
        config: the server's address, and its paths of our directories.
        spool: of the run.
        take: called with every result.
        logs_refusals: whether a refusal is an error in the log; else the caller reports it.

    Attributes:
        failures: by request, why it ended without a result, unless a later job had one.
    """

    def __init__(
        self,
        config: EvalConfig,
        spool: Spool,
        take: Callable[[Recording], None],
        *,
        logs_refusals: bool = True,
    ) -> None:
        self._config = config
        self._logs_refusals = logs_refusals
        self._spool = spool
        self._take = take
        self._client: EvalClient | None = None
        self._in_vain = 0
        self._failed_on = Counter[str]()
        self._retry_refused_at = time.monotonic() + _RETRY_REFUSED
        self._settings: dict[str, object] = {}  # of the last result, by profile
        self.failures: dict[str, str] = {}

    def send(self) -> float:
        """Send the waiting submissions in order; return the seconds until the next try.

        If the server fails, the rest is not sent now. The submission on which it failed is the last
        of the next round, so that it does not hold up the others.
        """
        failure: Exception | None = None
        self._retry_refused()
        for entry in sorted(self._spool.waiting(), key=lambda one: self._failed_on[one.name]):
            try:
                self._send(entry)
            except (ServerAwayError, EvaluationError) as error:
                self._failed_on[entry.name] += isinstance(error, EvaluationError)
                return self._back_off(error)
            except RefusedError as error:
                if error.status in _NOT_ALLOWED:
                    self.close()
                    return self._back_off(error)
                is_new = entry.fields.get("error") != str(error)
                level = logging.ERROR if self._logs_refusals and is_new else logging.DEBUG
                log.log(level, "step %s is not evaluated: %s", entry.step, error)
                if entry.path.exists():  # else the step has been saved again
                    self._spool.refuse(entry, str(error))
            except Exception as error:  # noqa: BLE001  (the others may be accepted)
                failure = error
        if failure is not None:
            return self._back_off(failure)
        self._in_vain = 0
        return 0.0

    def poll(self) -> None:
        """Ask for every pending job; fetch the results of those that are final."""
        for entry in self._spool.pending():
            try:
                job = self._connect().job(entry.name)
            except ServerAwayError as error:
                log.debug("the evaluation server does not answer: %s", error)
                return
            except RefusedError as error:
                if error.status == _LOST:
                    self._submit_again(entry)
                elif error.status in _NOT_ALLOWED:
                    self.close()
                    log.debug("the evaluation server does not allow polling: %s", error)
                    return
                else:
                    log.warning("job %s: %s", entry.name, error)
            except UnshardError as error:
                log.warning("job %s: %s", entry.name, error)
            else:
                self._handle(entry, job)

    def begin(self) -> None:
        """Continue the work of an earlier process.

        The results that it fetched are recorded, its refused submissions are sent again, and old
        pins without a submission (of a process that was killed) are removed.
        """
        for entry in self._spool.arrived():
            self._take(_to_recording(entry))
        for entry in self._spool.refused():
            self._spool.requeue(entry)
        for pin in list_pins(self._spool.run.resolve()):  # the form of paths in submissions
            if pin.is_ours and not pin.owner and time.time() - pin.created > _ABANDONED:
                release([str(pin.path)], self._spool)
        sweep(self._spool.run)

    def close(self) -> None:
        """Close the connections; the next request opens others, with the token read again."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _retry_refused(self) -> None:
        """Requeue refused submissions from time to time, except jobs that were lost too often."""
        if time.monotonic() >= self._retry_refused_at:
            self._retry_refused_at = time.monotonic() + _RETRY_REFUSED
            for entry in self._spool.refused():
                if _count_resubmissions(entry) < _RESUBMISSIONS:
                    self._spool.requeue(entry)

    def _connect(self) -> EvalClient:
        if self._client is None:
            config = self._config
            self._client = EvalClient(config.server_url, timeout=_TIMEOUT, token=config.token())
        return self._client

    def _send(self, entry: Entry) -> None:
        client = self._connect()  # slow: the step may have been saved again by then
        if not entry.path.exists():
            return
        checkpoint = self._config.served(str(entry.request.get("checkpoint")))
        body = {**entry.request, "checkpoint": checkpoint}
        if "directory" in body:
            body["directory"] = self._config.served(str(body["directory"]))
        if entry.pins:
            body["pin"] = self._config.served(entry.pins[-1])
        accepted = self._spool.accept(entry, str(client.submit_body(body).get("id", "")))
        log.info("step %s: job %s", accepted.step, accepted.name)

    def _back_off(self, error: Exception) -> float:
        level = logging.DEBUG if self._in_vain else logging.WARNING  # once per absence
        log.log(level, "submissions wait until the evaluation server accepts them: %s", error)
        self._in_vain += 1
        return backoff(self._in_vain - 1, first_s=_FIRST_WAIT, most_s=_LONGEST_WAIT)

    def _submit_again(self, entry: Entry) -> None:
        times = _count_resubmissions(entry) + 1
        if times > _RESUBMISSIONS:
            self._spool.refuse(entry, f"the server has lost this job {times} times")
            return
        log.warning("the server has lost job %s: submitted again", entry.name)
        self._spool.requeue(Entry(entry.path, {**entry.fields, "submitted_again": times}))

    def _handle(self, entry: Entry, job: Answer) -> None:
        """Record the end of a job, if it has ended."""
        status = job.get("status")
        if status in (Status.QUEUED, Status.RUNNING):
            return
        self.failures.pop(entry.key, None)
        why = f"step {entry.step}: job {entry.name} {status}: {job.get('error')}"
        if status == Status.COMPLETED:
            settings = job.get("measured_with")
            arrived = {"metrics": _read_metrics(job), "measured_with": settings}
            self._compare_settings(entry, settings)
            self._take(_to_recording(self._spool.arrive(entry, arrived)))
        elif status == Status.SUPERSEDED and job.get("superseded_by"):
            log.info("%s", why)  # the newer job gives the result of this step
        else:
            log.warning("%s", why)
            self.failures[entry.key] = why
        # Last: the results of jobs that are no longer pending are recorded (`Submitter.pending`).
        self._spool.remove(entry)
        release(entry.pins, self._spool)

    def _compare_settings(self, entry: Entry, settings: object) -> None:
        """Warn if a result was measured with other settings than the previous one."""
        settings_id = settings.get("settings") if isinstance(settings, dict) else None
        profile = str(entry.request.get("profile"))
        if settings_id != self._settings.setdefault(profile, settings_id):
            self._settings[profile] = settings_id
            log.warning(
                "step %s: measured with other settings than the step before, or by a profile that "
                "has changed: in a tracker its values are on the same curve",
                entry.step,
            )


def release(pins: Iterable[str], spool: Spool) -> None:
    """Remove the pins that no submission or job in the spool needs."""
    run = spool.run.resolve()
    for path in pins:
        if not spool.is_pin_needed(path):
            try:
                pin = read_pin(Path(path))
            except ExpiredError:
                continue  # the quota, or the server, removed it
            if pin.run == run:
                unpin(pin)
            else:
                leave_alone(f"{path}: not a pin of {run}")


def _count_resubmissions(entry: Entry) -> int:
    """Return how often a job was submitted again because the server had lost it."""
    times = entry.fields.get("submitted_again")
    return times if isinstance(times, int) else 0


def _read_metrics(fields: Mapping[str, object]) -> dict[str, float]:
    """Return the numbers in a job, or in an entry that has its result."""
    metrics = fields.get("metrics")
    return {
        str(key): float(value)
        for key, value in (metrics.items() if isinstance(metrics, dict) else ())
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _to_recording(entry: Entry) -> Recording:
    weights = str(entry.request.get("weights", "model"))
    metrics = name_metrics(_read_metrics(entry.fields), weights=weights)
    settings = entry.fields.get("measured_with")
    by_profile = {str(entry.request.get("profile")): settings} if settings else {}
    return Recording(entry.name, entry.step, metrics, by_profile)
