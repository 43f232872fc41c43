"""Requests and answers of our protocol, as pydantic models; its OpenAPI comes from them."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from unshard.errors import UnshardError
from unshard.evaluate.jobs import Arguments, Job, Request, Result, Status
from unshard.evaluate.server.admission.requests import MOST_TASKS
from unshard.evaluate.values import LARGEST, Whole

__all__ = [
    "ErrorBody",
    "ErrorFields",
    "JobList",
    "JobPage",
    "JobView",
    "LogPart",
    "Number",
    "ProfileList",
    "ProfileView",
    "ResultList",
    "ResultPage",
    "ResultView",
    "RunList",
    "Submission",
    "Tasks",
    "Text",
    "error_body",
    "job_view",
    "result_view",
]

Weights = Literal["model", "ema"]
Text = Annotated[str, Field(max_length=4096)]
Tasks = Annotated[list[Text], Field(min_length=1, max_length=MOST_TASKS)]
Number = Annotated[int, Field(ge=0, le=LARGEST)]


class ErrorFields(BaseModel):
    """An error's fields; `code` is the exit code of our errors, otherwise the HTTP status."""

    type: str
    code: int
    message: str
    expected: str = ""
    found: str = ""
    hint: str = ""


class ErrorBody(BaseModel):
    """An error."""

    error: ErrorFields


class Submission(Arguments):
    """A job to queue; the arguments of its evaluator are keys like any others."""

    model_config = ConfigDict(extra="forbid")

    checkpoint: Text
    profile: Text
    tasks: Tasks
    step: Whole | None = None
    run: Text = ""
    weights: Weights = "model"
    pin: Text | None = None

    def request(self) -> Request:
        """Return it as the value that the server works with."""
        values = self.model_dump()
        arguments = Arguments(**{name: values[name] for name in Arguments.model_fields})
        return Request(
            checkpoint=self.checkpoint,
            profile=self.profile,
            tasks=tuple(self.tasks),
            step=self.step,
            run=self.run,
            weights=self.weights,
            arguments=arguments,
        )


class JobView(BaseModel):
    """A job and its state; times are seconds since the epoch.

    `superseded_by` is the job for the files that its trainer has saved in the same place since.
    """

    id: str
    status: Status
    phase: str | None
    run: str
    step: int | None
    weights: str
    profile: str
    tasks: list[str]
    checkpoint: str
    fingerprint: str
    created_at: float
    started_at: float | None
    completed_at: float | None
    attempts: int
    error: str | None
    superseded_by: str | None
    position: int | None
    metrics: dict[str, float]


class ResultFilter(BaseModel):
    """Which results to list."""

    run: Text | None = None
    step: Number | None = None
    weights: Weights | None = None
    profile: Text | None = None


class ResultPage(ResultFilter):
    """Which results to list, and where to continue."""

    after: Number = 0
    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000


class JobPage(ResultFilter):
    """Which jobs to list, and where to continue."""

    status: Status | None = None
    before: Text | None = None
    limit: Annotated[int, Field(ge=1, le=1000)] = 100


class JobList(BaseModel):
    """Jobs, the newest first; `next` is the `before` of the next page, if there is one."""

    jobs: list[JobView]
    next: str | None


class ResultView(BaseModel):
    """One number of a job; results that arrive later have a higher `number`."""

    number: int
    job_id: str
    run: str
    step: int | None
    weights: str
    profile: str
    task: str
    metric: str
    value: float
    completed_at: float


class ResultList(BaseModel):
    """Results, by number; `next` is the `after` of the next page, if there is one."""

    results: list[ResultView]
    next: int | None


class RunList(BaseModel):
    """Names of training runs."""

    runs: list[str]


class LogPart(BaseModel):
    """A part of a job's log: `offset` is where the next begins, bytes."""

    text: str
    offset: int
    ended: bool


class ProfileView(BaseModel):
    """An evaluator that the server is configured with."""

    name: str
    kind: str
    gpus: int


class ProfileList(BaseModel):
    """The profiles."""

    profiles: list[ProfileView]


def error_body(error: UnshardError) -> ErrorBody:
    """Return what clients see of an error."""
    return ErrorBody(
        error=ErrorFields(
            type=type(error).__name__,
            code=error.exit_code,
            message=error.subject,
            expected=error.expected,
            found=error.found,
            hint=error.hint,
        )
    )


def job_view(job: Job, position: int | None) -> JobView:
    """Return what clients see of a job."""
    request = job.request
    return JobView(
        id=job.id,
        status=job.status,
        phase=job.phase,
        run=request.run,
        step=request.step,
        weights=request.weights,
        profile=request.profile,
        tasks=list(request.tasks),
        checkpoint=request.checkpoint,
        fingerprint=request.fingerprint,
        created_at=job.created_at,
        started_at=job.started_at,
        completed_at=job.completed_at,
        attempts=job.attempts,
        error=job.error,
        superseded_by=job.superseded_by,
        position=position,
        metrics=dict(job.metrics),
    )


def result_view(result: Result) -> ResultView:
    """Return what clients see of a number."""
    names = ResultView.model_fields
    return ResultView(**{name: getattr(result, name) for name in names})
