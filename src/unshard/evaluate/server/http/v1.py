"""Our own protocol, under `/api/v1`: jobs, logs, results as numbers, events.

Its OpenAPI description comes from the models of its requests and answers.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from functools import cache
from typing import Annotated

import fastapi
from fastapi import APIRouter, Header, HTTPException, Query, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from starlette.types import Receive, Scope, Send

from unshard.evaluate.jobs import Arguments, Filters, Job, Request, Result, Status, WeightsName
from unshard.evaluate.server.http.answers import (
    BoundedText,
    ErrorBody,
    Served,
    Tasks,
    answer,
    answer_page,
)
from unshard.evaluate.server.http.security import refused
from unshard.evaluate.server.service import Service
from unshard.evaluate.values import LARGEST, Whole

router = APIRouter(prefix="/api/v1", tags=["v1"], responses={"4XX": {"model": ErrorBody}})
_POLL_S = 0.5
_HEARTBEAT_S = 5.0
_STREAMS = 64  # of a client
_EVENTS = 100  # read at once, and held for a client that reads slowly
_OF_REQUEST = frozenset({"run", "step", "weights", "profile", "tasks", "checkpoint", "fingerprint"})

Number = Annotated[int, Field(ge=0, le=LARGEST)]


class Drain(BaseModel):
    """A server that begins no more jobs: how many run, and how many the next server will have."""

    running: int
    queued: int


class Submission(Arguments):
    """A job to queue; the arguments of its evaluator are keys like any others."""

    model_config = ConfigDict(extra="forbid")

    checkpoint: BoundedText
    profile: BoundedText
    tasks: Tasks
    step: Whole | None = None
    run: BoundedText = ""
    weights: WeightsName = "model"
    pin: BoundedText | None = None

    def request(self) -> Request:
        """Return it as the value that the server works with."""
        values = self.model_dump(exclude={"pin"})
        arguments = Arguments(**{name: values.pop(name) for name in Arguments.model_fields})
        return Request(**{**values, "tasks": tuple(self.tasks)}, arguments=arguments)


class JobView(BaseModel):
    """A job and its state; times are seconds since the epoch.

    `stderr` has the standard errors of those `metrics` that have one.

    `superseded_by` is the job for the files that its trainer has saved in the same place since;
    a superseded job without one was skipped, because newer steps wait (`max_lag`).
    `waits_for`: what the server's configuration lacks of what a queued job needs.
    `pinned`: whether hard links keep the checkpoint, which may otherwise be removed while it waits.
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
    pinned: bool
    position: int | None
    waits_for: str | None
    metrics: dict[str, float]
    stderr: dict[str, float]

    @classmethod
    def of(cls, job: Job, position: int | None, waits_for: str | None) -> "JobView":
        """Return what clients see of a job."""
        given: dict[str, object] = {"position": position, "pinned": job.pin is not None}
        given["waits_for"] = waits_for
        given |= {name: getattr(job.request, name) for name in _OF_REQUEST}
        given |= {name: getattr(job, name) for name in _OF_JOB}
        return cls.model_validate(given)


_OF_JOB = JobView.model_fields.keys() - _OF_REQUEST - {"position", "pinned", "waits_for"}


class ResultPage(BaseModel):
    """Which results to list, and where to continue."""

    run: BoundedText | None = None
    step: Number | None = None
    weights: WeightsName | None = None
    profile: BoundedText | None = None
    after: Number = 0
    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000


class JobPage(BaseModel):
    """Which jobs to list, and where to continue."""

    run: BoundedText | None = None
    step: Number | None = None
    weights: WeightsName | None = None
    profile: BoundedText | None = None
    status: Status | None = None
    before: BoundedText | None = None
    limit: Annotated[int, Field(ge=1, le=1000)] = 100


class JobList(BaseModel):
    """Jobs, the newest first; `next` is the `before` of the next page, if there is one."""

    jobs: list[JobView]
    next: str | None


class ResultView(BaseModel):
    """One number of a job; results that arrive later have a higher `number`.

    `higher_is_better` is what the evaluator says; null: it does not say it.
    """

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
    stderr: float | None
    higher_is_better: bool | None


_RESULT = TypeAdapter(Result)  # it has the fields of a view, which need not be made for each


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


def _find(service: Service, job_id: str) -> Job:
    job = service.job(job_id)
    if job is None:
        raise HTTPException(404, f"job {job_id} does not exist")
    return job


def _view(service: Service, job: Job) -> JobView:
    return JobView.of(job, service.store.position(job.id), service.scheduler.waits_for(job))


@router.post("/jobs", status_code=201, responses={200: {"model": JobView}})
def submit(service: Served, response: Response, submission: Submission) -> JobView:
    """Queue a job; the same job (run, step, weights, profile, tasks) is not queued twice."""
    job, is_new = service.submit(submission.request(), submission.pin)
    if not is_new:
        response.status_code = 200
    return _view(service, job)


@router.get("/jobs", response_model=JobList)
def jobs(service: Served, wanted: Annotated[JobPage, Query()]) -> Response:
    """List jobs, the newest first, page by page."""
    before = None if wanted.before is None else _find(service, wanted.before).id
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
    return answer(_view(service, _find(service, job_id)))


@router.delete("/jobs/{job_id}")
def cancel(service: Served, job_id: str) -> JobView:
    """Cancel a job that is queued or running; a job that has ended stays as it is."""
    found = _find(service, job_id)
    service.scheduler.cancel(found.id)
    return _view(service, _find(service, found.id))


@router.post("/jobs/{job_id}/retry")
def retry(service: Served, job_id: str) -> JobView:
    """Queue a job again that has failed, was cancelled or skipped, or has expired."""
    return _view(service, service.retry(_find(service, job_id)))


@router.post("/drain")
def drain(service: Served) -> Drain:
    """Begin no more jobs, and end the server when none runs; jobs are still accepted and kept."""
    running = service.drain()
    return Drain(running=running, queued=service.store.counts()[Status.QUEUED])


@router.get("/jobs/{job_id}/log", response_model=LogPart)
def log(service: Served, job_id: str, offset: Number = 0) -> Response:
    """Read the log of a job's last attempt, from a byte offset."""
    found, days = _find(service, job_id), service.config.keep_days
    has_begun = found.status.is_final and found.attempts > 0
    if has_begun and not service.scheduler.directory_of(found).exists():
        kept = f"; the server keeps logs for {days} days (`keep_days`)" if days else ""
        raise HTTPException(410, f"job {job_id}: its log has been removed{kept}")
    text, after, ended = service.log(found, offset)
    return answer(LogPart(text=text, offset=after, ended=ended))


@router.get("/results", response_model=ResultList)
def results(service: Served, wanted: Annotated[ResultPage, Query()]) -> Response:
    """List results in the order in which they arrived, page by page."""
    filters = Filters(**wanted.model_dump(exclude={"after", "limit"}))
    found = service.store.results(filters, wanted.after)
    written = ((one.number, _RESULT.dump_json(one).decode()) for one in found)
    return answer_page("results", written, wanted.limit)


@router.get("/runs")
def runs(service: Served) -> RunList:
    """List the names of all runs."""
    return RunList(runs=service.store.runs())


@router.get("/profiles")
def profiles(service: Served) -> ProfileList:
    """List the profiles."""
    known = service.profiles.items()
    return ProfileList(
        profiles=[ProfileView(name=name, kind=one.kind, gpus=one.gpus) for name, one in known]
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
    while not await request.is_disconnected():
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
