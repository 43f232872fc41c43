"""The process between the server and an evaluator, which outlives the server.

`python -m unshard.evaluate.server.processes.supervise` reads an `Order`, one line, from stdin.
Without a complete order it exits and writes no log, so no process runs that the server has not
recorded, and the next server can tell. It leads the process group, bounds the log, enforces the
timeout, ends the processes that the evaluator leaves behind, ends all when its directory is
removed, and writes `exit.json` in one step. On Linux it also inherits the orphans of its
descendants, so that they can be found, and the evaluator dies with it. Imports nothing heavy.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from unshard.evaluate.server.processes.bounded_log import BoundedLog
from unshard.evaluate.server.processes.table import identify, list_members, send
from unshard.write.dirfd import write_whole

EXIT_NAME = "exit.json"
LOG_NAME = "log.txt"

_POLL_S = 0.05
_MOMENT_S = 1.0
_AGAIN_S = 1.0
_LOOK_S = 0.5
_GONE_S = 60.0
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that end an evaluator in an orderly way; blocked until a supervisor has handlers."""
_READ_BYTES = 1 << 20
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_SET_PIPE_SIZE = 1031  # fcntl(2)


@dataclass(frozen=True, slots=True)
class Order:
    """The command to run, and its limits.

    Attributes:
        command: the evaluator's arguments, its interpreter first.
        environment: its whole environment.
        directory: of the attempt; its working directory, the log and `exit.json`.
        timeout_s: how long it may run, from its start or from when `begins` appears.
        grace_s: how long it may take to end when it is asked to.
        begins: the file in the directory that the evaluator makes when a cluster starts it; "":
            no cluster starts it.
    """

    command: list[str]
    environment: dict[str, str]
    directory: str
    timeout_s: float
    grace_s: float
    begins: str = ""


@dataclass(frozen=True, slots=True)
class Exit:
    """How an evaluator ended.

    Attributes:
        reason: "exited", "timeout", "stopped" (a signal) or "not started".
        returncode: as of `subprocess`: negative for a signal.
        error: why it could not be started; "" if it was.
        seconds: how long it ran.
        errno: the number of `error`; 0 if it was started.
    """

    reason: str
    returncode: int
    error: str
    seconds: float
    errno: int = 0


