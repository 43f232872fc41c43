"""The process of an attempt whose evaluation runs in a worker: sends the job, exits as it does.

`python -m unshard.evaluate.server.warm.client ARGUMENT... WORKER` runs in the attempt's directory,
under its supervisor, and only waits: when it ends, the worker ends the evaluation. It prints the
worker's output during the job, which becomes the log of the attempt.
"""

import json
import os
import secrets
import signal
import socket
import sys
import time
from contextlib import chdir, suppress
from pathlib import Path

from unshard.evaluate.server.processes.bounded_log import last_lines, read_log
from unshard.evaluate.server.processes.supervise import LOG_NAME, read_exit
from unshard.evaluate.server.processes.table import is_alive
from unshard.evaluate.server.warm.worker import REPLACE, SOCKET_NAME, EngineWorker, read_worker

_PAUSE_S = 0.1
_FLUSHED_S = 10.0  # until a job's output is in the log
_READ_BYTES = 4096
_SHOWN_LINES = 20


class _Log:
    """The worker's log, from its current end up to a mark."""

    def __init__(self, path: Path, mark: str) -> None:
        self._path = path
        self._mark = mark
        self._offset = 0
        self._held = ""  # text that may be the beginning of the mark
        while self._next():
            pass

    def _next(self) -> str:
        text, self._offset = read_log(self._path, self._offset)
        return text

    def copy(self) -> bool:
        """Print the new output; return whether the mark has come."""
        before, mark, _ = (self._held + self._next()).partition(self._mark)
        cut = len(before) if mark else max(0, len(before) - len(self._mark))
        self._held = before[cut:]
        sys.stdout.write(before[:cut])
        sys.stdout.flush()
        return bool(mark)

    def copy_rest(self) -> None:
        """Print the new output without waiting for the mark."""
        self.copy()
        sys.stdout.write(self._held)
        sys.stdout.flush()


def main() -> int:
    """Send the job to a worker; return its exit code."""
    *arguments, directory = sys.argv[1:]
    mark = f"[end of job {secrets.token_hex(8)}]\n"
    job = {"directory": str(Path.cwd()), "arguments": arguments, "mark": mark}
    worker = read_worker(Path(directory))
    if worker is None:
        sys.stdout.write(f"{directory}: no worker is recorded there\n")
        return 1
    log = _Log(Path(directory) / LOG_NAME, mark)
    with socket.socket(socket.AF_UNIX) as connected:
        if not _connect(connected, worker):
            sys.stdout.write(f"{last_lines(Path(directory) / LOG_NAME, _SHOWN_LINES)}\n")
            return _end_as(worker)
        code = _wait(connected, json.dumps(job).encode() + b"\n", log)
    if code is None:
        log.copy_rest()
        return _end_as(worker)
    deadline = time.monotonic() + _FLUSHED_S
    while not log.copy():
        if time.monotonic() > deadline:  # the disk of the log may be full
            log.copy_rest()
            break
        time.sleep(_PAUSE_S)
    return code


def _connect(connected: socket.socket, worker: EngineWorker) -> bool:
    """Connect to a worker as soon as it listens; return False if it ends before."""
    with chdir(worker.process.directory):  # the path of a socket has 107 bytes at most
        while True:
            try:
                connected.connect(SOCKET_NAME)
            except (FileNotFoundError, ConnectionRefusedError):
                if not is_alive(worker.process):
                    return False
                time.sleep(_PAUSE_S)
            else:
                return True


def _wait(connected: socket.socket, job: bytes, log: _Log) -> int | None:
    """Return the exit code of a job from the worker's answer; None if the worker ends before."""
    answer = b""
    try:
        connected.sendall(job)
        connected.settimeout(_PAUSE_S)
        while not answer.endswith(b"\n"):
            log.copy()
            with suppress(TimeoutError):
                part = connected.recv(_READ_BYTES)
                if not part:
                    return None
                answer += part
    except ConnectionError:
        return None
    return int(json.loads(answer)["returncode"])


def _end_as(worker: EngineWorker) -> int:
    """Return the exit code of a worker that ended by itself; end as killed if it was killed."""
    directory = Path(worker.process.directory)
    while is_alive(worker.process) and read_exit(directory) is None:
        time.sleep(_PAUSE_S)
    exit_record = read_exit(directory)
    if exit_record is not None and exit_record.error:
        sys.stdout.write(f"{exit_record.error}\n")
        return 1
    if exit_record is not None and exit_record.reason == "exited" and exit_record.returncode > 0:
        return exit_record.returncode if exit_record.returncode != REPLACE else 1
    sys.stdout.write("the process that keeps the engine was killed\n")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    return 1


if __name__ == "__main__":
    sys.exit(main())
