"""The workers that keep engines: which there are, who uses them, and how they begin and end.

A worker has its GPUs as long as it lives. While a job runs on it, they are the job's; between jobs
the worker is idle, and ended when another job needs them, or after its time. A worker is known by
its GPUs, because no two can have the same.
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
from dataclasses import dataclass, replace
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
from unshard.evaluate.server.warm.record import EngineWorker, read_worker, write_worker

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _WorkerState:
    """A worker; `child` if this server started it; `idle_since` unless it is in use or ends."""

    worker: EngineWorker
    child: Child | None = None
    idle_since: float | None = None
    is_ending: bool = False


class Engines:
    """The workers of a server; any thread may use it.

    Args:
        directory: with a directory for each worker.
        grace_s: how long a worker may take to end when it is asked to.
        log_bytes: the bound of its log.
        is_stopped: whether the server stops: then a worker that cannot be ended is not waited for.
    """

    def __init__(
        self,
        directory: Path,
        *,
        grace_s: float,
        log_bytes: int,
        is_stopped: Callable[[], bool],
    ) -> None:
        self._directory = directory
        self._grace_s = grace_s
        self._log_bytes = log_bytes
        self._is_stopped = is_stopped
        self._kept: dict[Gpus, _WorkerState] = {}
        self._lock = threading.Lock()

    def find(self) -> dict[Gpus, EngineWorker]:
        """Return the workers that an earlier server left, which count as in use for now."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        for place in self._directory.iterdir():
            worker = read_worker(place)  # without a record it got no order
            if worker is None or (
                # Without its supervisor it may have processes that cannot be ended.
                not is_alive(worker.process) and kill_group(worker.process, grace_s=0)
            ):
                shutil.rmtree(place, ignore_errors=True)
            else:
                self._kept[worker.process.gpus] = _WorkerState(worker)
        return {gpus: one.worker for gpus, one in self._kept.items()}

    def take(self, profile: str, count: int) -> Gpus | None:
        """Return the GPUs of an idle worker of a profile, now in use; None if there is none."""
        with self._lock:
            for gpus, one in self._kept.items():
                is_one = one.worker.profile == profile and len(gpus_of(gpus) or ()) == count
                if is_one and one.idle_since is not None and is_alive(one.worker.process):
                    self._kept[gpus] = replace(one, idle_since=None)
                    return gpus
        return None

    def rest(self, gpus: Gpus) -> bool:
        """Have the worker with these GPUs be idle from now on; return whether there is one.

        One that has died meanwhile still has them: it is overdue.
        """
        with self._lock:
            one = self._kept.get(gpus)
            if one is not None:
                self._kept[gpus] = replace(one, idle_since=time.monotonic())
            return one is not None

    def list_lent(self) -> list[tuple[str | None, Gpus]]:
        """Return the GPUs of workers that are idle, with their profile, or are ending, with None.

        A new worker on these GPUs is not among them: it has a job.
        """
        with self._lock:
            return [
                (None if one.is_ending else one.worker.profile, gpus)
                for gpus, one in self._kept.items()
                if one.is_ending or one.idle_since is not None
            ]

    @property
    def are_ending(self) -> bool:
        """Whether workers are being ended whose GPUs are not free yet."""
        with self._lock:
            return any(one.is_ending for one in self._kept.values())

    def take_longest_idle(self, *, on_cpu: bool) -> Gpus | None:
        """Return the GPUs of a worker that must be ended because another job needs such ones."""
        with self._lock:
            kept = self._kept.items()
            alike = {gpus: one for gpus, one in kept if on_cpu is not bool(gpus_of(gpus))}
            idle = {gpus: one.idle_since for gpus, one in alike.items() if one.idle_since}
            if not idle:
                return None
            gpus = min(idle, key=lambda one: idle[one])
            self._kept[gpus] = replace(alike[gpus], idle_since=None, is_ending=True)
            return gpus

    def take_overdue(self, *, are_all: bool) -> list[Gpus]:
        """Return the GPUs of idle workers that must be ended: after their time, or dead, or all."""
        now = time.monotonic()
        with self._lock:
            found = [
                gpus
                for gpus, one in self._kept.items()
                if one.idle_since is not None
                and (
                    are_all
                    or now - one.idle_since > one.worker.idle_s
                    or not is_alive(one.worker.process)
                )
            ]
            for gpus in found:
                self._kept[gpus] = replace(self._kept[gpus], idle_since=None, is_ending=True)
        return found

    def ready(
        self, gpus: Gpus, name: str, engine: WarmEngine, key: str
    ) -> tuple[Path, bool] | None:
        """Return the directory of a worker for a job on these GPUs, and whether it is new.

        A worker with another engine is ended first. None: the server stops, and it cannot be ended.
        """
        one = self._kept.get(gpus)
        if one is not None and one.worker.key == key and is_alive(one.worker.process):
            return Path(one.worker.process.directory), False
        return (self._start(gpus, name, engine, key), True) if self.end(gpus) else None

    def _start(self, gpus: Gpus, name: str, engine: WarmEngine, key: str) -> Path:
        place = self._directory / secrets.token_hex(8)
        place.mkdir(mode=0o700, parents=True)
        child = start_supervisor(gpus=gpus, directory=place)
        try:
            worker = EngineWorker(child.process, name, key, engine.idle_s)
            write_worker(worker)
        except BaseException:
            child.reap()  # without an order: nothing runs that is not recorded
            raise
        command = list(engine.command)
        environment = evaluator_environment(
            engine.environment, program=command[0], gpus=gpus_of(gpus), directory=str(place)
        )
        child.give(
            Order(command, environment, str(place), math.inf, self._grace_s, self._log_bytes)
        )
        with self._lock:
            self._kept[gpus] = _WorkerState(worker, child)
        return place

    def end(self, gpus: Gpus, then: Callable[[], None] = lambda: None) -> bool:
        """End the worker with these GPUs, if there is one, however long it takes.

        Args:
            gpus: of the worker.
            then: called when it is gone, before others see that.

        Returns:
            Whether it is gone; one that cannot be ended is left to the next server.
        """
        one = self._kept.get(gpus)
        if one is None:
            then()
            return True
        process = one.worker.process
        while not kill_group(process, grace_s=self._grace_s):
            _log.error("process group %d cannot be ended; its slots stay taken", process.pid)
            if self._is_stopped():
                return False
        if one.child is not None:
            one.child.reap()
        shutil.rmtree(process.directory, ignore_errors=True)
        with self._lock:
            del self._kept[gpus]
            then()
        _log.info(
            "the engine of profile %s on %s has ended", one.worker.profile, describe_slots(gpus)
        )
        return True

    def leave(self) -> None:
        """Leave what still runs to the next server."""
        for one in self._kept.values():
            if one.child is not None:
                one.child.leave()


def engine_key(profile: Profile, model_args: Mapping[str, object], model: Path) -> str:
    """Return what an engine is known by: what it is started with, and config and tokenizer.

    Args:
        profile: with all that it says: a changed configuration means another engine.
        model_args: what the client chose.
        model: the directory of the job's model.
    """
    companions = json.loads((model / PLACE_NAME).read_bytes())["companions"]
    parts = [profile.model_dump(mode="json"), sorted(model_args.items()), companions]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
