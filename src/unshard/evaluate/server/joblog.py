"""One log line per change of a job's state.

    job 1a2b3c4d my-run/500: started: lm-eval on GPU 6, 7

The id is abbreviated. Text of clients and evaluators (names, errors) becomes one line without
control characters, so that it cannot look like another line of the log.
"""

import logging
from itertools import islice
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


def log_event(job: Job, event: str, *, outcome: str | None = None) -> None:
    """Log a change of a job; `outcome` is that of its attempt."""
    about = _about(job.request) | {"job": job.id, "attempt": job.attempts}
    if outcome is not None:
        about["outcome"] = outcome
    values = short_id(job.id), _where(job.request), one_line(event)
    _log.info("job %s %s: %s", *values, extra={"about": about})


def _about(request: Request) -> dict[str, str | int | None]:
    """Return the fields of a request in a JSON log."""
    names = ("run", "step", "weights", "profile", *(["user"] if request.user else []))
    return {name: getattr(request, name) for name in names}


def log_refusal(request: Request, why: str) -> None:
    """Log that a submission, which has no job, was refused."""
    tasks = one_line(f"{request.profile}: {','.join(request.tasks)}")
    extra = {"about": _about(request)}
    _log.info("refused %s (%s): %s", _where(request), tasks, one_line(why), extra=extra)


def log_outcome(job: Job, outcome: Outcome, now: Job) -> None:
    """Log how an attempt of a job ended; `now` is the job afterwards."""
    is_done, number = isinstance(outcome, Scores), f"attempt {job.attempts}"
    how = "completed" if is_done else type(outcome).__name__.lower()
    match now.status, outcome:
        case Status.COMPLETED, Scores(metrics):
            values = [f"{name} = {value:.6g}" for name, value in islice(metrics.items(), _NUMBERS)]
            more = [f"{len(metrics) - _NUMBERS} more"] if len(metrics) > _NUMBERS else []
            log_event(job, f"evaluated: {', '.join([*values, *more])}", outcome=how)
        case Status.QUEUED, Failed(why):
            log_event(job, f"retried: {number} failed: {why}", outcome=how)
        case Status.QUEUED, Postponed(why) | OutOfMemory(why):
            log_event(job, f"postponed: {number}: {why}", outcome=how)
        case Status.QUEUED, Lost(why) | Absent(why):
            log_event(job, f"queued again: {number}: {why}", outcome=how)
        case ((Status.FAILED | Status.EXPIRED), _):
            why = now.error or "no reason is recorded"
            log_event(job, f"{now.status}: {number}: {why}", outcome=how)
        case ((Status.CANCELLED | Status.SUPERSEDED), _):
            log_event(job, f"{now.status}: the processes of {number} have ended", outcome=how)


def _where(request: Request) -> str:
    """Return run and step, or without a run the last two parts of the checkpoint's path."""
    if not request.run:
        path = request.checkpoint
        if is_url(path):  # a refused address may have credentials
            path = without_password(path).partition("?")[0]
        return one_line("/".join(PurePosixPath(path).parts[-2:])) or "-"
    step = "-" if request.step is None else request.step
    weights = "" if request.weights == "model" else f" ({request.weights})"
    user = f" of {request.user}" if request.user else ""
    return one_line(f"{request.run}/{step}{weights}{user}")
