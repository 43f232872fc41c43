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
from unshard.evaluate.server.http.security import Refusal
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


_RESULT = TypeAdapter(Result)  # faster than views, which have the same fields


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
    positions = {job_id: index for index, job_id in enumerate(service.store.queued_ids(), start=1)}

    def as_json(job: Job) -> str:
        # The job may have left the queue since the positions were read.
        position = positions.get(job.id) if job.status is Status.QUEUED else None
        return JobView.of(job, position, service.scheduler.waits_for(job)).model_dump_json()

    matching = service.store.newest(filters, before)
    return answer_page("jobs", ((job.id, as_json(job)) for job in matching), wanted.limit)


@router.get("/jobs/{job_id}", response_model=JobView)
def job(service: Served, job_id: str) -> Response:
    """Show a job."""
    return answer(_view(service, find_job(service, job_id)))


@router.delete("/jobs/{job_id}")
def cancel(service: Served, user: Asking, job_id: str) -> JobView:
    """Cancel a job that is queued or running; a job that has ended stays as it is."""
    job = find_job(service, job_id)
    check_may_change(job, user, "cancelled")
    service.scheduler.cancel(job.id)
    return _view(service, find_job(service, job.id))


@router.post("/jobs/{job_id}/retry")
def retry(service: Served, user: Asking, job_id: str) -> JobView:
    """Queue an ended job again; a completed job stays, and a new job is queued."""
    job = find_job(service, job_id)
    check_may_change(job, user, "retried")
    return _view(service, service.retry(job))


@router.post("/jobs/{job_id}/hide")
def hide(service: Served, user: Asking, job_id: str, why: Reason) -> JobView:
    """Leave a job's results out of curves and tables."""
    job = find_job(service, job_id)
    check_may_change(job, user, f"hidden ({why.reason})")
    service.store.hiding.hide(job.id, why.reason)
    return _view(service, find_job(service, job.id))


@router.post("/jobs/{job_id}/show")
def show(service: Served, user: Asking, job_id: str) -> JobView:
    """Show a job's results again; the reason why they were hidden is kept."""
    job = find_job(service, job_id)
    check_may_change(job, user, "shown again")
    service.store.hiding.show(job.id)
    return _view(service, find_job(service, job.id))


@router.post("/drain")
def drain(service: Served, user: Asking) -> Drain:
    """Stop starting jobs, and end the server when none runs; jobs are still accepted and kept."""
    if user.role is not Role.OPERATOR:
        raise HTTPException(403, "only operators drain the server")
    running = service.drain(user.name)
    return Drain(running=running, queued=service.store.counts()[Status.QUEUED])


@router.get("/jobs/{job_id}/log", response_model=LogPart)
def log(service: Served, job_id: str, offset: Number = 0) -> Response:
    """Read the log of a job's last attempt, from a byte offset."""
    job, days = find_job(service, job_id), service.config.keep_days
    had_log = job.status.is_final and job.attempts > 0
    if had_log and not service.scheduler.directory_of(job).exists():
        why = f"; the server keeps logs for {days} days (`keep_days`)" if days else ""
        raise HTTPException(410, f"job {job_id}: its log has been removed{why}")
    text, after, ended = service.log(job, offset)
    return answer(LogPart(text=text, offset=after, ended=ended))


@router.get("/results", response_model=ResultList)
def results(service: Served, wanted: Annotated[ResultPage, Query()]) -> Response:
    """List results in the order in which they arrived, page by page."""
    filters = Filters(**wanted.model_dump(exclude={"after", "limit", "hidden"}))
    matching = service.store.results(filters, wanted.after, are_hidden_read=wanted.hidden)
    entries = ((one.number, _RESULT.dump_json(one).decode()) for one in matching)
    return answer_page("results", entries, wanted.limit)


@router.get("/runs")
def runs(service: Served) -> RunList:
    """List all runs."""
    every = service.store.runs.all()
    return RunList(runs=[run.label for run in every], details=list(map(RunView.of, every)))


@router.post("/runs")
def see_run(service: Served, place: Place) -> RunView:
    """Update the record of a run's directory, which may have been moved or adopted."""
    return RunView.of(service.see_run(place.directory))


@router.get("/profiles")
def profiles(service: Served, name: BoundedText | None = None) -> ProfileList:
    """List the profiles, or only the one that a submission with `name` as profile would get."""
    only = None if name is None else base_of(resolve_name(service.profiles, name))
    return ProfileList(
        profiles=[
            ProfileView(
                name=key,
                kind=profile.kind,
                gpus=profile.gpus,
                order=profile.order,
                max_lag=profile.max_lag,
                revision=profile.revision(),
            )
            for key, profile in service.profiles.items()
            if only in (None, key)
        ]
    )


_STREAM = {"content": {"text/event-stream": {"schema": {"type": "string"}}}}


class _EventStream(StreamingResponse):
    """Events for one client. Each stream reads the database, so a client may have 64 at once."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        streams: Counter[str] = scope["app"].state.streams
        client = str((scope.get("client") or ("",))[0])
        if streams[client] >= _STREAMS:
            refusal = Refusal(429, f"{client} has {_STREAMS} streams of events: close some")
            await refusal(scope, receive, send)
            return
        streams[client] += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            streams -= Counter((client,))  # unlike `streams[client] -= 1`, this drops zeros


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
    return _EventStream(
        _follow(request, service, since),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache"},
    )


async def _follow(request: fastapi.Request, service: Service, since: int) -> AsyncIterator[str]:
    quiet_s = _HEARTBEAT_S  # the first heartbeat is sent at once
    while not (service.stopping.is_set() or await request.is_disconnected()):
        new = await asyncio.to_thread(_events, service, since)
        for number, event in new:
            since = number
            yield event
        quiet_s = 0.0 if new else quiet_s + _POLL_S
        if quiet_s >= _HEARTBEAT_S:
            quiet_s = 0.0
            yield ": alive\n\n"
        if not new:
            await asyncio.sleep(_POLL_S)


def _events(service: Service, since: int) -> list[tuple[int, str]]:
    """Return the number and the text of the next events."""

    @cache
    def state_of(job_id: str) -> dict[str, object] | None:
        job = service.store.get(job_id)
        return None if job is None else _view(service, job).model_dump(mode="json")

    texts = []
    for event in service.store.events(since, _EVENTS):
        fields = {"number": event.number, "status": event.status, "job": state_of(event.job_id)}
        text = f"id: {event.number}\nevent: job\ndata: {json.dumps(fields)}\n\n"
        texts.append((event.number, text))
    return texts


@router.get("/jobs/{job_id}/files")
def files(service: Served, job_id: str) -> FileList:
    """List the evaluator's files of results and samples of a completed job."""
    return FileList(files=list_files(service.work_dir, find_job(service, job_id)))


_FILE = {"content": {"text/plain": {"schema": {"type": "string", "format": "binary"}}}}


@router.get("/jobs/{job_id}/files/{name:path}", response_model=None, responses={200: _FILE})
def file(service: Served, job_id: str, name: str) -> StreamingResponse:
    """Return one of these files unchanged."""
    stream = open_file(service.work_dir, find_job(service, job_id), name)
    if stream is None:
        raise HTTPException(404, f"job {job_id} has no file of this name")
    base_name = quote(name.rpartition("/")[2], safe="")
    return StreamingResponse(
        _pieces(stream),
        media_type="text/plain; charset=utf-8",
        headers={**HEADERS, "Content-Disposition": f"attachment; filename*=UTF-8''{base_name}"},
    )


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while piece := file.read(_PIECE):
            yield piece
