"""The views of jobs, the queue and the disk, static files, logging in and out.

The address of a view has all of the reader's choices, so that it can be sent to others.
"""

import logging
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from fastapi import APIRouter, Depends, HTTPException, Query, Response
from fastapi.responses import HTMLResponse, StreamingResponse
from pydantic import BaseModel, Field
from starlette.requests import HTTPConnection

from unshard.evaluate.jobs import Filters, Job, Status
from unshard.evaluate.pins.pin import Pin
from unshard.evaluate.server.http.answers import Asking, BoundedText, Served, find_job
from unshard.evaluate.server.http.page.rendering import HEADERS, STATIC, render, version_of
from unshard.evaluate.server.http.security import LOG_IN, LOG_OUT, Rules
from unshard.evaluate.server.http.users import LASTS_S, User, cookie_name, make_session, user_with
from unshard.evaluate.server.processes.bounded_log import last_lines, log_end
from unshard.evaluate.server.processes.supervise import LOG_NAME
from unshard.evaluate.server.queue.job_files import list_files, list_samples
from unshard.evaluate.server.service import Service
from unshard.evaluate.server.store.overview import last_event, list_holders, recipe_of, results_of

_log = logging.getLogger(__name__)

router = APIRouter(include_in_schema=False)

_JOBS = 25
FEW = 20
"""The most jobs in a view that does not only list jobs."""

_TAIL_BYTES = 1 << 16
_TEXT = "text/plain; charset=utf-8"
_PERCENT = re.compile(r"(?<![\d.])(\d{1,3})%\|")  # as tqdm writes it
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_LONGEST_LINE = 160


class Progress(NamedTuple):
    """The last line of an evaluator's log, and the percentage of a progress bar in it."""

    line: str
    percent: int | None


def progress_of(log: Path) -> Progress | None:
    """Return the progress of the evaluator with this log; None while the log is empty."""
    text = _ESCAPES.sub("", last_lines(log, 20))
    lines = [line for line in re.split(r"[\r\n]+", text) if line.strip()]
    if not lines:
        return None
    line = lines[-1].strip()
    bars = _PERCENT.findall(line)
    percent = int(bars[-1]) if bars and int(bars[-1]) <= 100 else None
    return Progress(line[:_LONGEST_LINE], percent)


class _JobRow(NamedTuple):
    """A job in a list: its position in the queue, why it waits there, and its progress."""

    job: Job
    position: int | None
    waits_for: str | None
    progress: Progress | None


class _PinRow(NamedTuple):
    """A pin, the jobs that need it, and the bytes of all its files and of those only here."""

    pin: Pin
    jobs: Sequence[str]
    size: int
    alone: int


def _pin_row(pin: Pin, jobs: Sequence[str]) -> _PinRow:
    directory = pin.path if pin.path.is_dir() else pin.path.parent
    alone = 0
    for name, (_, size, _) in pin.files.items():
        with suppress(OSError):
            alone += size if (directory / name).lstat().st_nlink == 1 else 0
    return _PinRow(pin, jobs, sum(size for _, size, _ in pin.files.values()), alone)


class JobsPage(BaseModel):
    """Which jobs to list."""

    run: BoundedText = ""
    profile: BoundedText = ""
    status: Status | Literal[""] = ""
    before: BoundedText = ""

    def filters(self) -> Filters:
        """Return the filters; an empty field of the form means any."""
        return Filters(self.status or None, self.run or None, profile=self.profile or None)


class _Views(NamedTuple):
    """Makes views for a request."""

    service: Service
    user: User
    rules: Rules

    def show(self, template: str, title: str, **values: object) -> HTMLResponse:
        """Return a view, with the common parts of all views."""
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


def rows_of(service: Service, jobs: Sequence[Job]) -> list[_JobRow]:
    """Return the rows of jobs."""
    # The position of each is queried: a view has few rows, and the queue may be long.
    return [_row(service, job) for job in jobs]


def _row(service: Service, job: Job) -> _JobRow:
    position, waits_for = service.store.position(job.id), service.scheduler.waits_for(job)
    log = service.scheduler.directory_of(job) / LOG_NAME
    progress = progress_of(log) if job.status is Status.RUNNING else None
    return _JobRow(job, position, waits_for, progress)


@router.get("/view/queue")
def queue(views: Views) -> HTMLResponse:
    """Show running and queued jobs, and the jobs that use each GPU."""
    service, store = views.service, views.service.store
    queued = [job for id_ in store.queued_ids(FEW) if (job := store.get(id_)) is not None]
    running = [job for job in store.running() if job.status is Status.RUNNING]
    rows = {"running": rows_of(service, running), "queued": rows_of(service, queued)}
    by_gpu = {gpu: holder for holder in list_holders(store.connection) for gpu in holder.gpus}
    free = service.slots.free()
    held = {
        gpu: None if gpu in free else by_gpu.get(gpu, "an idle engine")
        for gpu in service.config.gpus
    }
    return views.show("queue.html", "Queue", held=held, **rows)


