"""The server's log of jobs: a line for every step on a job's way, by which an operator follows it.

    job 1a2b3c4d my-run/500: started: lm-eval on GPU 6, 7

The id is the beginning of the job's own. What clients and evaluators wrote (names, errors) becomes
one line without control characters, so that none of it can pass for another line of the log.
"""

import logging
from collections.abc import Mapping
from pathlib import PurePosixPath

from unshard.evaluate.credentials import without_password
from unshard.evaluate.jobs import Job, Request, Status
from unshard.evaluate.logs import one_line
from unshard.evaluate.server.endings import Absent, Failed, Lost, Outcome, OutOfMemory, Postponed
from unshard.evaluate.server.evaluators.work import Scores
from unshard.stores.remote_path import is_url

_SHORT = 8
_NUMBERS = 3

_log = logging.getLogger(__name__)


def short_id(job_id: str) -> str:
    """Return the beginning of a job's id."""
    return job_id[:_SHORT]


def tell(job: Job, what: str, *, outcome: str | None = None) -> None:
    """Log a step on a job's way; `outcome` is how its attempt ended."""
    message = "job %s %s: %s"
    about = _about(job.request) | {"job": job.id, "attempt": job.attempts}
    if outcome is not None:
        about["outcome"] = outcome
    extra = {"about": about}
    _log.info(message, short_id(job.id), _where(job.request), one_line(what), extra=extra)


def _about(request: Request) -> dict[str, str | int | None]:
    """Return the fields that a log of JSON has about a request."""
    return {
        "run": request.run,
        "step": request.step,
        "weights": request.weights,
        "profile": request.profile,
        **({"user": request.user} if request.user else {}),
    }


def tell_refusal(request: Request, why: str) -> None:
    """Log that a submission was refused; it has no job to name."""
    what = f"{request.profile}: {','.join(request.tasks)}"
    extra = {"about": _about(request)}
    _log.info("refused %s (%s): %s", _where(request), one_line(what), one_line(why), extra=extra)


def tell_outcome(job: Job, outcome: Outcome, now: Job) -> None:
    """Log how an attempt ended: `job` is as it began, `now` as it is recorded."""
    is_done, number = isinstance(outcome, Scores), f"attempt {job.attempts}"
    how = "completed" if is_done else type(outcome).__name__.lower()
    match now.status, outcome:
        case Status.COMPLETED, Scores(metrics):
            tell(job, f"evaluated: {_shown(metrics)}", outcome=how)
        case Status.QUEUED, Failed(why):
            tell(job, f"retried: {number} failed: {why}", outcome=how)
        case Status.QUEUED, Postponed(why) | OutOfMemory(why):
            tell(job, f"postponed: {number}: {why}", outcome=how)
        case Status.QUEUED, Lost(why) | Absent(why):
            tell(job, f"queued again: {number}: {why}", outcome=how)
        case ((Status.FAILED | Status.EXPIRED), _):
            why = now.error or "no reason is recorded"
            tell(job, f"{now.status}: {number}: {why}", outcome=how)
        case ((Status.CANCELLED | Status.SUPERSEDED), _):
            tell(job, f"{now.status}: the processes of {number} have ended", outcome=how)


def _where(request: Request) -> str:
    """Return run and step; the last parts of the checkpoint's path where no run is known."""
    place = request.checkpoint
    if is_url(place):  # one that was refused may have credentials
        place = without_password(place).partition("?")[0]
    parts = PurePosixPath(place).parts[-2:]
    if not request.run:
        return one_line("/".join(parts)) or "-"
    step = "-" if request.step is None else request.step
    weights = "" if request.weights == "model" else f" ({request.weights})"
    user = f" of {request.user}" if request.user else ""
    return one_line(f"{request.run}/{step}{weights}{user}")


def _shown(metrics: Mapping[str, float]) -> str:
    """Return the first numbers, and how many more there are."""
    first = [f"{name} = {value:.6g}" for name, value in list(metrics.items())[:_NUMBERS]]
    more = len(metrics) - len(first)
    return ", ".join([*first, *([f"{more} more"] if more else [])])
