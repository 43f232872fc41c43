"""Dependencies, errors and large answers, for both protocols.

Large answers are serialised where they are made, so that few exist at a time. FastAPI would
serialise them later, in another thread; until then each request would keep objects that take
several times the memory of their JSON.
"""

import json
from collections.abc import Iterator
from typing import Annotated

from fastapi import Depends, HTTPException, Response
from pydantic import BaseModel, Field
from starlette.requests import HTTPConnection

from unshard.errors import UnshardError
from unshard.evaluate.jobs import Job
from unshard.evaluate.server.admission import MOST_TASKS
from unshard.evaluate.server.http.users import User
from unshard.evaluate.server.joblog import log_event
from unshard.evaluate.server.service import Service
from unshard.fronts import Command

_PAGE_BYTES = 1 << 20
_JSON = "application/json"

BoundedText = Annotated[str, Field(max_length=4096)]
Tasks = Annotated[list[BoundedText], Field(min_length=1, max_length=MOST_TASKS)]


async def _service_of(connection: HTTPConnection) -> Service:  # async, else it takes a thread
    service: Service = connection.app.state.service
    return service


Served = Annotated[Service, Depends(_service_of)]
"""The application's service."""


async def _user_of(connection: HTTPConnection) -> User:
    user: User = connection.scope["user"]
    return user


Asking = Annotated[User, Depends(_user_of)]
"""The user who sent the request."""


def check_may_change(job: Job, user: User, change: str) -> None:
    """Log a user's change of a job.

    Raises:
        HTTPException: 403: it is not the user's job.
    """
    if not user.may_change(job.request.user):
        owner = f"belongs to {job.request.user}" if job.request.user else "has no known owner"
        raise HTTPException(403, f"job {job.id} {owner}: only operators change others' jobs")
    if user.name:
        log_event(job, f"{change} by {user.name}")


def find_job(service: Service, job_id: str) -> Job:
    """Return a job, by its id or the beginning of it.

    Raises:
        HTTPException: 404: it does not exist.
        UsageError: several ids begin like this.
    """
    job = service.job(job_id)
    if job is None:
        raise HTTPException(404, f"job {job_id} does not exist" if job_id else "no job is named")
    return job


class ErrorFields(BaseModel):
    """An error's fields; `code` is the exit code of our errors, or else the HTTP status."""

    type: str
    code: int
    message: str
    expected: str = ""
    found: str = ""
    hint: str = ""

    @classmethod
    def of(cls, error: UnshardError) -> "ErrorFields":
        """Return the fields of an error, with options in the form of the command line."""
        error.front = Command()
        return cls(
            type=type(error).__name__,
            code=error.exit_code,
            message=error.subject,
            expected=error.expected,
            found=error.found,
            hint=error.hint,
        )


class ErrorBody(BaseModel):
    """An error."""

    error: ErrorFields


def answer(view: BaseModel) -> Response:
    """Return a view as an answer."""
    return Response(view.model_dump_json(), media_type=_JSON)


def answer_page(name: str, entries: Iterator[tuple[str | int, str]], limit: int) -> Response:
    """Return the first page of a list: `{name: [...], "next": CURSOR or null}`.

    `entries` have a cursor, from which a client can continue, and the entry's JSON. A page ends
    after `limit` entries or 1 MiB.
    """
    page, size, last, after = list[str](), 0, None, None
    for cursor, entry in entries:
        if len(page) == limit or size > _PAGE_BYTES:
            after = last
            break
        page.append(entry)
        size, last = size + len(entry), cursor
    listed = ",".join(page)
    return Response(f'{{"{name}":[{listed}],"next":{json.dumps(after)}}}', media_type=_JSON)