@router.get("/view/jobs")
def jobs(views: Views, wanted: Annotated[JobsPage, Query()]) -> HTMLResponse:
    """List jobs, the newest first."""
    service = views.service
    before = find_job(service, wanted.before).id if wanted.before else None
    newest = list(islice(service.store.newest(wanted.filters(), before), _JOBS + 1))
    return views.show(
        "jobs.html",
        "Jobs",
        wanted=wanted,
        rows=rows_of(service, newest[:_JOBS]),
        has_more=len(newest) > _JOBS,
        statuses=list(Status),
        profiles=list(service.profiles),
    )


@router.get("/view/jobs/{job_id}")
def job(views: Views, job_id: str) -> HTMLResponse:
    """Show a job: its state, its results, its origin, and the end of its log."""
    service = views.service
    job = find_job(service, job_id)
    end = log_end(service.scheduler.directory_of(job) / LOG_NAME)
    return views.show(
        "job.html",
        f"Job {job.id[:8]}",
        row=_row(service, job),
        results=results_of(service.store.connection, job.id),
        log_start=max(0, end - _TAIL_BYTES),
        model=model if (model := service.work_dir / "merged" / job.id).is_dir() else None,
        recipe=recipe_of(service.store.connection, job.id),
        stamps=job.request.stamps,
        files=list_files(service.work_dir, job),
        samples=list_samples(service.work_dir, job),
    )


@router.get("/view/jobs/{job_id}/again.sh")
def again(service: Served, job_id: str) -> Response:
    """Return a script that repeats a job without the server."""
    job = find_job(service, job_id)
    script, _ = recipe_of(service.store.connection, job.id)
    if not script:
        why = "was run before the server recorded scripts" if job.attempts else "has not started"
        raise HTTPException(404, f"job {job_id} has no script: it {why}")
    return Response(script, media_type=_TEXT, headers=HEADERS)


@router.get("/view/jobs/{job_id}/log.txt")
def whole_log(service: Served, job_id: str) -> StreamingResponse:
    """Return the log of a job's last attempt as plain text, unchanged."""
    job = find_job(service, job_id)

    def parts() -> Iterator[str]:
        text, after, _ = service.log(job, 0)
        while text:
            yield text
            text, after, _ = service.log(job, after)

    return StreamingResponse(parts(), media_type=_TEXT, headers=HEADERS)


@router.get("/view/submit")
def submit(views: Views) -> HTMLResponse:
    """Show a form for a new job."""
    return views.show("submit.html", "Submit", profiles=list(views.service.profiles))


@router.get("/view/disk")
def disk(views: Views) -> HTMLResponse:
    """Show the pins and their sizes, and the free space."""
    work = views.service.work_dir
    pins = [_pin_row(pin, jobs) for pin, jobs in views.service.pins.list_all()]
    space = shutil.disk_usage(work)
    return views.show("disk.html", "Disk", pins=pins, space=space, work=str(work))


@router.get("/view/static/{name}")
def static(name: str, v: str = "") -> Response:
    """Return a static file; browsers cache it only by the address with its current version."""
    if name not in STATIC:
        raise HTTPException(404, "there is no such file")
    body, kind = STATIC[name]
    cached = "max-age=31536000, immutable" if v == version_of(name) else "no-cache"
    return Response(body, media_type=kind, headers={**HEADERS, "Cache-Control": cached})


class Login(BaseModel):
    """The form's data."""

    token: str = Field(max_length=4096)


@router.get(LOG_IN)
async def log_in_form(connection: HTTPConnection) -> HTMLResponse:
    """Show the form."""
    rules: Rules = connection.app.state.rules
    return render("log_in.html", {"title": "Log in"}, root=rules.root)


@router.post(LOG_IN)
async def log_in(connection: HTTPConnection, login: Login) -> Response:
    """Set the cookie of a token's user, and delete those of other users."""
    rules: Rules = connection.app.state.rules
    if not rules.users:
        raise HTTPException(400, "this server needs no token")
    user = user_with(rules.users, login.token.strip())
    if user is None:
        address = connection.client.host if connection.client else "-"
        _log.warning("%s tried to log in with a wrong token", address)
        raise HTTPException(401, "wrong token")
    response = await log_out(connection)
    # The Origin of a browser's POST has the scheme of the browser's address, even with a proxy.
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
    """Delete the cookies."""
    rules: Rules = connection.app.state.rules
    response = Response(status_code=204, headers=HEADERS)
    for name in {cookie_name(user.token) for user in rules.users} & connection.cookies.keys():
        response.delete_cookie(name, f"{rules.root}/", httponly=True, samesite="strict")
    return response