def read_exit(directory: Path) -> Exit | None:
    """Return how the evaluator of an attempt ended; None if that was not recorded."""
    try:
        return Exit(**json.loads((directory / EXIT_NAME).read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def has_begun(directory: Path) -> bool:
    """Return whether the supervisor of an attempt got its order."""
    return (directory / LOG_NAME).exists()


def main() -> int:
    """Run the order on stdin."""
    stops: list[int] = []
    for number in STOPS:
        signal.signal(number, lambda number, _frame: stops.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    try:
        order = Order(**json.loads(sys.stdin.buffer.readline()))
    except (ValueError, TypeError):  # the server is gone
        return 1
    _control(_SET_CHILD_SUBREAPER, 1)
    directory = _Directory(Path(order.directory))

    def is_stopped() -> bool:
        return bool(stops) or directory.is_gone()

    with BoundedLog(Path(order.directory) / LOG_NAME) as log:
        done = supervise(order, log, is_stopped)
    write_exit(Path(order.directory), done, is_stopped)
    return 0


def supervise(order: Order, log: BoundedLog, is_stopped: Callable[[], bool]) -> Exit:
    """Run an evaluator to its end, and end the processes that it leaves behind."""
    if is_stopped():
        return Exit("stopped", -signal.SIGTERM, "", 0.0)
    clock = _Clock(Path(order.directory, order.begins) if order.begins else None)
    try:
        child = _start(order)
    except OSError as error:
        with suppress(OSError):  # a full disk
            log.write(f"{error}\n".encode())
        return Exit("not started", 127, str(error), 0.0, error.errno or 0)
    watched = _Watched(child, log)
    reason = "exited"
    while not watched.is_over():
        if is_stopped() or clock.seconds() > order.timeout_s:
            reason = "stopped" if is_stopped() else "timeout"
            break
        watched.advance(_POLL_S)
    if reason == "exited" and was_stopped(watched.returncode, is_stopped):
        reason = "stopped"
    seconds = clock.seconds()
    _end_all(order, watched)
    return Exit(reason, watched.returncode, "", seconds)


class _Directory:
    """The directory of an attempt; when it is removed, the evaluator's results would be lost."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._looked = time.monotonic()
        self._is_gone = False

    def is_gone(self) -> bool:
        """Return whether it is missing for longer than a network file system may be away."""
        now = time.monotonic()
        if now - self._looked > _LOOK_S:
            self._looked = now
            try:
                self._path.stat()
            except (FileNotFoundError, NotADirectoryError):
                self._is_gone = now - self._seen > _GONE_S
            except OSError:  # the disk does not answer, or permissions changed
                self._seen = now
            else:
                self._seen = now
        return self._is_gone


class _Clock:
    """Measures how long an evaluator has run, without its time in a cluster's queue."""

    def __init__(self, begins: Path | None) -> None:
        self._begins = begins
        self._began = self._looked = time.monotonic()

    def seconds(self) -> float:
        """Return the time since the start, or since `begins` appeared where a cluster starts it."""
        now = time.monotonic()
        if self._begins is not None and now - self._looked > _LOOK_S:
            self._looked = now
            if self._begins.exists():
                self._began, self._begins = now, None
        return 0.0 if self._begins is not None else now - self._began


def is_ended_by(signals: Collection[signal.Signals], returncode: int) -> bool:
    """Return whether one of these signals ended a process, or the child of a shell."""
    return returncode in {code for number in signals for code in (-number, 128 + number)}


def was_stopped(returncode: int, is_stopped: Callable[[], bool]) -> bool:
    """Return whether the signal that ended the evaluator is also sent to us, perhaps later."""
    if is_ended_by(STOPS, returncode):
        deadline = time.monotonic() + _MOMENT_S
        while not is_stopped() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    return returncode != 0 and is_stopped()


class _Watched:
    """A child whose output is copied to the log, and the orphans that are reaped with it."""

    def __init__(self, child: "subprocess.Popen[bytes]", log: BoundedLog) -> None:
        if child.stdout is None:
            raise RuntimeError("the output of the child is not piped")
        self._child = child
        self._output = child.stdout
        self._log = log
        self._is_open = True

    @property
    def returncode(self) -> int:
        return -signal.SIGKILL if self._child.returncode is None else self._child.returncode

    def is_over(self) -> bool:
        """Reap all ended processes; return whether the child is one of them."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._child.pid:
                    self._child.returncode = os.waitstatus_to_exitcode(ended[1])
        return self._child.returncode is not None

    def advance(self, seconds: float) -> bool:
        """Copy output to the log, or wait for some; return whether there was any."""
        if not self._is_open:
            time.sleep(seconds)
        elif select.select([self._output], [], [], seconds)[0]:
            data = os.read(self._output.fileno(), _READ_BYTES)
            self._is_open = bool(data)
            with suppress(OSError):  # a full disk must not end the evaluation
                self._log.write(data)
            return self._is_open
        return False


def _start(order: Order) -> "subprocess.Popen[bytes]":
    child = subprocess.Popen(  # noqa: S603
        order.command,
        env=order.environment,
        cwd=order.directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        preexec_fn=partial(_control, _SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509  there are no other threads
    )
    if sys.platform == "linux" and child.stdout is not None:
        import fcntl

        with suppress(OSError):
            fcntl.fcntl(child.stdout.fileno(), _SET_PIPE_SIZE, _READ_BYTES)
    return child


def _control(option: int, value: int) -> None:
    """Call prctl(2), on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_all(order: Order, watched: _Watched) -> None:
    """End every process of the attempt except this one, and log their last output."""
    own = identify(os.getpid(), gpus=(), directory=order.directory)
    send(list_members(own), signal.SIGTERM)
    deadline = time.monotonic() + order.grace_s
    while members := list_members(own):
        if time.monotonic() > deadline:
            send(members, signal.SIGKILL)
        watched.advance(_POLL_S)
        watched.is_over()
    watched.is_over()
    last = time.monotonic() + order.grace_s
    while time.monotonic() < last and watched.advance(0):
        pass


def write_exit(directory: Path, done: Exit, is_stopped: Callable[[], bool]) -> None:
    """Write how an evaluator ended; on a full disk, retry until it works or a signal comes."""
    while True:
        try:
            write_whole(directory / EXIT_NAME, json.dumps(asdict(done)).encode())
        except OSError:
            if is_stopped():
                return
            time.sleep(_AGAIN_S)
        else:
            return


if __name__ == "__main__":
    sys.exit(main())
