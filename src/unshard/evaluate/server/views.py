"""What the server takes and gives, as pydantic models: they make its OpenAPI description."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from unshard.evaluate.jobs import Job, Request, Result, Scalar, Status

__all__ = [
    "EvaluateRequest",
    "Health",
    "JobFilter",
    "JobInfo",
    "JobList",
    "JobView",
    "LogPart",
    "MergeRequest",
    "MergeResponse",
    "Message",
    "Queue",
    "ResultFilter",
    "ResultList",
    "ResultView",
    "RunList",
    "Submission",
    "Submitted",
    "job_info",
    "job_view",
    "result_view",
]

Weights = Literal["model", "ema"]
Text = Annotated[str, Field(max_length=4096)]
Tasks = Annotated[list[Text], Field(min_length=1, max_length=256)]


class Submission(BaseModel):
    """A job to queue."""

    model_config = ConfigDict(extra="forbid")

    checkpoint: Text
    profile: Text
    tasks: Tasks
    step: int | None = None
    run: Text = ""
    weights: Weights = "model"
    pin: Text | None = None
    model_args: dict[str, Scalar] = {}
    num_fewshot: int | None = None
    batch_size: int | str | None = None
    limit: int | float | None = None
    gen_kwargs: str | None = None
    num_gpus: int | None = None

    def request(self) -> Request:
        """Return it as a plain value."""
        fields = self.model_dump(exclude={"pin", "tasks"})
        return Request(tasks=tuple(self.tasks), **fields)


class JobView(BaseModel):
    """A job and how it stands; times are seconds since the epoch."""

    id: str
    status: Status
    phase: str | None
    run: str
    step: int | None
    weights: str
    profile: str
    tasks: list[str]
    checkpoint: str
    created_at: float
    started_at: float | None
    completed_at: float | None
    attempts: int
    error: str | None
    position: int | None
    metrics: dict[str, float]


class ResultFilter(BaseModel):
    """Which results are meant."""

    run: str | None = None
    step: int | None = None
    weights: str | None = None
    profile: str | None = None


class JobFilter(ResultFilter):
    """Which jobs are meant."""

    status: Status | None = None
    limit: Annotated[int, Field(ge=1, le=1000)] = 100


class JobList(BaseModel):
    """Jobs, the newest first."""

    jobs: list[JobView]


class ResultView(BaseModel):
    """One number, and where it belongs."""

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
    """Numbers."""

    results: list[ResultView]


class RunList(BaseModel):
    """Names of training runs."""

    runs: list[str]


class LogPart(BaseModel):
    """A part of a job's log: `offset` is where the next begins, bytes."""

    text: str
    offset: int
    ended: bool


class Health(BaseModel):
    """That the server lives (lmms-eval's protocol)."""

    status: str
    timestamp: str
    queue_size: int


class EvaluateRequest(BaseModel):
    """A job to queue (lmms-eval's protocol); keys that it does not know are left out."""

    model: Text
    tasks: Tasks
    model_args: dict[str, Scalar | None] | None = None
    num_fewshot: int | None = None
    batch_size: int | str | None = None
    device: str | None = None
    limit: int | float | None = None
    gen_kwargs: str | None = None
    log_samples: bool = True
    predict_only: bool = False
    num_gpus: int = 1
    output_dir: str | None = None
    lmms_engine_kwargs: dict[str, Scalar | None] | None = None


class Submitted(BaseModel):
    """That a job was queued (lmms-eval's protocol)."""

    job_id: str
    status: str
    position_in_queue: int
    message: str


class JobInfo(BaseModel):
    """A job and how it stands (lmms-eval's protocol)."""

    job_id: str
    status: str
    created_at: str
    started_at: str | None
    completed_at: str | None
    request: EvaluateRequest
    result: dict[str, dict[str, object]] | None
    error: str | None
    position_in_queue: int | None


class Queue(BaseModel):
    """How full the server is (lmms-eval's protocol)."""

    queue_size: int
    running_job: str | None
    queued_jobs: list[str]
    completed_jobs: int
    failed_jobs: int


class Message(BaseModel):
    """What happened (lmms-eval's protocol)."""

    message: str


class MergeRequest(BaseModel):
    """A checkpoint to merge (lmms-eval's protocol)."""

    checkpoint_path: Text
    output_path: Text | None = None
    checkpoint_type: Literal["regular", "ema"] = "regular"


class MergeResponse(BaseModel):
    """Where the merged checkpoint lies (lmms-eval's protocol)."""

    success: bool
    message: str
    merged_path: str | None


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
        created_at=job.created_at,
        started_at=job.started_at,
        completed_at=job.completed_at,
        attempts=job.attempts,
        error=job.error,
        position=position,
        metrics=dict(job.metrics),
    )


def result_view(result: Result) -> ResultView:
    """Return what clients see of a number."""
    names = ResultView.model_fields
    return ResultView(**{name: getattr(result, name) for name in names})


def job_info(job: Job, position: int | None) -> JobInfo:
    """Return what clients of lmms-eval's protocol see of a job."""
    request = job.request
    result: dict[str, dict[str, object]] | None = None
    if job.status is Status.COMPLETED:
        file = job.results
        result = {
            Path(request.checkpoint).name: {"results": file, "samples": []},
            "metrics": dict(job.metrics),
        }
    expired = job.status is Status.EXPIRED
    return JobInfo(
        job_id=job.id,
        status=Status.FAILED if expired else job.status,
        created_at=_iso(job.created_at) or "",
        started_at=_iso(job.started_at),
        completed_at=_iso(job.completed_at),
        request=EvaluateRequest(
            model=request.profile,
            tasks=list(request.tasks),
            model_args={"pretrained": request.checkpoint, **request.model_args},
            num_fewshot=request.num_fewshot,
            batch_size=request.batch_size,
            limit=request.limit,
            gen_kwargs=request.gen_kwargs,
            num_gpus=request.num_gpus or 1,
        ),
        result=result,
        error=job.error,
        position_in_queue=position,
    )


def _iso(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
