"""Our own protocol, under `/api/v1`: jobs, logs, results as numbers, events."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Annotated

from fastapi import APIRouter, Header, HTTPException, Query, Request, Response
from fastapi.responses import StreamingResponse

from unshard.evaluate.jobs import Event, Filters, Job, Status
from unshard.evaluate.server.http.answers import answer, page
from unshard.evaluate.server.http.lmms import service_of
from unshard.evaluate.server.http.v1_views import (
    ErrorBody,
    JobList,
    JobPage,
    JobView,
    LogPart,
    Number,
    ProfileList,
    ProfileView,
    ResultList,
    ResultPage,
    RunList,
    Submission,
    job_view,
    result_view,
)
from unshard.evaluate.server.service import Service

__all__ = ["router"]

router = APIRouter(prefix="/api/v1", tags=["v1"], responses={"4XX": {"model": ErrorBody}})
_POLL_S = 0.5
_HEARTBEAT_S = 5.0
_LARGEST = 2**53


def _view(service: Service, job: Job) -> JobView:
    return job_view(job, service.store.position(job.id))


def _found(service: Service, job_id: str) -> Job:
    job = service.job(job_id)
    if job is None:
        raise HTTPException(404, f"job {job_id}: there is none")
    return job


@router.post("/jobs", status_code=201, responses={200: {"model": JobView}})
def submit(request: Request, response: Response, submission: Submission) -> JobView:
    """Queue a job; the same job (run, step, weights, profile, tasks) is not queued twice."""
    service = service_of(request)
    job, is_new = service.submit(submission.request(), submission.pin)
    if not is_new:
        response.status_code = 200
    return _view(service, job)


@router.get("/jobs", response_model=JobList)
def jobs(request: Request, wanted: Annotated[JobPage, Query()]) -> Response:
    """List jobs, the newest first, page by page."""
    service = service_of(request)
    before = None if wanted.before is None else _found(service, wanted.before).id
    filters = Filters(**wanted.model_dump(exclude={"before", "limit"}))
    places = {job_id: place for place, job_id in enumerate(service.store.queued_ids(), start=1)}
    found = service.store.newest(filters, before)
    views = (job_view(job, _place(job, places)) for job in found)
    return page("jobs", ((view.id, view) for view in views), wanted.limit)


def _place(job: Job, places: Mapping[str, int]) -> int | None:
    """Return a job's place in the queue; it may have left the queue since the places were read."""
    return places.get(job.id) if job.status is Status.QUEUED else None


@router.get("/jobs/{job_id}", response_model=JobView)
def job(request: Request, job_id: str) -> Response:
    """Show a job."""
    service = service_of(request)
    return answer(_view(service, _found(service, job_id)))


@router.delete("/jobs/{job_id}")
def cancel(request: Request, job_id: str) -> JobView:
    """Cancel a job that is queued or running; a job that has ended stays as it is."""
    service = service_of(request)
    found = service.cancel(_found(service, job_id).id)
    if found is None:
        raise HTTPException(404, f"job {job_id}: there is none")
    return _view(service, found)


@router.get("/jobs/{job_id}/log", response_model=LogPart)
def log(request: Request, job_id: str, offset: Number = 0) -> Response:
    """Read the log of a job's last attempt, from a byte offset."""
    service = service_of(request)
    found, days = _found(service, job_id), service.config.keep_days
    has_begun = found.status.is_final and found.attempts > 0
    if has_begun and not service.scheduler.directory_of(found).exists():
        kept = f"; the server keeps logs for {days} days (`keep_days`)" if days else ""
        raise HTTPException(410, f"job {job_id}: its log has been removed{kept}")
    text, after, ended = service.log(found, offset)
    return answer(LogPart(text=text, offset=after, ended=ended))


@router.get("/results", response_model=ResultList)
def results(request: Request, wanted: Annotated[ResultPage, Query()]) -> Response:
    """List results in the order in which they arrived, page by page."""
    filters = Filters(**wanted.model_dump(exclude={"after", "limit"}))
    found = service_of(request).store.results(filters, wanted.after)
    return page("results", ((one.number, result_view(one)) for one in found), wanted.limit)


@router.get("/runs")
def runs(request: Request) -> RunList:
    """List the names of all runs."""
    return RunList(runs=service_of(request).store.runs())


@router.get("/profiles")
def profiles(request: Request) -> ProfileList:
    """List the profiles."""
    known = service_of(request).profiles.values()
    return ProfileList(
        profiles=[ProfileView(name=one.name, kind=one.kind, gpus=one.gpus) for one in known]
    )


_STREAM = {"content": {"text/event-stream": {"schema": {"type": "string"}}}}


@router.get("/events", response_model=None, responses={200: _STREAM})
def events(
    request: Request, since: Number = 0, last_event_id: Annotated[str | None, Header()] = None
) -> StreamingResponse:
    """Follow the changes of all jobs (server-sent events); each event has the job's new state."""
    start = since if last_event_id is None else _number_of(last_event_id, since)
    return StreamingResponse(
        _events(request, start),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache"},
    )


def _number_of(text: str, otherwise: int) -> int:
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(_LARGEST))
    return min(int(text), _LARGEST) if is_number else otherwise


async def _events(request: Request, since: int) -> AsyncIterator[str]:
    service, quiet = service_of(request), _HEARTBEAT_S  # the first heartbeat comes at once
    while not await request.is_disconnected():
        found = await asyncio.to_thread(service.store.events, since)
        for event in found:
            since = event.number
            yield await asyncio.to_thread(_told, service, event)
        quiet = 0.0 if found else quiet + _POLL_S
        if quiet >= _HEARTBEAT_S:
            quiet = 0.0
            yield ": alive\n\n"
        if not found:
            await asyncio.sleep(_POLL_S)


def _told(service: Service, event: Event) -> str:
    job = service.store.get(event.job_id)
    view = None if job is None else _view(service, job).model_dump(mode="json")
    data = json.dumps({"number": event.number, "status": event.status, "job": view})
    return f"id: {event.number}\nevent: job\ndata: {data}\n\n"
