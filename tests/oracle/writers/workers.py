"""The ranks of a scenario: processes that meet in a group of gloo and write a checkpoint.

Importing torch takes seconds, so they are forked from a process that has done so (multiprocessing's
fork server). They are not used twice: torch leaves the threads of old groups behind, which never
rest, and remembers meshes that equal those of the next group.

Life cycle: `WorkerPool.run` starts as many processes as the scenario has ranks; each meets the
others through a fresh file, runs the scenario and reports; when all have, or one has failed, all
are killed. None leaves earlier, which would break the connections of one that is still arriving.
"""

import logging
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch
from torch.distributed import init_process_group

from oracle.writers.scenarios import Scenario
from waiting import LIMIT_S

__all__ = ["RankError", "WorkerPool"]

_GROUP_TIMEOUT = timedelta(seconds=LIMIT_S)
_GRACE_SECONDS = 3.0
_IMPORTED_ONCE = [
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.debug",
    "torch.distributed.tensor.parallel",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.trainer",
    "accelerate",
]


class RankError(Exception):
    """A rank raised, died, or did not finish; the message holds every rank's traceback."""


@dataclass(frozen=True, slots=True)
class _Task:
    scenario: Scenario
    rank: int
    world: int
    directory: Path
    meeting_point: Path


@dataclass(frozen=True, slots=True)
class _Worker:
    process: ForkServerProcess
    connection: "Connection[None, str | None]"  # generic for type checkers only

    def outcome(self) -> str | None:
        """Return None for success, else what went wrong."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join(_GRACE_SECONDS)
            return f"the process died with exit code {self.process.exitcode}"

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class WorkerPool:
    """Runs scenarios in up to `max_world` processes."""

    def __init__(self, max_world: int) -> None:
        self._max_world = max_world

    def run(self, scenario: Scenario, world: int, directory: Path) -> None:
        """Run a scenario in `world` ranks, all of which have finished when this returns.

        Args:
            scenario: a function of a module, which the processes import by name.
            world: number of ranks, from 1 to `max_world`.
            directory: where to write; it must exist.

        Raises:
            RankError: at least one rank did not succeed.
            ValueError: more ranks than the pool may have.
        """
        if not 1 <= world <= self._max_world:
            raise ValueError(f"expected 1 to {self._max_world} ranks, got {world}")
        with tempfile.TemporaryDirectory() as temporary:
            meeting_point = Path(temporary, "store")
            workers = [
                _start(_Task(scenario, rank, world, directory, meeting_point))
                for rank in range(world)
            ]
            problems = _collect(workers)
            for worker in workers:
                worker.end()
        if problems:
            raise RankError("\n".join(f"rank {rank}: {text}" for rank, text in problems.items()))


def _start(task: _Task) -> _Worker:
    context = get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, task), daemon=True)
    process.start()
    theirs.close()  # so that the death of the process ends the connection
    return _Worker(process, ours)


def _collect(workers: list[_Worker]) -> dict[int, str]:
    """Wait for all ranks; once one has failed, only briefly for the others."""
    waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
    problems: dict[int, str] = {}
    deadline = time.monotonic() + LIMIT_S
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            return problems | dict.fromkeys(waiting.values(), "did not finish")
        for connection in list(waiting):
            if connection not in ready:
                continue
            rank = waiting.pop(connection)
            problem = workers[rank].outcome()
            if problem is not None:
                problems[rank] = problem
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    return problems


def _serve(connection: "Connection[str | None, None]", task: _Task) -> None:
    """Be a rank, and stay until all have finished."""
    warnings.simplefilter("ignore")  # torch warns about its own future, not about our tests
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    connection.send(_attempt(task))
    while True:
        time.sleep(LIMIT_S)


def _attempt(task: _Task) -> str | None:
    try:
        init_process_group(
            "gloo",
            init_method=f"file://{task.meeting_point}",
            rank=task.rank,
            world_size=task.world,
            timeout=_GROUP_TIMEOUT,
        )
        torch.manual_seed(0)
        task.scenario(task.rank, task.world, task.directory)
    except Exception:  # noqa: BLE001 - whatever it was, the pool raises it
        return traceback.format_exc()
    return None
