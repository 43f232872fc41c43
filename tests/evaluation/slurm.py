"""A stand-in for Slurm: `srun` as its manual describes it, and a node for its tasks.

The node is a thread of the test, so a task is a process that the server can neither find nor
signal, as on another machine. `srun` waits until the test allocates a place, forwards signals to
the task, prints its output, returns its exit code (128 + N after signal N), and says so on stderr.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from unshard.evaluate.server.processes.table import MARK

GRES = "--gres=gpu:"

SRUN = r"""
import json, os, select, signal, socket, sys
options = []
arguments = sys.argv[1:]
while arguments[0].startswith("-"):
    options.append(arguments.pop(0))
wake, woken = os.pipe()
os.set_blocking(woken, False)
signal.set_wakeup_fd(woken)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda *_: None)
node = socket.socket(socket.AF_UNIX)
node.connect(@ADDRESS@)
node.sendall(json.dumps({
    "options": options, "command": arguments, "cwd": os.getcwd(), "environment": dict(os.environ),
}).encode() + b"\n")
def say(text):
    print("srun: " + text, file=sys.stderr, flush=True)
has_place, rest = False, b""
while True:
    ready = select.select([node, wake], [], [])[0]
    for number in os.read(wake, 100) if wake in ready else b"":
        if not has_place:
            say("Job allocation 7 has been revoked.")
            sys.exit(1)
        say("forcing job termination")
        say("Job step aborted: Waiting up to 32 seconds for job step to finish.")
        node.sendall(json.dumps({"signal": number}).encode() + b"\n")
    if node not in ready:
        continue
    data = node.recv(65536)
    if not data:
        say("error: Node failure on node01")
        sys.exit(1)
    *lines, rest = (rest + data).split(b"\n")
    for line in lines:
        message = json.loads(line)
        if "text" in message:
            sys.stdout.write(message["text"])
            sys.stdout.flush()
        if message.get("state") == "queued":
            say("job 7 queued and waiting for resources")
        if message.get("state") == "allocated":
            has_place = True
            say("job 7 has been allocated resources")
        if "code" in message:
            code = message["code"]
            if code < 0:
                say("error: node01: task 0: " + signal.strsignal(-code))
            elif code:
                say(f"error: node01: task 0: Exited with exit code {code}")
            sys.exit(code if code >= 0 else 128 - code)
"""


@dataclass
class Task:
    """What one `srun` asked for, and what became of it."""

    options: list[str]
    command: list[str]
    environment: dict[str, str]
    allocated: threading.Event = field(default_factory=threading.Event)
    process: "subprocess.Popen[str] | None" = None
    signals: list[int] = field(default_factory=list)
    is_over: bool = False
    code: int | None = None


@dataclass
class Slurm:
    """The cluster: its program, and what was asked of it, in order.

    Attributes:
        srun: the program.
        tasks: what it was asked for.
        is_free: whether a task gets its place at once.
        code: what srun returns in the place of the task's code, if it is set.
    """

    srun: Path
    tasks: list[Task] = field(default_factory=list)
    is_free: bool = True
    code: int | None = None

    def allocate(self, number: int) -> None:
        self.tasks[number].allocated.set()


@contextmanager
def slurm(directory: Path) -> Iterator[Slurm]:
    """Run a cluster as long as this lasts."""
    directory.mkdir()
    address = directory / "node"
    srun = directory / "srun"
    source = SRUN.replace("@ADDRESS@", repr(str(address)))
    srun.write_text(f"#!{sys.executable} -IS\n{source}")
    srun.chmod(0o755)
    made = Slurm(srun)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(address))
        listening.listen()
        threading.Thread(target=_accept, args=(made, listening), daemon=True).start()
        try:
            yield made
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            for task in made.tasks:
                task.allocated.set()
                if task.process is not None:
                    with suppress(ProcessLookupError):
                        os.killpg(task.process.pid, signal.SIGKILL)


def _accept(cluster: Slurm, listening: socket.socket) -> None:
    with suppress(OSError):
        while True:
            client, _ = listening.accept()
            threading.Thread(target=_serve, args=(cluster, client), daemon=True).start()


def _serve(cluster: Slurm, client: socket.socket) -> None:
    def send(**message: object) -> None:
        with suppress(OSError):
            client.sendall(json.dumps(message).encode() + b"\n")

    with client, client.makefile("r") as lines:
        asked = json.loads(lines.readline())
        environment = {name: of for name, of in asked["environment"].items() if name != MARK}
        task = Task(asked["options"], asked["command"], environment)
        cluster.tasks.append(task)
        threading.Thread(target=_follow, args=(task, lines), daemon=True).start()
        if not cluster.is_free:
            send(state="queued")
            while not task.allocated.wait(0.02):
                if task.is_over:
                    return
        send(state="allocated")
        _run(task, asked["cwd"], send)
        send(code=cluster.code if cluster.code is not None else task.code)


def _run(task: Task, cwd: str, send: Callable[..., None]) -> None:
    gpus = next((int(one[len(GRES) :]) for one in task.options if one.startswith(GRES)), 0)
    own = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus))), "SLURM_PROCID": "0"}
    task.process = subprocess.Popen(
        task.command,
        cwd=cwd,
        env=task.environment | own,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with task.process:
        assert task.process.stdout is not None
        for line in task.process.stdout:
            send(text=line)
    task.code = task.process.returncode


def _follow(task: Task, lines: Iterable[str]) -> None:
    """Pass signals on; the end of srun is that of its task."""
    with suppress(OSError, ValueError):
        for line in lines:
            number = json.loads(line)["signal"]
            task.signals.append(number)
            if task.process is not None:
                os.killpg(task.process.pid, number)
    task.is_over = True
