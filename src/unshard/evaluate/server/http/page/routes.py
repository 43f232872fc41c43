"""The views: each is an address that holds all that is chosen, so that it can be sent to others.

Logging in with the server's token, and out, is here, too.
"""

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, HTTPException, Query, Response
from fastapi.responses import HTMLResponse, StreamingResponse
from pydantic import BaseModel, Field
from starlette.requests import HTTPConnection

from unshard.evaluate.jobs import Filters, Job, Status
from unshard.evaluate.pins.pin import Pin
from unshard.evaluate.server.http.answers import Asking, BoundedText, Served, find_job
from unshard.evaluate.server.http.page.progress import Progress, progress_of
from unshard.evaluate.server.http.page.rendering import HEADERS, STATIC, render, version_of
from unshard.evaluate.server.http.security import (
    LOG_IN,
    LOG_OUT,
    Rules,
)
from unshard.evaluate.server.http.users import (
    LASTS_S,
    User,
    cookie_name,
    make_session,
    user_with,
)
from unshard.evaluate.server.processes.bounded_log import log_end
from unshard.evaluate.server.processes.supervise import LOG_NAME
from unshard.evaluate.server.queue.job_files import list_files, list_samples
from unshard.evaluate.server.service import Service
from unshard.evaluate.server.store.overview import (
    last_event,
    list_holders,
    recipe_of,
    results_of,
)

_log = logging.getLogger(__name__)

router = APIRouter(include_in_schema=False)

_JOBS = 25
FEW = 20
"""How many jobs a view shows that is about more than jobs."""

_TAIL_BYTES = 1 << 16
_TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class _Row:
    """A job in a list: its place in the queue, what it waits for there, and its progress."""

    job: Job
    position: int | None
    waits_for: str | None
    progress: Progress | None


@dataclass(frozen=True, slots=True)
class _Kept:
    """A pin, the jobs that need it, and bytes: of its files, and of those only it has."""

    pin: Pin
    jobs: Sequence[str]
    size: int
    alone: int


def _kept(pin: Pin, jobs: Sequence[str]) -> _Kept:
    place = pin.path if pin.path.is_dir() else pin.path.parent
    alone = 0
    for name, (_, size, _) in pin.files.items():
        with suppress(OSError):
            alone += size if (place / name).lstat().st_nlink == 1 else 0
    return _Kept(pin, jobs, sum(size for _, size, _ in pin.files.values()), alone)


class JobsPage(BaseModel):
    """Which jobs to list."""

    run: BoundedText = ""
    profile: BoundedText = ""
    status: Status | Literal[""] = ""
    before: BoundedText = ""

    def filters(self) -> Filters:
        """Return them; an empty field of the form means any."""
        return Filters(self.status or None, self.run or None, profile=self.profile or None)


@dataclass(frozen=True, slots=True)
class _Views:
    """What views are made of."""

    service: Service
    user: User
    rules: Rules

    def show(self, template: str, title: str, **values: object) -> HTMLResponse:
        """Return a view with what every view has."""
        service = self.service
        common: dict[str, object] = {
            "title": title,
            "since": last_event(service.store.connection),
            "problems": service.health.problems(),
            "is_draining": service.scheduler.is_draining,
            "counts": service.store.counts(),
            "gpus": len(service.config.gpus),
            "busy": len(service.config.gpus) - len(service.slots.free()),
            "has_token": bool(self.rules.users),
            "user": self.user,
        }
        return render(template, common | values, root=self.rules.root)


async def _views_of(connection: HTTPConnection, service: Served, user: Asking) -> _Views:
    rules: Rules = connection.app.state.rules
    return _Views(service, user, rules)


Views = Annotated[_Views, Depends(_views_of)]


def rows_of(service: Service, jobs: Sequence[Job]) -> list[_Row]:
    """Return what a view shows of jobs."""
    # One by one: a view has few rows, and the queue may be long.
    return [_row(service, job) for job in jobs]


def _row(service: Service, job: Job) -> _Row:
    position, waits_for = service.store.position(job.id), service.scheduler.waits_for(job)
    log = service.scheduler.directory_of(job) / LOG_NAME
    progress = progress_of(log) if job.status is Status.RUNNING else None
    return _Row(job, position, waits_for, progress)


@router.get("/view/queue")
def queue(views: Views) -> HTMLResponse:
    """Show what runs, what waits, and who has the GPUs."""
    service = views.service
    store = service.store
    queued = [job for one in store.queued_ids(FEW) if (job := store.get(one)) is not None]
    running = [job for job in store.running() if job.status is Status.RUNNING]
    shown = {"running": rows_of(service, running), "queued": rows_of(service, queued)}
    return views.show("queue.html", "Queue", held=_gpus(service), **shown)


def _gpus(service: Service) -> Mapping[str, object]:
    """Return each GPU with the job that has it; None for a free one."""
    holders = list_holders(service.store.connection)
    by_gpu = {gpu: holder for holder in holders for gpu in holder.gpus}
    free = service.slots.free()
    return {
        gpu: None if gpu in free else by_gpu.get(gpu, "an engine that is kept")
        for gpu in service.config.gpus
    }


