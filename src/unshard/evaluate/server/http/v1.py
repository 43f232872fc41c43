"""Our own protocol, under `/api/v1`: jobs, logs, results as numbers and as files, events.

Its OpenAPI description comes from the models of its requests and answers.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import cache
from typing import Annotated, BinaryIO
from urllib.parse import quote

import fastapi
from fastapi import APIRouter, Header, HTTPException, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import TypeAdapter
from starlette.types import Receive, Scope, Send

from unshard.evaluate.jobs import Filters, Job, Result, Status
from unshard.evaluate.server.evaluators.profiles import base_of, resolve_name
from unshard.evaluate.server.http.answers import (
    Asking,
    BoundedText,
    ErrorBody,
    Served,
    answer,
    answer_page,
    check_may_change,
    find_job,
)
from unshard.evaluate.server.http.page.rendering import HEADERS
from unshard.evaluate.server.http.security import refused
from unshard.evaluate.server.http.users import Role
from unshard.evaluate.server.http.views import (
    Drain,
    FileList,
    JobList,
    JobPage,
    JobView,
    LogPart,
    Number,
    Place,
    ProfileList,
    ProfileView,
    Reason,
    ResultList,
    ResultPage,
    RunList,
    RunView,
    Submission,
)
from unshard.evaluate.server.queue.job_files import list_files, open_file
from unshard.evaluate.server.service import Service
from unshard.evaluate.values import LARGEST

router = APIRouter(prefix="/api/v1", tags=["v1"], responses={"4XX": {"model": ErrorBody}})
_POLL_S = 0.5
_HEARTBEAT_S = 5.0
_STREAMS = 64  # of a client
_EVENTS = 100  # read at once, and held for a client that reads slowly
_PIECE = 1 << 18  # bytes of a file


_RESULT = TypeAdapter(Result)  # it has the fields of a view, which need not be made for each


def _view(service: Service, job: Job) -> JobView:
    return JobView.of(job, service.store.position(job.id), service.scheduler.waits_for(job))


@router.post("/jobs", status_code=201, responses={200: {"model": JobView}})
def submit(service: Served, user: Asking, response: Response, submission: Submission) -> JobView:
    """Queue a job; the same job (run, step, weights, profile, tasks) is not queued twice."""
    job, is_new = service.submit(replace(submission.request(), user=user.name), submission.pin)
    if not is_new:
        response.status_code = 200
    return _view(service, job)


@router.get("/jobs", response_model=JobList)
def jobs(service: Served, wanted: Annotated[JobPage, Query()]) -> Response:
    """List jobs, the newest first, page by page."""
    before = None if wanted.before is None else find_job(service, wanted.before).id
    filters = Filters(**wanted.model_dump(exclude={"before", "limit"}))
    places = {job_id: place for place, job_id in enumerate(service.store.queued_ids(), start=1)}

    def shown(job: Job) -> JobView:
        # It may have left the queue since the places were read.
        position = places.get(job.id) if job.status is Status.QUEUED else None
        return JobView.of(job, position, service.scheduler.waits_for(job))

    found = service.store.newest(filters, before)
    written = ((job.id, shown(job).model_dump_json()) for job in found)
    return answer_page("jobs", written, wanted.limit)


@router.get("/jobs/{job_id}", response_model=JobView)
def job(service: Served, job_id: str) -> Response:
    """Show a job."""
    return answer(_view(service, find_job(service, job_id)))


@router.delete("/jobs/{job_id}")
def cancel(service: Served, user: Asking, job_id: str) -> JobView:
    """Cancel a job that is queued or running; a job that has ended stays as it is."""
    found = find_job(service, job_id)
    check_may_change(found, user, "cancelled")
    service.scheduler.cancel(found.id)
    return _view(service, find_job(service, found.id))


@router.post("/jobs/{job_id}/retry")
def retry(service: Served, user: Asking, job_id: str) -> JobView:
    """Queue a job again that has ended; one that is completed stays, and gets a new one beside."""
    found = find_job(service, job_id)
    check_may_change(found, user, "retried")
    return _view(service, service.retry(found))


@router.post("/jobs/{job_id}/hide")
def hide(service: Served, user: Asking, job_id: str, why: Reason) -> JobView:
    """Leave a job's results out of curves and tables."""
    found = find_job(service, job_id)
    check_may_change(found, user, f"hidden ({why.reason})")
    service.store.hiding.hide(found.id, why.reason)
    return _view(service, find_job(service, found.id))


@router.post("/jobs/{job_id}/show")
def show(service: Served, user: Asking, job_id: str) -> JobView:
    """Show a job's results again; the reason why they were hidden is kept."""
    found = find_job(service, job_id)
    check_may_change(found, user, "shown again")
    service.store.hiding.show(found.id)
    return _view(service, find_job(service, found.id))


@router.post("/drain")
def drain(service: Served, user: Asking) -> Drain:
    """Begin no more jobs, and end the server when none runs; jobs are still accepted and kept."""
    if user.role is not Role.OPERATOR:
        raise HTTPException(403, "only operators drain the server")
    running = service.drain(user.name)
    return Drain(running=running, queued=service.store.counts()[Status.QUEUED])


