"""lmms-eval's HTTP protocol, so that its clients and lmms-engine's trainer work unchanged.

Source: lmms-eval 0.7.3, `entrypoints/protocol.py` and `http_server.py`. `lmms_engine_kwargs`, which
it ignores silently, is honoured here, and so are keys that its documentation misplaces.
"""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime

from fastapi import APIRouter, HTTPException, Request, Response
from pydantic import TypeAdapter

from unshard.errors import UnshardError, UsageError
from unshard.evaluate.jobs import Arguments, Status
from unshard.evaluate.jobs import Request as Wanted
from unshard.evaluate.server.attempts.merging import GivenUpError, GoneError
from unshard.evaluate.server.health import UnhealthyError
from unshard.evaluate.server.http.answers import answer
from unshard.evaluate.server.http.lmms_views import (
    EvaluateRequest,
    Health,
    JobInfo,
    MergeRequest,
    MergeResponse,
    Message,
    Models,
    Problem,
    Queue,
    Submitted,
    TaskNames,
    job_info,
)
from unshard.evaluate.server.http.v1_views import error_body
from unshard.evaluate.server.service import Service
from unshard.evaluate.server.telling import tell_refusal
from unshard.evaluate.values import Scalar, validated

__all__ = ["router", "service_of", "wanted_of"]

router = APIRouter(tags=["lmms-eval"], responses={"4XX": {"model": Problem}})
_CHECKPOINT_KEYS = ("pretrained", "model", "model_path", "checkpoint", "ckpt_path")
_LIFTED = ("num_gpus", "batch_size")
_ARGUMENTS = TypeAdapter(Arguments)
_WEIGHTS = {"regular": "model", "ema": "ema"}


def service_of(request: Request) -> Service:
    """Return the service of the application that got a request."""
    service: Service = request.app.state.service
    return service


@router.get("/health", responses={503: {"model": Health}})
def health(request: Request, response: Response) -> Health:
    """Report whether jobs are accepted now, and if not, why."""
    service = service_of(request)
    problems = [error_body(problem).error for problem in service.health.problems()]
    if problems:
        response.status_code = 503
    return Health(
        status="unhealthy" if problems else "healthy",
        timestamp=datetime.now(UTC).isoformat(),
        queue_size=None if problems else service.store.counts()[Status.QUEUED],
        problems=problems,
    )


@router.post("/evaluate")
def evaluate(request: Request, asked: EvaluateRequest) -> Submitted:
    """Queue a job."""
    service = service_of(request)
    try:
        wanted = wanted_of(asked)
    except UsageError as error:
        tell_refusal(Wanted("", asked.model, tuple(asked.tasks)), str(error))
        raise HTTPException(400, str(error)) from error
    try:
        job, is_new = service.submit(wanted, None)
    except UnhealthyError:
        raise
    except UnshardError as error:
        raise HTTPException(400, str(error)) from error
    position = service.store.position(job.id) or 0
    what = "Job queued successfully" if is_new else f"The same job is {job.status} already"
    return Submitted(
        job_id=job.id,
        status=job.status,
        position_in_queue=position,
        message=f"{what}. Position in queue: {position}",
    )


@router.get("/jobs/{job_id}", response_model=JobInfo)
def job(request: Request, job_id: str) -> Response:
    """Show a job."""
    service = service_of(request)
    found = service.job(job_id)
    if found is None:
        raise HTTPException(404, f"Job {job_id} not found")
    position = service.store.position(found.id)
    files = service.sample_files(found)
    return answer(job_info(found, position, service.results_file(found), files))


@router.delete("/jobs/{job_id}")
def cancel(request: Request, job_id: str) -> Message:
    """Cancel a job, whether it is queued or running."""
    service = service_of(request)
    before = service.job(job_id)
    if before is None:
        raise HTTPException(404, f"Job {job_id} not found")
    if before.status.is_final:
        raise HTTPException(400, f"Cannot cancel job with status {before.status}")
    service.cancel(job_id)
    return Message(message=f"Job {job_id} cancelled")


@router.get("/queue")
def queue(request: Request) -> Queue:
    """Report how full the server is."""
    service = service_of(request)
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
def tasks(request: Request) -> TaskNames:
    """List the tasks that the server's profiles name; an empty list if they allow any."""
    profiles = service_of(request).profiles.values()
    return TaskNames(tasks=sorted({task for one in profiles for task in one.allowed_tasks}))


@router.get("/models")
def models(request: Request) -> Models:
    """List the profiles: the values that `model` may have."""
    return Models(models=sorted(service_of(request).profiles))


@router.post("/merge", responses={"5XX": {"model": Problem}})
async def merge(request: Request, asked: MergeRequest) -> MergeResponse:
    """Merge a checkpoint into `_unshard/merged` of its run, and return where that is.

    Clients cannot choose the directory: `output_path` is ignored.
    """
    service = service_of(request)
    try:
        async with service.merging:
            path = await asyncio.to_thread(
                service.merge, asked.checkpoint_path, _WEIGHTS[asked.checkpoint_type]
            )
    except UsageError as error:
        raise HTTPException(400, str(error)) from error
    except GoneError as error:
        raise HTTPException(404, str(error)) from error
    except GivenUpError as error:
        raise HTTPException(503, str(error)) from error
    except (UnshardError, OSError) as error:
        raise HTTPException(500, f"Merge failed: {error}") from error
    return MergeResponse(
        success=True, message="Checkpoint merged successfully", merged_path=str(path)
    )


def wanted_of(asked: EvaluateRequest) -> Wanted:
    """Return a request of this protocol as one of ours.

    `model` names a profile, or a type of model for the profile `lmms-eval`. The checkpoint is in
    `lmms_engine_kwargs`, or in `model_args` under the key that the type of model has for it.

    Raises:
        UsageError: no checkpoint is named, or nothing would be measured.
    """
    if asked.predict_only:
        raise UsageError("predict_only: nothing would be measured", expected="false")
    arguments = {key: value for key, value in (asked.model_args or {}).items() if value is not None}
    lifted = {key: arguments.pop(key) for key in _LIFTED if key in arguments}
    checkpoint = _checkpoint_of(arguments, asked.lmms_engine_kwargs or {})
    kind = str((asked.lmms_engine_kwargs or {}).get("checkpoint_type") or "regular")
    if kind not in _WEIGHTS:
        raise UsageError(f"checkpoint_type {kind}: unknown", expected="regular or ema")
    given = asked.model_dump(include=set(Arguments.model_fields))
    if asked.num_gpus == 1:  # their client always sends num_gpus: 1 does not express a preference
        del given["num_gpus"]
    given |= {**lifted, "model_args": arguments}
    chosen = validated(_ARGUMENTS, given, subject=lambda name: f"{name} cannot be accepted")
    return Wanted(
        checkpoint=checkpoint,
        profile=asked.model,
        tasks=tuple(asked.tasks),
        weights=_WEIGHTS[kind],
        arguments=chosen,
    )


def _checkpoint_of(arguments: dict[str, Scalar], engine: Mapping[str, Scalar | None]) -> str:
    """Remove the checkpoint from the model's arguments and return it."""
    named = [key for key in _CHECKPOINT_KEYS if str(arguments.get(key, "")).startswith("/")]
    found = [str(arguments.pop(key)) for key in named]
    path = engine.get("model_path")
    if path is not None:
        found.insert(0, str(path))
    if not found:
        raise UsageError(
            "model_args: no checkpoint",
            expected=f"an absolute path under one of: {', '.join(_CHECKPOINT_KEYS)}",
        )
    return found[0]
