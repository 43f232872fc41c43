"""Starting an evaluator under its supervisor, in two steps, and the environment that it gets.

The supervisor is started first and waits; once the server has recorded it, it gets its order.
A server that is killed in between leaves nothing behind: the supervisor then gets no order.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import unshard
from unshard.evaluate.process import Process
from unshard.evaluate.server.processes.supervise import STOPS, Order
from unshard.evaluate.server.processes.table import MARK, identify

_SUPERVISE = "unshard.evaluate.server.processes.supervise"

_LOG_NAME = "supervisor.txt"

# What launchers (torchrun, accelerate, Slurm, MPI) tell their own processes: an evaluator that
# started from one of them would wait for the others.
_LAUNCHER = re.compile(
    r"(?:RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE)"
    r"|(?:MASTER_|GROUP_|ROLE_|TORCHELASTIC_|SLURM_|PMIX_|PMI_|OMPI_|NCCL_ASYNC|ACCELERATE_).*"
)
# What this interpreter finds, another one should not.
_PYTHON = frozenset({"PYTHONHOME", "PYTHONPATH"})
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# A URL in UNSHARD_EVAL_SERVER may contain a password.
_STORES = re.compile(r"AWS_|GOOGLE_|AZURE_")  # what obstore reads
_SECRET = re.compile(
    r"TOKEN(?!IZER)|SECRET|PASSWORD|PASSWD|PASSPHRASE|PASS$|_PWD$|KEY|CREDENTIAL|AUTH$"
    r"|^SLURM_JWT$|^UNSHARD_EVAL_SERVER$",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Child:
    """A child that waits for its order on stdin, and leads a process group."""

    process: Process
    popen: "subprocess.Popen[bytes]"

    def give(self, order: Order) -> None:
        """Send a supervisor its order; if it has ended, that is noticed later."""
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
    """Start a supervisor that waits for its order.

    Raises:
        OSError: it cannot be started.
    """
    with _held_back():
        popen = start_module(_SUPERVISE, directory=directory, log=directory / _LOG_NAME)
    return Child(identify(popen.pid, gpus=gpus, directory=str(directory)), popen)


@contextmanager
def _held_back() -> Iterator[None]:
    """Hold back the signals that a supervisor takes note of, until it has its handlers."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def start_module(
    module: str,
    *,
    directory: Path,
    log: Path,
    reads_store: bool = False,
) -> "subprocess.Popen[bytes]":
    """Start a module of this package as the leader of a process group; stdin is a pipe.

    The directory of the attempt, in which it works, marks its processes. Only one that reads an
    object store gets the variables with this process's credentials for stores.
    """
    root = str(Path(unshard.__file__).parent.parent)
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    found = os.pathsep.join(dict.fromkeys([root, *filter(None, others)]))
    environment = {**os.environ, "PYTHONPATH": found, MARK: str(directory)}
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
        own: what its profile sets; wins over the server's, secrets included.
        program: what is started; only this interpreter gets the variables that name its modules.
        gpus: all that it can see, whatever its profile sets; none: it sees no GPU. None: a cluster
            chooses them, and its program gets the variables of the server's own place in it.
        directory: of the attempt.
    """
    found = scrub(os.environ)
    if gpus is None:
        found = {name: found[name] for name in found if name != _VISIBLE} | _slurms()
    if program != sys.executable:
        found = {name: value for name, value in found.items() if name not in _PYTHON}
    visible = {} if gpus is None else {_VISIBLE: ",".join(gpus)}
    return found | dict(own) | visible | {MARK: directory}


def _slurms() -> dict[str, str]:
    """Return what says of which job of Slurm the server is a part, as `srun` would be."""
    names = [name for name in os.environ if name.startswith("SLURM_") and not _SECRET.search(name)]
    return {name: os.environ[name] for name in names}
