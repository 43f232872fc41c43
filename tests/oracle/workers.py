"""Processes that stay alive between scenarios, since importing torch takes seconds.

Life cycle: `WorkerPool.run` starts as many processes as the scenario has ranks, unless they run
already; sends each its task; each meets the others through a fresh file, runs the scenario and
reports; when all have, all leave the group. When a rank fails all processes are ended, because the
others may wait for it; the next run starts new ones. `close` ends them.
"""

import gc
import logging
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from functools import _lru_cache_wrapper, lru_cache
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from oracle.writers import Scenario

__all__ = ["RankError", "WorkerPool"]

_GROUP_TIMEOUT = timedelta(seconds=60)
_RUN_SECONDS = 120.0
_GRACE_SECONDS = 3.0
_DISTRIBUTED = "torch.distributed"


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
    process: SpawnProcess
    connection: "Connection[_Task | None, str | None]"  # generic for type checkers only

    def outcome(self) -> str | None:
        """Return None for success, else what went wrong."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join(_GRACE_SECONDS)
            return f"the process died with exit code {self.process.exitcode}"


class WorkerPool:
    """Up to `max_world` processes that run scenarios, worker i being rank i."""

    def __init__(self, max_world: int) -> None:
        self._max_world = max_world
        self._workers: list[_Worker] = []

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
        self._grow(world)
        with tempfile.TemporaryDirectory() as temporary:
            meeting_point = Path(temporary, "store")
            for rank in range(world):
                task = _Task(scenario, rank, world, directory, meeting_point)
                self._workers[rank].connection.send(task)
            problems = self._collect(world)
        if not problems:
            self._dissolve(world)
        if problems:
            self.close()
            raise RankError("\n".join(f"rank {rank}: {text}" for rank, text in problems.items()))

    def close(self) -> None:
        """End all processes; the pool can be used again."""
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
            worker.connection.close()
        self._workers.clear()

    def _dissolve(self, world: int) -> None:
        """Let all leave the group, now that all have finished.

        A rank that left earlier would break the connections of one that is still arriving.
        """
        for rank in range(world):
            self._workers[rank].connection.send(None)

    def _grow(self, world: int) -> None:
        """Start what is missing, all at once, and wait until torch is imported everywhere."""
        new = range(len(self._workers), world)
        self._workers.extend([_start() for _ in new])
        for rank in new:
            problem = self._workers[rank].outcome()
            if problem is not None:
                self.close()
                raise RankError(f"rank {rank}: {problem}")

    def _collect(self, world: int) -> dict[int, str]:
        """Wait for all ranks; once one has failed, only briefly for the others."""
        waiting = {self._workers[rank].connection: rank for rank in range(world)}
        problems: dict[int, str] = {}
        deadline = time.monotonic() + _RUN_SECONDS
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return problems | dict.fromkeys(waiting.values(), "did not finish")
            for connection in list(waiting):
                if connection not in ready:
                    continue
                rank = waiting.pop(connection)
                problem = self._workers[rank].outcome()
                if problem is not None:
                    problems[rank] = problem
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        return problems


def _start() -> _Worker:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # so that the death of the process ends the connection
    return _Worker(process, ours)


def _serve(connection: "Connection[str | None, _Task | None]") -> None:
    """Be a worker: say that it is up, then run tasks until the pool goes away."""
    warnings.simplefilter("ignore")  # torch warns about its own future, not about our tests
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    connection.send(None)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        if task is None:
            destroy_process_group()
            _forget_groups()
        else:
            connection.send(_attempt(task))


def _forget_groups() -> None:
    """Clear what torch remembers by mesh: a mesh of the next group equals one of this."""
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    loaded = sum(name.startswith(_DISTRIBUTED) for name in sys.modules)
    for cached in _caches(loaded):
        cached.cache_clear()


@lru_cache(maxsize=1)
def _caches(loaded: int) -> "list[_lru_cache_wrapper[object]]":
    """Return what torch remembers; looked for again (among a million objects) with every import."""
    del loaded
    found = [one for one in gc.get_objects() if isinstance(one, _lru_cache_wrapper)]
    return [one for one in found if str(getattr(one, "__module__", "")).startswith(_DISTRIBUTED)]


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
