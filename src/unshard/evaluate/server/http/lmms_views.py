"""Requests and answers of lmms-eval's protocol, as pydantic models."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from unshard.evaluate.jobs import Job, Status
from unshard.evaluate.server.http.v1_views import ErrorFields, Tasks, Text
from unshard.evaluate.values import Scalar

__all__ = [
    "EvaluateRequest",
    "Health",
    "JobInfo",
    "MergeRequest",
    "MergeResponse",
    "Message",
    "Models",
    "Problem",
    "Queue",
    "Submitted",
    "TaskNames",
    "job_info",
]

_THEIRS = {"num_fewshot", "batch_size", "limit", "gen_kwargs"}


class Problem(BaseModel):
    """What is wrong with a request."""

    detail: str


class Health(BaseModel):
    """The state of the server (lmms-eval's protocol); `problems` (ours): why it accepts no jobs."""

    status: str
    timestamp: str
    queue_size: int | None
    problems: list[ErrorFields]


class EvaluateRequest(BaseModel):
    """A job to queue (lmms-eval's protocol); unknown keys are ignored."""

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
    """A job that was queued (lmms-eval's protocol)."""

    job_id: str
    status: str
    position_in_queue: int
    message: str


class JobInfo(BaseModel):
    """A job and its state (lmms-eval's protocol)."""

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


class TaskNames(BaseModel):
    """Tasks that clients may choose."""

    tasks: list[str]


class Models(BaseModel):
    """The values that `model` may have."""

    models: list[str]


class Message(BaseModel):
    """What happened (lmms-eval's protocol)."""

    message: str


class MergeRequest(BaseModel):
    """A checkpoint to merge (lmms-eval's protocol)."""

    checkpoint_path: Text
    output_path: Text | None = None
    checkpoint_type: Literal["regular", "ema"] = "regular"


class MergeResponse(BaseModel):
    """Where the merged checkpoint is (lmms-eval's protocol)."""

    success: bool
    message: str
    merged_path: str | None


def job_info(
    job: Job, position: int | None, results: str | None, samples: Sequence[str]
) -> JobInfo:
    """Return what clients of lmms-eval's protocol see of a job.

    Args:
        job: the job.
        position: its place in the queue.
        results: the path of a file of results as lmms-eval writes them.
        samples: the paths of its files of samples.
    """
    request = job.request
    result: dict[str, dict[str, object]] | None = None
    if job.status is Status.COMPLETED:
        result = {
            Path(request.checkpoint).name: {"results": results, "samples": list(samples)},
            "metrics": dict(job.metrics),
        }
    theirs = {Status.EXPIRED: Status.FAILED, Status.SUPERSEDED: Status.CANCELLED}
    return JobInfo(
        job_id=job.id,
        status=theirs.get(job.status, job.status),
        created_at=_iso(job.created_at) or "",
        started_at=_iso(job.started_at),
        completed_at=_iso(job.completed_at),
        request=EvaluateRequest(
            model=request.profile,
            tasks=list(request.tasks),
            model_args={"pretrained": request.checkpoint, **request.arguments.model_args},
            num_gpus=request.arguments.num_gpus or 1,
            **request.arguments.model_dump(include=_THEIRS),
        ),
        result=result,
        error=job.error,
        position_in_queue=position,
    )


def _iso(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
