"""`on_result`: the operator's command, run once for each job that is completed or has failed.

A thread follows the events of the database. No job waits for the command, or fails because of it.
"""

import json
import logging
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from unshard.evaluate.jobs import Job, JobEvent, Status
from unshard.evaluate.logs import one_line
from unshard.evaluate.server.config.keys import Environment, PlacedCommand, drop_nulls
from unshard.evaluate.server.processes.launching import evaluator_environment
from unshard.evaluate.server.processes.table import identify, kill_group
from unshard.evaluate.server.store.overview import last_event
from unshard.evaluate.server.store.store import Store
from unshard.evaluate.server.telling import short_id
from unshard.evaluate.values import expected, expects

_POLL_S = 0.25
_MARGIN_S = 5.0  # to end a command that takes too long
_SHOWN = 300  # bytes of the end of what a command prints
_REQUEST = ("run", "step", "weights", "profile", "tasks", "checkpoint")
_log = logging.getLogger(__name__)


class OnResult(BaseModel):
    """A command; a list is short for a mapping with the command alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: PlacedCommand = ()
    """Run without a shell, in the work directory, with JSON on its stdin."""
    environment: Environment = {}
    """Variables that the command gets in addition to the server's."""
    timeout: Annotated[float, Field(strict=True, gt=0, le=3600), expects("seconds, up to 3600")] = (
        30.0
    )
    """Seconds after which the command is ended."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: object) -> object:
        return drop_nulls({"command": value} if isinstance(value, list) else value)

    @model_validator(mode="after")
    def _has_command(self) -> Self:
        if not self.command:
            raise expected("a command: a list of arguments")
        return self


@contextmanager
def running_on_result(store: Store, told: OnResult | None, work_dir: Path) -> Iterator[None]:
    """Run the command for each job that ends meanwhile; then wait for the one that is running."""
    if told is None:
        yield
        return
    stopping, since = threading.Event(), last_event(store.connection)
    given = (store, told, work_dir, since, stopping)
    thread = threading.Thread(target=_follow, args=given, name="on_result", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join(told.timeout + _MARGIN_S)


def _follow(
    store: Store, told: OnResult, work_dir: Path, since: int, stopping: threading.Event
) -> None:
    is_last = False
    while not is_last:
        is_last = stopping.wait(_POLL_S)
        try:
            for event in store.events(since):
                since = event.number
                if event.status not in {Status.COMPLETED, Status.FAILED}:
                    continue
                if stopping.is_set():
                    _log.warning("job %s: on_result is not run: stopping", short_id(event.job_id))
                elif (job := store.get(event.job_id)) is not None:
                    _run(told, work_dir, job, event)
        except Exception:  # noqa: BLE001  such as a database that does not answer
            _log.exception("on_result")


def _run(told: OnResult, work_dir: Path, job: Job, event: JobEvent) -> None:
    """Run the command, in a process group of its own that ends with it; log how it ended."""
    program, place = told.command[0], str(work_dir)
    environment = evaluator_environment(told.environment, program=program, gpus=(), directory=place)
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as printed:
        stdin.write(json.dumps(_body(job, event)).encode())
        stdin.seek(0)
        try:
            process = subprocess.Popen(  # noqa: S603
                told.command,
                stdin=stdin,
                stdout=printed,
                stderr=subprocess.STDOUT,
                cwd=place,
                env=environment,
                start_new_session=True,
            )
            group = identify(process.pid, gpus=(), directory=place)
            try:
                ended = f"exit code {process.wait(told.timeout)}"
            finally:
                kill_group(group, grace_s=0)
                process.wait()
        except subprocess.TimeoutExpired:
            ended = f"took more than {told.timeout:g} s"
        except OSError as error:
            ended = str(error)
        printed.seek(max(0, printed.seek(0, os.SEEK_END) - _SHOWN))
        shown = printed.read().decode(errors="replace")
    if ended == "exit code 0":
        _log.info("job %s: on_result: %s", short_id(job.id), program)
    else:
        text = one_line(f"{program}: {ended}: {shown}")
        _log.error("job %s: on_result failed: %s", short_id(job.id), text)


def _body(job: Job, event: JobEvent) -> dict[str, object]:
    request = asdict(job.request)
    return {
        "delivery": str(event.number),
        "job": job.id,
        "status": event.status,
        **{name: request[name] for name in _REQUEST},
        "completed_at": job.completed_at,
        "error": job.error,
        "metrics": dict(job.metrics),
        "stderr": dict(job.stderr),
    }
