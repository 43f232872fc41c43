"""lmms-eval's HTTP protocol, so that its clients and lmms-engine's trainer work unchanged.

Source: lmms-eval 0.7.3, `entrypoints/protocol.py` and `http_server.py`. Unlike there,
`lmms_engine_kwargs` and the keys that lmms-eval's documentation misplaces are not ignored.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from fastapi import APIRouter, HTTPException, Response
from pydantic import BaseModel

from unshard.errors import UnshardError, UsageError
from unshard.evaluate.jobs import Arguments, Job, Request, Status, WeightsName
from unshard.evaluate.server.attempts.merging import CheckpointGoneError, GivenUpError
from unshard.evaluate.server.health import UnhealthyError
from unshard.evaluate.server.http.answers import (
    Asking,
    BoundedText,
    ErrorFields,
    Served,
    Tasks,
    answer,
    check_may_change,
)
from unshard.evaluate.server.joblog import log_refusal
from unshard.evaluate.server.service import Service
from unshard.evaluate.values import Scalar, in_our_words

_CHECKPOINT_KEYS = ("pretrained", "model", "model_path", "checkpoint", "ckpt_path")
_LIFTED = ("num_gpus", "batch_size")
_WEIGHTS: Mapping[str, WeightsName] = {"regular": "model", "ema": "ema"}
_THEIR_ARGUMENTS = {"num_fewshot", "batch_size", "limit", "gen_kwargs"}
_THEIR_STATUS = {Status.EXPIRED: Status.FAILED, Status.SUPERSEDED: Status.CANCELLED}


class Problem(BaseModel):
    """An error."""

    detail: str


class Health(BaseModel):
    """The state of the server (lmms-eval's protocol).

    `problems` (unshard only): why it accepts no jobs; `draining` (unshard only): whether it starts
    no more jobs.
    """

    status: str
    timestamp: str
    queue_size: int | None
    problems: list[ErrorFields]
    draining: bool


class EvaluateRequest(BaseModel):
    """A job to queue (lmms-eval's protocol); unknown keys are ignored."""

    model: BoundedText
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
    """A queued job (lmms-eval's protocol)."""

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
    """The jobs of the server (lmms-eval's protocol)."""

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
    """A confirmation (lmms-eval's protocol)."""

    message: str


class MergeRequest(BaseModel):
    """A checkpoint to merge (lmms-eval's protocol)."""

    checkpoint_path: BoundedText
    output_path: BoundedText | None = None
    checkpoint_type: Literal["regular", "ema"] = "regular"


class MergeResponse(BaseModel):
    """The path of the merged checkpoint (lmms-eval's protocol)."""

    success: bool
    message: str
    merged_path: str | None


router = APIRouter(tags=["lmms-eval"], responses={"4XX": {"model": Problem}})


def _find(service: Service, job_id: str) -> Job:
    job = service.job(job_id)
    if job is None:
        raise HTTPException(404, f"Job {job_id} not found")
    return job


@router.get("/health", responses={503: {"model": Health}})
def health(service: Served, response: Response) -> Health:
    """Report whether jobs are accepted now, and if not, why."""
    problems = [ErrorFields.of(problem) for problem in service.health.problems()]
    if problems:
        response.status_code = 503
    return Health(
        status="unhealthy" if problems else "healthy",
        timestamp=datetime.now(UTC).isoformat(),
        queue_size=None if problems else service.store.counts()[Status.QUEUED],
        problems=problems,
        draining=service.scheduler.is_draining,
    )


@router.post("/evaluate")
def evaluate(service: Served, user: Asking, body: EvaluateRequest) -> Submitted:
    """Queue a job."""
    try:
        request = replace(_as_request(body), user=user.name)
    except UsageError as error:
        log_refusal(Request("", body.model, tuple(body.tasks)), str(error))
        raise HTTPException(400, str(error)) from error
    try:
        job, is_new = service.submit(request, None)
    except UnhealthyError:
        raise
    except UnshardError as error:
        raise HTTPException(400, str(error)) from error
    position = service.store.position(job.id) or 0
    message = "Job queued successfully" if is_new else f"The same job is {job.status} already"
    return Submitted(
        job_id=job.id,
        status=job.status,
        position_in_queue=position,
        message=f"{message}. Position in queue: {position}",
    )


@router.get("/jobs/{job_id}", response_model=JobInfo)
def job(service: Served, job_id: str) -> Response:
    """Show a job."""
    job = _find(service, job_id)
    position, files = service.store.position(job.id), service.sample_files(job)
    if waits_for := service.scheduler.waits_for(job):
        job = replace(job, error=f"waits for {waits_for}")
    return answer(_info_of(job, position, service.results_file(job), files))


@router.delete("/jobs/{job_id}")
def cancel(service: Served, user: Asking, job_id: str) -> Message:
    """Cancel a job, whether it is queued or running."""
    job = _find(service, job_id)
    check_may_change(job, user, "cancelled")
    if job.status.is_final:
        raise HTTPException(400, f"Cannot cancel job with status {job.status}")
    service.scheduler.cancel(job.id)
    return Message(message=f"Job {job_id} cancelled")


@router.get("/queue")
def queue(service: Served) -> Queue:
    """Report the queued, running and ended jobs."""
    counts = service.store.counts()
    running = service.store.running()
    return Queue(
        queue_size=counts[Status.QUEUED],
        running_job=running[0].id if running else None,
        queued_jobs=service.store.queued_ids(),
        completed_jobs=counts[Status.COMPLETED],
        failed_jobs=counts[Status.FAILED],
    )


@router.get("/tasks")
def tasks(service: Served) -> TaskNames:
    """List the tasks in the server's profiles; an empty list if they allow any."""
    profiles = service.profiles.values()
    return TaskNames(tasks=sorted({task for one in profiles for task in one.allowed_tasks}))


@router.get("/models")
def models(service: Served) -> Models:
    """List the profiles: the values that `model` may have."""
    return Models(models=sorted(service.profiles))


@router.post("/merge", responses={"5XX": {"model": Problem}})
async def merge(service: Served, body: MergeRequest) -> MergeResponse:
    """Merge a checkpoint into `_unshard/merged` of its run, and return the path.

    Clients cannot choose the directory: `output_path` is ignored.
    """
    try:
        async with service.merging:
            path = await asyncio.to_thread(
                service.merge, body.checkpoint_path, _WEIGHTS[body.checkpoint_type]
            )
    except UsageError as error:
        raise HTTPException(400, str(error)) from error
    except CheckpointGoneError as error:
        raise HTTPException(404, str(error)) from error
    except GivenUpError as error:
        raise HTTPException(503, str(error)) from error
    except (UnshardError, OSError) as error:
        raise HTTPException(500, f"Merge failed: {error}") from error
    return MergeResponse(
        success=True, message="Checkpoint merged successfully", merged_path=str(path)
    )


def _as_request(body: EvaluateRequest) -> Request:
    """Return a request of this protocol as our own.

    `model` is the name of a profile, or a type of model for the profile `lmms-eval`. The checkpoint
    is in `lmms_engine_kwargs`, or in `model_args` under the key of this type of model.

    Raises:
        UsageError: the checkpoint is missing, or nothing would be measured.
    """
    if body.predict_only:
        raise UsageError("predict_only: nothing would be measured", expected="false")
    arguments = {key: value for key, value in (body.model_args or {}).items() if value is not None}
    lifted = {key: arguments.pop(key) for key in _LIFTED if key in arguments}
    engine = body.lmms_engine_kwargs or {}
    # All of these are removed: the server sets the checkpoint's argument itself.
    keys = [key for key in _CHECKPOINT_KEYS if str(arguments.get(key, "")).startswith("/")]
    paths = [engine.get("model_path"), *(arguments.pop(key) for key in keys)]
    checkpoint = next((str(path) for path in paths if path is not None), None)
    if checkpoint is None:
        raise UsageError(
            "model_args: no checkpoint",
            expected=f"an absolute path under one of: {', '.join(_CHECKPOINT_KEYS)}",
        )
    kind = str(engine.get("checkpoint_type") or "regular")
    if kind not in _WEIGHTS:
        raise UsageError(f"checkpoint_type {kind}: unknown", expected="regular or ema")
    fields = body.model_dump(include=set(Arguments.model_fields))
    if body.num_gpus == 1:  # the default of lmms-eval's client, which always sends it
        del fields["num_gpus"]
    fields |= {**lifted, "model_args": arguments}
    with in_our_words(lambda name: f"{name} cannot be accepted"):
        return Request(
            checkpoint=checkpoint,
            profile=body.model,
            tasks=tuple(body.tasks),
            weights=_WEIGHTS[kind],
            arguments=Arguments.model_validate(fields),
        )


def _info_of(
    job: Job, position: int | None, results: str | None, samples: Sequence[str]
) -> JobInfo:
    """Return the answer about a job; `results` and `samples` are paths of files."""
    request = job.request
    result: dict[str, dict[str, object]] | None = None
    if job.status is Status.COMPLETED:
        result = {
            Path(request.checkpoint).name: {"results": results, "samples": list(samples)},
            "metrics": dict(job.metrics),
        }
    return JobInfo(
        job_id=job.id,
        status=_THEIR_STATUS.get(job.status, job.status),
        created_at=_iso(job.created_at) or "",
        started_at=_iso(job.started_at),
        completed_at=_iso(job.completed_at),
        request=EvaluateRequest(
            model=request.profile,
            tasks=list(request.tasks),
            model_args={"pretrained": request.checkpoint, **request.arguments.model_args},
            num_gpus=request.arguments.num_gpus or 1,
            **request.arguments.model_dump(include=_THEIR_ARGUMENTS),
        ),
        result=result,
        error=job.error,
        position_in_queue=position,
    )


def _iso(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
