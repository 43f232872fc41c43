"""Runs `on_result`, the operator's command, once for each job that is completed or has failed.

A thread follows the events of the database. No job waits for the command, or fails because of it.
"""

import json
import logging
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO

from unshard.evaluate.jobs import Job, JobEvent, Status
from unshard.evaluate.logs import one_line
from unshard.evaluate.server.config.keys import OnResult
from unshard.evaluate.server.joblog import short_id
from unshard.evaluate.server.processes.launching import evaluator_environment
from unshard.evaluate.server.processes.table import identify, kill_group
from unshard.evaluate.server.store.overview import last_event
from unshard.evaluate.server.store.store import Store

_POLL_S = 0.25
_MARGIN_S = 5.0  # to end a command that takes too long
_SHOWN = 300  # bytes of the end of a command's output
_REQUEST = ("run", "step", "weights", "profile", "tasks", "checkpoint")
_ENDS = {Status.COMPLETED, Status.FAILED}
_FINE = "exit code 0"
_log = logging.getLogger(__name__)


@contextmanager
def running_on_result(store: Store, hook: OnResult | None, work_dir: Path) -> Iterator[None]:
    """Run the command for each job that ends in a `with` block; wait `timeout` for the last."""
    if hook is None:
        yield
        return
    runner = _ResultHook(store, hook, work_dir)
    thread = threading.Thread(target=runner.run, name="on_result", daemon=True)
    thread.start()
    try:
        yield
    finally:
        runner.deadline = time.monotonic() + hook.timeout
        runner.stopping.set()
        thread.join(hook.timeout + _MARGIN_S)


class _ResultHook:
    """Runs the command for the ends of jobs, one after the other, until a deadline."""

    def __init__(self, store: Store, hook: OnResult, work_dir: Path) -> None:
        self._store, self._hook, self._work_dir = store, hook, work_dir
        self._since = last_event(store.connection)
        self.deadline = float("inf")
        self.stopping = threading.Event()

    def run(self) -> None:
        """Follow the events until the server stops, and then to their end."""
        is_last = False
        while not is_last:
            is_last = self.stopping.wait(_POLL_S)
            try:
                for event in self._store.events(self._since):
                    self._since = event.number
                    job = self._store.get(event.job_id) if event.status in _ENDS else None
                    # Later events of this status are of results that were hidden or shown.
                    if job is not None and event.at == job.completed_at:
                        self._run_for(job, event)
            except Exception:  # noqa: BLE001  such as a database that does not answer
                _log.exception("on_result")

    def _run_for(self, job: Job, event: JobEvent) -> None:
        limit_s = min(self._hook.timeout, self.deadline - time.monotonic())
        if limit_s <= 0:
            _log.error("job %s: on_result is not run: the server stops", short_id(job.id))
            return
        program = self._hook.command[0]
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout:
            stdin.write(json.dumps(_body(job, event)).encode())
            stdin.seek(0)
            ended = self._run(stdin, stdout, limit_s)
            stdout.seek(max(0, stdout.seek(0, os.SEEK_END) - _SHOWN))
            output = stdout.read().decode(errors="replace")
        if ended == _FINE:
            _log.info("job %s: on_result: %s", short_id(job.id), program)
        else:
            text = one_line(f"{program}: {ended}: {output}")
            _log.error("job %s: on_result failed: %s", short_id(job.id), text)

    def _run(self, stdin: IO[bytes], stdout: IO[bytes], limit_s: float) -> str:
        """Run the command in a process group, which ends with it; return how it ended."""
        command, own, directory = self._hook.command, self._hook.environment, str(self._work_dir)
        environment = evaluator_environment(own, program=command[0], gpus=(), directory=directory)
        try:
            process = subprocess.Popen(  # noqa: S603
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=environment,
                start_new_session=True,
            )
            group = identify(process.pid, gpus=(), directory=directory)
            try:
                return f"exit code {process.wait(limit_s)}"
            finally:
                kill_group(group, grace_s=0)
                process.wait()
        except subprocess.TimeoutExpired:
            return f"took more than {limit_s:.3g} s"
        except OSError as error:
            return str(error)


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
