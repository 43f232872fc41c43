"""Tells the operator's command or URL about each job that is completed or has failed: `on_result`.

What is to be told is in the database before the first try. A try that was interrupted is repeated,
by the next server if need be, so a receiver may be told twice; the `delivery` is then the same. No
job waits for it, or fails because of it.
"""

import hashlib
import hmac
import logging
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from unshard.evaluate.jobs import backoff
from unshard.evaluate.logs import one_line
from unshard.evaluate.server.config.on_result import OnResult
from unshard.evaluate.server.processes.launching import evaluator_environment
from unshard.evaluate.server.processes.table import identify, kill_group
from unshard.evaluate.server.store.deliveries import Delivery
from unshard.evaluate.server.store.store import Store
from unshard.evaluate.server.telling import short_id

HEADER = "X-Unshard-Delivery"
SIGNATURE = "X-Unshard-Signature-256"
SECRET = "UNSHARD_EVAL_ON_RESULT_SECRET"  # noqa: S105  (the name of a variable)
"""The environment variable with the key of signatures. Evaluators and commands do not get it."""

_POLL_S = 0.25
_STEP_S = 0.05
_GRACE_S = 3.0  # for a request that has begun; the next server repeats it
_MOST_TRIES = 10
_LONGEST_WAIT_S = 900.0
_SHOWN = 300  # characters of what a command prints
_log = logging.getLogger(__name__)


class _UndeliveredError(Exception):
    """A try failed."""


class _Stopped(Exception):  # noqa: N818  not an error: the next server goes on
    """The server ends."""


@contextmanager
def telling_results(store: Store, told: OnResult | None, work_dir: Path) -> Iterator[None]:
    """Deliver, in a thread, what waits and what is added, as long as this lasts."""
    if told is None:
        yield
        return
    stopping = threading.Event()
    body = _Teller(store, told, work_dir, stopping).run
    thread = threading.Thread(target=body, name="on_result", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join(_GRACE_S)


class _Teller:
    """Delivers one after the other."""

    def __init__(
        self, store: Store, told: OnResult, work_dir: Path, stopping: threading.Event
    ) -> None:
        self._store, self._told, self._work_dir = store, told, work_dir
        self._stopping = stopping

    def run(self) -> None:
        """Deliver until the server stops."""
        while not self._stopping.is_set():
            try:
                delivery = self._store.deliveries.next_due(time.time(), _LONGEST_WAIT_S)
                if delivery is not None:
                    self._deliver(delivery)
                    continue
            except _Stopped:
                return
            except Exception:  # noqa: BLE001  such as a database that does not answer
                _log.exception("on_result: trying again")
            self._stopping.wait(_POLL_S)

    def _deliver(self, delivery: Delivery) -> None:
        number, job = delivery.tries + 1, short_id(delivery.job_id)
        try:
            if self._told.url is not None:
                _post(self._told.url, delivery, self._told.timeout)
            else:
                self._run(delivery)
        except (_UndeliveredError, OSError, httpx.HTTPError, httpx.InvalidURL) as error:
            why = one_line(f"{type(error).__name__}: {error}".removeprefix("_UndeliveredError: "))
            if number >= _MOST_TRIES:
                _log.error("job %s: on_result failed %d times, given up: %s", job, number, why)
                self._store.deliveries.remove(delivery.id)
                return
            wait_s = backoff(number - 1, first_s=self._told.backoff, most_s=_LONGEST_WAIT_S)
            _log.warning("job %s: on_result failed, again in %g s: %s", job, wait_s, why)
            self._store.deliveries.postpone(delivery.id, time.time() + wait_s)
        else:
            self._store.deliveries.remove(delivery.id)
            _log.info("job %s: on_result: delivered", job)

    def _run(self, delivery: Delivery) -> None:
        """Run the command, in a process group of its own, with the body on stdin."""
        command = self._told.command
        place = str(self._work_dir)
        environment = evaluator_environment(
            self._told.environment, program=command[0], gpus=(), directory=place
        )
        with tempfile.TemporaryFile() as given:
            given.write(delivery.body.encode())
            given.seek(0)
            process = subprocess.Popen(  # noqa: S603
                command,
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=place,
                env=environment,
                start_new_session=True,
            )
        group = identify(process.pid, gpus=(), directory=place)
        ends = [b""]
        reader = threading.Thread(target=_keep_end, args=(process, ends), daemon=True)
        reader.start()
        try:
            self._wait(process)
        finally:
            kill_group(group, grace_s=0)  # what it started ends with it
            process.wait()
            reader.join(timeout=1)
        if process.returncode != 0:
            shown = ends[0].decode(errors="replace")[-_SHOWN:]
            raise _UndeliveredError(f"{command[0]}: exit code {process.returncode}: {shown}")

    def _wait(self, process: "subprocess.Popen[bytes]") -> None:
        end = time.monotonic() + self._told.timeout
        while process.poll() is None:
            if self._stopping.wait(_STEP_S):
                raise _Stopped
            if time.monotonic() > end:
                raise _UndeliveredError(f"took more than {self._told.timeout:g} s")


def _keep_end(process: "subprocess.Popen[bytes]", ends: list[bytes]) -> None:
    """Read what a command prints, and keep the end of it."""
    if process.stdout is None:
        raise RuntimeError("the command has no stdout")
    with process.stdout as pipe:
        while data := os.read(pipe.fileno(), 1 << 16):
            ends[0] = (ends[0] + data)[-4 * _SHOWN :]


def _post(url: str, delivery: Delivery, timeout_s: float) -> None:
    """Post the body, signed if there is a key; the answer must be 2xx, and is not read."""
    body = delivery.body.encode()
    headers = {"Content-Type": "application/json", HEADER: delivery.id}
    if key := os.environ.get(SECRET):
        headers[SIGNATURE] = f"sha256={hmac.new(key.encode(), body, hashlib.sha256).hexdigest()}"
    with (
        httpx.Client(timeout=timeout_s, follow_redirects=False) as client,
        client.stream("POST", url, content=body, headers=headers) as answer,
    ):
        if not answer.is_success:
            raise _UndeliveredError(f"the URL answered {answer.status_code}")