@router.get("/view/jobs")
def jobs(views: Views, wanted: Annotated[JobsPage, Query()]) -> HTMLResponse:
    """List jobs, the newest first."""
    service = views.service
    before = find_job(service, wanted.before).id if wanted.before else None
    found = list(islice(service.store.newest(wanted.filters(), before), _JOBS + 1))
    return views.show(
        "jobs.html",
        "Jobs",
        wanted=wanted,
        rows=rows_of(service, found[:_JOBS]),
        has_more=len(found) > _JOBS,
        statuses=list(Status),
        profiles=list(service.profiles),
    )


@router.get("/view/jobs/{job_id}")
def job(views: Views, job_id: str) -> HTMLResponse:
    """Show a job: its state, its numbers, what it was made from, and the end of its log."""
    service = views.service
    found = find_job(service, job_id)
    end = log_end(service.scheduler.directory_of(found) / LOG_NAME)
    return views.show(
        "job.html",
        f"Job {found.id[:8]}",
        row=_row(service, found),
        results=results_of(service.store.connection, found.id),
        log_start=max(0, end - _TAIL_BYTES),
        model=model if (model := service.work_dir / "merged" / found.id).is_dir() else None,
        recipe=recipe_of(service.store.connection, found.id),
        stamps=found.request.stamps,
        files=list_files(service.work_dir, found),
        samples=list_samples(service.work_dir, found),
    )


@router.get("/view/jobs/{job_id}/again.sh")
def again(service: Served, job_id: str) -> Response:
    """Return the script by which a job can be done again without the server."""
    found = find_job(service, job_id)
    script, _ = recipe_of(service.store.connection, found.id)
    if not script:
        raise HTTPException(404, f"job {job_id} has not begun, or before this was recorded")
    return Response(script, media_type=_TEXT, headers=HEADERS)


@router.get("/view/jobs/{job_id}/log.txt")
def whole_log(service: Served, job_id: str) -> StreamingResponse:
    """Return the log of a job's last attempt as plain text, as it was written."""
    found = find_job(service, job_id)
    return StreamingResponse(_log_parts(service, found), media_type=_TEXT, headers=HEADERS)


def _log_parts(service: Service, found: Job) -> Iterator[str]:
    text, after, _ = service.log(found, 0)
    while text:
        yield text
        text, after, _ = service.log(found, after)


@router.get("/view/submit")
def submit(views: Views) -> HTMLResponse:
    """Show a form for a new job."""
    service = views.service
    return views.show("submit.html", "Submit", profiles=list(service.profiles))


@router.get("/view/disk")
def disk(views: Views) -> HTMLResponse:
    """Show the pins and what they keep on the disk."""
    service = views.service
    work = service.work_dir
    pins = [_kept(pin, jobs) for pin, jobs in service.pins.list_all()]
    space = shutil.disk_usage(work)
    return views.show("disk.html", "Disk", pins=pins, space=space, work=str(work))


@router.get("/view/static/{name}")
def static(name: str, v: str = "") -> Response:
    """Return a file that the page loads; one of another version is not kept by browsers."""
    if name not in STATIC:
        raise HTTPException(404, "there is no such file")
    body, kind = STATIC[name]
    kept = "max-age=31536000, immutable" if v == version_of(name) else "no-cache"
    return Response(body, media_type=kind, headers={**HEADERS, "Cache-Control": kept})


class Shown(BaseModel):
    """What the form sends."""

    token: str = Field(max_length=4096)


@router.get(LOG_IN)
async def log_in_form(connection: HTTPConnection) -> HTMLResponse:
    """Show the form."""
    rules: Rules = connection.app.state.rules
    return render("log_in.html", {"title": "Log in"}, root=rules.root)


@router.post(LOG_IN)
async def log_in(connection: HTTPConnection, shown: Shown) -> Response:
    """Give the browser a cookie if it has a token, and take those of other users back."""
    rules: Rules = connection.app.state.rules
    if not rules.users:
        raise HTTPException(400, "this server needs no token")
    user = user_with(rules.users, shown.token.strip())
    if user is None:
        address = connection.client.host if connection.client else "-"
        _log.warning("%s tried to log in with a wrong token", address)
        raise HTTPException(401, "wrong token")
    response = await log_out(connection)
    # The origin of a browser's POST says how it reaches the server, also through a proxy.
    is_secure = connection.headers.get("origin", "").startswith("https://")
    response.set_cookie(
        cookie_name(user.token),
        make_session(user.token),
        max_age=LASTS_S,
        httponly=True,
        samesite="strict",
        secure=is_secure,
        path=f"{rules.root}/",
    )
    return response


@router.post(LOG_OUT)
async def log_out(connection: HTTPConnection) -> Response:
    """Take the cookies back."""
    rules: Rules = connection.app.state.rules
    response = Response(status_code=204, headers=HEADERS)
    for user in rules.users:
        name = cookie_name(user.token)
        if name in connection.cookies:
            response.delete_cookie(name, f"{rules.root}/", httponly=True, samesite="strict")
    return response
