"""Starts an evaluator under its supervisor, in two steps, and makes its environment.

The supervisor is started first and waits; once the server has recorded it, it gets its order.
If the server is killed in between, the supervisor gets no order, and exits.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import unshard
from unshard.evaluate.process import Process
from unshard.evaluate.server.processes.supervise import STOPS, Order
from unshard.evaluate.server.processes.table import MARK, identify

_SUPERVISE = "unshard.evaluate.server.processes.supervise"
_LOG_NAME = "supervisor.txt"

# Variables of launchers (torchrun, accelerate, Slurm, MPI): an evaluator that inherited them would
# wait for other ranks.
_LAUNCHER = re.compile(
    r"(?:RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE)"
    r"|(?:MASTER_|GROUP_|ROLE_|TORCHELASTIC_|SLURM_|PMIX_|PMI_|OMPI_|NCCL_ASYNC|ACCELERATE_).*"
)
# Another interpreter must not import the modules of this one.
_PYTHON = frozenset({"PYTHONHOME", "PYTHONPATH"})
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# A URL in UNSHARD_EVAL_SERVER may contain a password.
_STORES = re.compile(r"AWS_|GOOGLE_|AZURE_")  # obstore reads these
_SECRET = re.compile(
    r"TOKEN(?!IZER)|SECRET|PASSWORD|PASSWD|PASSPHRASE|PASS$|_PWD$|KEY|CREDENTIAL|AUTH$"
    r"|^SLURM_JWT$|^UNSHARD_EVAL_SERVER$",
    re.IGNORECASE,
)


class Child(NamedTuple):
    """A supervisor that waits for its order on stdin, and leads a process group."""

    process: Process
    popen: "subprocess.Popen[bytes]"

    def give(self, order: Order) -> None:
        """Send the order; if the supervisor has ended, that is noticed later."""
        if self.popen.stdin is None:
            raise RuntimeError("the supervisor has no stdin")
        with suppress(BrokenPipeError), self.popen.stdin as pipe:
            pipe.write(json.dumps(asdict(order)).encode())

    def reap(self) -> None:
        """Wait until it has ended; without an order it ends at once."""
        if self.popen.stdin is not None:
            self.popen.stdin.close()
        self.popen.wait()

    def leave(self) -> None:
        """Let it continue without this server."""
        self.popen.returncode = 0  # otherwise `Popen.__del__` warns that it still runs


def start_supervisor(*, gpus: tuple[str, ...], directory: Path) -> Child:
    """Start a supervisor that waits for its order; raise OSError if that is not possible."""
    # The child inherits the blocked signals, and unblocks them when it has its handlers.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        popen = start_module(_SUPERVISE, directory=directory, log=directory / _LOG_NAME)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return Child(identify(popen.pid, gpus=gpus, directory=str(directory)), popen)


def start_module(
    module: str, *, directory: Path, log: Path, reads_store: bool = False
) -> "subprocess.Popen[bytes]":
    """Start a module of this package as the leader of a process group; stdin is a pipe.

    The directory of the attempt, in which it works, marks its processes. Only a module that reads
    an object store gets the variables with this process's credentials for stores.
    """
    root = str(Path(unshard.__file__).parent.parent)
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = os.pathsep.join(dict.fromkeys([root, *filter(None, others)]))
    environment = {**os.environ, "PYTHONPATH": paths, MARK: str(directory)}
    stores = {name: environment[name] for name in environment if _STORES.match(name)}
    with log.open("wb") as output:
        return subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            cwd=directory,
            env=scrub(environment) | (stores if reads_store else {}),
            start_new_session=True,
        )


def scrub(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without launchers' variables and secrets."""
    return {
        name: value
        for name, value in environment.items()
        if not _LAUNCHER.fullmatch(name) and not _SECRET.search(name)
    }


def evaluator_environment(
    own: Mapping[str, str], *, program: str, gpus: tuple[str, ...] | None, directory: str
) -> dict[str, str]:
    """Return the environment of an evaluator.

    Args:
        own: the profile's variables; they win over the server's, secrets included.
        program: its program; only this interpreter gets the variables that name its modules.
        gpus: the GPUs that it can see, whatever its profile sets; (): none. None: a cluster
            chooses them, and the program gets the variables of the server's job of Slurm, as `srun`
            needs them.
        directory: the attempt's.
    """
    variables = scrub(os.environ)
    if gpus is None:
        variables.pop(_VISIBLE, None)
        for name, value in os.environ.items():
            if name.startswith("SLURM_") and not _SECRET.search(name):
                variables[name] = value
    if program != sys.executable:
        variables = {name: value for name, value in variables.items() if name not in _PYTHON}
    visible = {} if gpus is None else {_VISIBLE: ",".join(gpus)}
    return variables | dict(own) | visible | {MARK: directory}


def run_python(
    command: list[str], environment: Mapping[str, str], directory: str, timeout_s: float
) -> "subprocess.CompletedProcess[bytes]":
    """Run a profile's interpreter with its variables and without GPUs; capture its output."""
    return subprocess.run(  # noqa: S603  (the server's configuration names the interpreter)
        command,
        cwd=directory,
        env=evaluator_environment(environment, program=command[0], gpus=(), directory=directory),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=timeout_s,
        check=False,
    )