@router.get("/jobs/{job_id}/log", response_model=LogPart)
def log(service: Served, job_id: str, offset: Number = 0) -> Response:
    """Read the log of a job's last attempt, from a byte offset."""
    found, days = find_job(service, job_id), service.config.keep_days
    has_begun = found.status.is_final and found.attempts > 0
    if has_begun and not service.scheduler.directory_of(found).exists():
        kept = f"; the server keeps logs for {days} days (`keep_days`)" if days else ""
        raise HTTPException(410, f"job {job_id}: its log has been removed{kept}")
    text, after, ended = service.log(found, offset)
    return answer(LogPart(text=text, offset=after, ended=ended))


@router.get("/results", response_model=ResultList)
def results(service: Served, wanted: Annotated[ResultPage, Query()]) -> Response:
    """List results in the order in which they arrived, page by page."""
    filters = Filters(**wanted.model_dump(exclude={"after", "limit", "hidden"}))
    found = service.store.results(filters, wanted.after, are_hidden_read=wanted.hidden)
    written = ((one.number, _RESULT.dump_json(one).decode()) for one in found)
    return answer_page("results", written, wanted.limit)


@router.get("/runs")
def runs(service: Served) -> RunList:
    """List all runs."""
    found = service.store.runs.all()
    return RunList(runs=[one.label for one in found], details=list(map(RunView.of, found)))


@router.post("/runs")
def see_run(service: Served, place: Place) -> RunView:
    """Look at the directory of a run: it may have been moved, or adopted."""
    return RunView.of(service.see_run(place.directory))


@router.get("/profiles")
def profiles(service: Served, name: BoundedText | None = None) -> ProfileList:
    """List the profiles, or only that which a submission with this name as `profile` means."""
    meant = None if name is None else base_of(resolve_name(service.profiles, name))
    return ProfileList(
        profiles=[
            ProfileView(
                name=key,
                kind=one.kind,
                gpus=one.gpus,
                order=one.order,
                max_lag=one.max_lag,
                revision=one.revision(),
            )
            for key, one in service.profiles.items()
            if meant in (None, key)
        ]
    )


_STREAM = {"content": {"text/event-stream": {"schema": {"type": "string"}}}}


class _Stream(StreamingResponse):
    """Events for one client. Each stream reads the database, so a client may have 64 at once."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        streams: Counter[str] = scope["app"].state.streams
        client = str((scope.get("client") or ("",))[0])
        if streams[client] >= _STREAMS:
            refusal = refused(429, f"{client} follows the events {_STREAMS} times: close some")
            await refusal(scope, receive, send)
            return
        streams[client] += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            streams -= Counter((client,))  # which also forgets a client without any


@router.get("/events", response_model=None, responses={200: _STREAM})
def events(
    request: fastapi.Request,
    service: Served,
    since: Number = 0,
    last_event_id: Annotated[str | None, Header()] = None,
) -> StreamingResponse:
    """Follow the changes of all jobs (server-sent events); each event has the job's new state."""
    text = last_event_id or ""
    if text.isascii() and text.isdecimal() and len(text) <= len(str(LARGEST)):
        since = min(int(text), LARGEST)
    return _Stream(
        _follow(request, service, since),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache"},
    )


async def _follow(request: fastapi.Request, service: Service, since: int) -> AsyncIterator[str]:
    quiet = _HEARTBEAT_S  # the first heartbeat comes at once
    while not (service.stopping.is_set() or await request.is_disconnected()):
        found = await asyncio.to_thread(_events, service, since)
        for number, event in found:
            since = number
            yield event
        quiet = 0.0 if found else quiet + _POLL_S
        if quiet >= _HEARTBEAT_S:
            quiet = 0.0
            yield ": alive\n\n"
        if not found:
            await asyncio.sleep(_POLL_S)


def _events(service: Service, since: int) -> list[tuple[int, str]]:
    """Return the next changes after one: the number and the text of each."""

    @cache
    def state_of(job_id: str) -> dict[str, object] | None:
        job = service.store.get(job_id)
        return None if job is None else _view(service, job).model_dump(mode="json")

    found = []
    for event in service.store.events(since, _EVENTS):
        fields = {"number": event.number, "status": event.status, "job": state_of(event.job_id)}
        text = f"id: {event.number}\nevent: job\ndata: {json.dumps(fields)}\n\n"
        found.append((event.number, text))
    return found


@router.get("/jobs/{job_id}/files")
def files(service: Served, job_id: str) -> FileList:
    """List the results and samples that the evaluator wrote about a completed job."""
    return FileList(files=list_files(service.work_dir, find_job(service, job_id)))


_FILE = {"content": {"text/plain": {"schema": {"type": "string", "format": "binary"}}}}


@router.get("/jobs/{job_id}/files/{name:path}", response_model=None, responses={200: _FILE})
def file(service: Served, job_id: str, name: str) -> StreamingResponse:
    """Return one of these files as it was written."""
    found = open_file(service.work_dir, find_job(service, job_id), name)
    if found is None:
        raise HTTPException(404, f"job {job_id} has no file of this name")
    kept_as = quote(name.rpartition("/")[2], safe="")
    return StreamingResponse(
        _pieces(found),
        media_type="text/plain; charset=utf-8",
        headers={**HEADERS, "Content-Disposition": f"attachment; filename*=UTF-8''{kept_as}"},
    )


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while piece := file.read(_PIECE):
            yield piece
