"""The workers that keep engines: their use by jobs, their start and their end.

A worker has its GPUs as long as it lives. While a job runs on it, they are the job's; between jobs
the worker is idle, and ended when another job needs the GPUs, or after its `idle_s`. Workers are
identified by their GPUs, because no two can have the same.
"""

import hashlib
import json
import logging
import math
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from unshard.evaluate.server.evaluators.direct import PLACE_NAME
from unshard.evaluate.server.evaluators.work import Profile, WarmEngine
from unshard.evaluate.server.gpus import Gpus, describe_slots, gpus_of
from unshard.evaluate.server.processes.launching import (
    Child,
    evaluator_environment,
    start_supervisor,
)
from unshard.evaluate.server.processes.supervise import Order
from unshard.evaluate.server.processes.table import is_alive, kill_group
from unshard.evaluate.server.warm.worker import EngineWorker, read_worker, write_worker

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _WorkerState:
    """A worker; `child` if this server started it; `idle_since` unless it is used or ending."""

    worker: EngineWorker
    child: Child | None = None
    idle_since: float | None = None
    is_ending: bool = False


@dataclass(eq=False)
class Engines:
    """The workers of a server; any thread may use it.

    Attributes:
        directory: with a directory for each worker.
        grace_s: how long a worker may take to end when it is asked to.
        is_stopped: whether the server stops, and no longer waits for a worker that does not end.
    """

    directory: Path
    grace_s: float
    is_stopped: Callable[[], bool]
    _states: dict[Gpus, _WorkerState] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self) -> dict[Gpus, EngineWorker]:
        """Return the workers of an earlier server, which count as in use for now."""
        self.directory.mkdir(mode=0o700, exist_ok=True)
        for directory in self.directory.iterdir():
            worker = read_worker(directory)  # None: it was killed before it got its order
            if worker is None or (
                # Without its supervisor it may have processes that cannot be ended.
                not is_alive(worker.process) and kill_group(worker.process, grace_s=0)
            ):
                shutil.rmtree(directory, ignore_errors=True)
            else:
                self._states[worker.process.gpus] = _WorkerState(worker)
        return {gpus: state.worker for gpus, state in self._states.items()}

    def take(self, profile: str, count: int) -> Gpus | None:
        """Return the GPUs of an idle worker of a profile, now in use; None if there is none."""
        with self._lock:
            for gpus, state in self._states.items():
                fits = state.worker.profile == profile and len(gpus_of(gpus) or ()) == count
                if fits and state.idle_since is not None and is_alive(state.worker.process):
                    self._states[gpus] = replace(state, idle_since=None)
                    return gpus
        return None

    def rest(self, gpus: Gpus) -> bool:
        """Mark the worker on these GPUs idle; return whether there is one.

        A dead worker keeps its GPUs until `take_overdue` returns it.
        """
        with self._lock:
            state = self._states.get(gpus)
            if state is not None:
                self._states[gpus] = replace(state, idle_since=time.monotonic())
            return state is not None

    def list_lent(self) -> list[tuple[str | None, Gpus]]:
        """Return the GPUs of idle workers, with their profile, and of ending workers, with None."""
        with self._lock:
            return [
                (None if state.is_ending else state.worker.profile, gpus)
                for gpus, state in self._states.items()
                if state.is_ending or state.idle_since is not None
            ]

    @property
    def are_ending(self) -> bool:
        """Whether workers are being ended whose GPUs are not free yet."""
        with self._lock:
            return any(state.is_ending for state in self._states.values())

    def take_longest_idle(self, *, on_cpu: bool) -> Gpus | None:
        """Mark the worker that is idle longest as ending; return its GPUs, None if none is idle."""
        with self._lock:
            idle = {
                gpus: state.idle_since
                for gpus, state in self._states.items()
                if state.idle_since and on_cpu is not bool(gpus_of(gpus))
            }
            if not idle:
                return None
            gpus = min(idle, key=lambda gpus: idle[gpus])
            self._mark_ending(gpus)
            return gpus

    def take_overdue(self, *, are_all: bool) -> list[Gpus]:
        """Mark idle workers as ending, after their `idle_s`, dead, or all; return their GPUs."""
        now = time.monotonic()
        with self._lock:
            overdue = [
                gpus
                for gpus, state in self._states.items()
                if state.idle_since is not None
                and (
                    are_all
                    or now - state.idle_since > state.worker.idle_s
                    or not is_alive(state.worker.process)
                )
            ]
            for gpus in overdue:
                self._mark_ending(gpus)
        return overdue

    def _mark_ending(self, gpus: Gpus) -> None:
        self._states[gpus] = replace(self._states[gpus], idle_since=None, is_ending=True)

    def ready(
        self, gpus: Gpus, name: str, engine: WarmEngine, key: str
    ) -> tuple[Path, bool] | None:
        """Return the directory of a worker for a job on these GPUs, and whether it is new.

        A worker with another engine is ended first. None: the server stops, and it cannot be ended.
        """
        state = self._states.get(gpus)
        if state is not None and state.worker.key == key and is_alive(state.worker.process):
            return Path(state.worker.process.directory), False
        return (self._start(gpus, name, engine, key), True) if self.end(gpus) else None

    def _start(self, gpus: Gpus, name: str, engine: WarmEngine, key: str) -> Path:
        path = self.directory / secrets.token_hex(8)
        path.mkdir(mode=0o700, parents=True)
        child = start_supervisor(gpus=gpus, directory=path)
        try:
            worker = EngineWorker(child.process, name, key, engine.idle_s)
            write_worker(worker)
        except BaseException:
            child.reap()  # without an order, so that no process runs that is not recorded
            raise
        command, directory = list(engine.command), str(path)
        environment = evaluator_environment(
            engine.environment, program=command[0], gpus=gpus_of(gpus), directory=directory
        )
        child.give(Order(command, environment, directory, math.inf, self.grace_s))
        with self._lock:
            self._states[gpus] = _WorkerState(worker, child)
        return path

    def end(self, gpus: Gpus, then: Callable[[], None] = lambda: None) -> bool:
        """End the worker on these GPUs, if there is one, however long it takes.

        `then` is called as soon as it is gone, before another thread can see that.

        Returns:
            Whether it is gone; a worker that cannot be ended is left to the next server.
        """
        state = self._states.get(gpus)
        if state is None:
            then()
            return True
        process = state.worker.process
        while not kill_group(process, grace_s=self.grace_s):
            _log.error("process group %d cannot be ended; its slots stay taken", process.pid)
            if self.is_stopped():
                return False
        if state.child is not None:
            state.child.reap()
        shutil.rmtree(process.directory, ignore_errors=True)
        with self._lock:
            del self._states[gpus]
            then()
        _log.info(
            "the engine of profile %s on %s has ended", state.worker.profile, describe_slots(gpus)
        )
        return True

    def leave(self) -> None:
        """Leave the running workers to the next server."""
        for state in self._states.values():
            if state.child is not None:
                state.child.leave()


def engine_key(profile: Profile, model_args: Mapping[str, object], model: Path) -> str:
    """Return a digest of a profile, a request's arguments, and a model's config and tokenizer."""
    companions = json.loads((model / PLACE_NAME).read_bytes())["companions"]
    parts = [profile.model_dump(mode="json"), sorted(model_args.items()), companions]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
