"""What Prometheus reads at /metrics, by its conventions for names and units.

Labels have few values: statuses, outcomes, phases and routes; never names that clients choose.
Gauges are read from the database and the server at each request. Counters and histograms begin at
zero when the server starts; an attempt is counted by the first request after its end.
"""

import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unshard import __version__
from unshard.evaluate.jobs import Phase, Status
from unshard.evaluate.server.service import Service
from unshard.evaluate.server.store.overview import count_phases, list_attempts

_PREFIX = "unshard_eval"
_WAITS_S = (1, 10, 60, 300, 900, 3600, 3 * 3600, 12 * 3600, 48 * 3600)
_RUNS_S = (10, 60, 300, 900, 1800, 3600, 2 * 3600, 4 * 3600, 8 * 3600, 24 * 3600)
_PINS_EVERY_S = 60.0  # looking for them lists directories of runs
_LATE_S = 60.0  # for the clock to be set back, or an attempt to be recorded late


class Meter:
    """The metrics of a server, in a registry of its own; any thread may use it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = threading.Lock()
        self._began = self._newest = time.time()
        self._counted: dict[tuple[str, int, float], float] = {}
        self._pins: tuple[int, int] = (0, 0)
        self._pins_at = float("-inf")
        self._registry = registry = CollectorRegistry()
        counter = partial(Counter, namespace=_PREFIX, registry=registry)
        histogram = partial(Histogram, namespace=_PREFIX, registry=registry)
        self._requests = counter(
            "http_requests",
            "Requests that were answered, by the route's template; `other`: none, or refused.",
            ["route", "status"],
        )
        self._attempts = counter("attempts", "Attempts that have ended, by how.", ["outcome"])
        self._waits = histogram(
            "queue_wait_seconds",
            "From a job's place in the queue to its first attempt; of attempts that have ended.",
            buckets=_WAITS_S,
        )
        self._runs = histogram(
            "attempt_duration_seconds",
            "From the begin of an attempt to its end, with its merge.",
            buckets=_RUNS_S,
        )
        registry.register(self)

    def count_request(self, route: str, status: int) -> None:
        """Count a request that was answered."""
        self._requests.labels(route, str(status)).inc()

    def write(self) -> bytes:
        """Return all metrics as Prometheus' text.

        Raises:
            sqlite3.OperationalError: the database does not answer.
        """
        with self._lock:
            self._count_attempts(self._service.store.connection)
            return bytes(generate_latest(self._registry))

    def describe(self) -> Iterator[Metric]:
        """Describe nothing before the first request: the registry would collect instead."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield what is read from the database and the server."""
        service = self._service
        counts, phases = service.store.counts(), count_phases(service.store.connection)
        yield _by_label("jobs", "Jobs, by status.", "status", counts)
        yield _by_label("running_jobs", "Running jobs, by phase.", "phase", phases)
        total = len(service.config.gpus)
        yield _one("gpus", "GPUs that jobs may use.", total)
        yield _one("gpus_busy", "GPUs of jobs and engines.", total - len(service.slots.free()))
        free = shutil.disk_usage(service.work_dir).free
        yield _one("disk_free_bytes", "Free space of the work directory.", free)
        pins, size = self._count_pins()
        yield _one("pins", "Pinned checkpoints below the roots.", pins)
        yield _one("pins_bytes", "Size of the pinned checkpoints.", size)
        is_well = not service.health.problems()
        yield _one("accepting", "Whether jobs are accepted: as /health says.", is_well)
        yield _one("draining", "Whether no more jobs begin.", service.scheduler.is_draining)
        yield InfoMetricFamily(f"{_PREFIX}_build", "The server.", {"version": __version__})

    def _count_attempts(self, connection: sqlite3.Connection) -> None:
        """Count the attempts that have ended since the last time."""
        for one in list_attempts(connection, max(self._began, self._newest - _LATE_S)):
            key = (one.job_id, one.number, one.began_at)
            if key in self._counted:
                continue
            self._counted[key] = one.ended_at
            self._attempts.labels(one.outcome).inc()
            self._runs.observe(max(0.0, one.ended_at - one.began_at))
            if one.is_first:
                self._waits.observe(max(0.0, one.began_at - one.queued_at))
        self._newest = max([self._newest, *self._counted.values()])
        least = self._newest - _LATE_S
        self._counted = {key: at for key, at in self._counted.items() if at >= least}

    def _count_pins(self) -> tuple[int, int]:
        """Return how many pins there are, and how many bytes their files have."""
        if time.monotonic() - self._pins_at >= _PINS_EVERY_S:
            found = [pin for pin, _ in self._service.pins.list_all()]
            size = sum(was[1] for pin in found for was in pin.files.values())
            self._pins, self._pins_at = (len(found), size), time.monotonic()
        return self._pins


class CountedRequests:
    """An ASGI layer that counts requests by route and status."""

    def __init__(self, app: ASGIApp, meter: Meter) -> None:
        self._app = app
        self._meter = meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and count it when its answer begins."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "other")
                self._meter.count_request(route, message["status"])
            await send(message)

        await self._app(scope, receive, counted if scope["type"] == "http" else send)


def _one(name: str, what: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{_PREFIX}_{name}", what, float(value))


def _by_label(
    name: str, what: str, label: str, values: Mapping[Status, int] | Mapping[Phase, int]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"{_PREFIX}_{name}", what, labels=[label])
    for key, value in values.items():
        family.add_metric([key.value], value)
    return family
