"""Metrics at /metrics, by Prometheus' conventions for names and units.

Labels have few values: statuses, outcomes, phases and routes; never names that clients choose.
Gauges are read from the database and the server at each request. Counters and histograms start at
zero with the server; an attempt is counted at the first request after its end.
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
_PINS_EVERY_S = 60.0  # not at each request: finding pins lists directories of runs
_LATE_S = 60.0  # tolerance for a clock that is set back, and attempts that are recorded late


class Meter:
    """The metrics of a server, in a separate registry; thread-safe."""

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
            "Answered requests, by the route's template; `other`: without a route, or refused.",
            ["route", "status"],
        )
        self._attempts = counter("attempts", "Ended attempts, by outcome.", ["outcome"])
        self._waits = histogram(
            "queue_wait_seconds",
            "Time of a job in the queue before its first attempt, once this has ended.",
            buckets=_WAITS_S,
        )
        self._runs = histogram(
            "attempt_duration_seconds",
            "Duration of an attempt, with its merge.",
            buckets=_RUNS_S,
        )
        registry.register(self)

    def count_request(self, route: str, status: int) -> None:
        """Count an answered request."""
        self._requests.labels(route, str(status)).inc()

    def write(self) -> bytes:
        """Return all metrics in Prometheus' text format.

        Raises:
            sqlite3.OperationalError: the database does not answer.
        """
        with self._lock:
            self._count_attempts(self._service.store.connection)
            return bytes(generate_latest(self._registry))

    def describe(self) -> Iterator[Metric]:
        """Describe nothing: without this method, the registry would call `collect` at once."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges, from the database and the server."""
        service = self._service
        counts, phases = service.store.counts(), count_phases(service.store.connection)
        yield _by_label("jobs", "Jobs, by status.", "status", counts)
        yield _by_label("running_jobs", "Running jobs, by phase.", "phase", phases)
        total = len(service.config.gpus)
        yield _gauge("gpus", "GPUs that jobs may use.", total)
        yield _gauge("gpus_busy", "GPUs of jobs and engines.", total - len(service.slots.free()))
        free = shutil.disk_usage(service.work_dir).free
        yield _gauge("disk_free_bytes", "Free space of the work directory.", free)
        pins, size = self._count_pins()
        yield _gauge("pins", "Pinned checkpoints below the roots.", pins)
        yield _gauge("pins_bytes", "Size of the pinned checkpoints.", size)
        is_healthy = not service.health.problems()
        yield _gauge("accepting", "Whether jobs are accepted, as in /health.", is_healthy)
        yield _gauge("draining", "Whether no more jobs start.", service.scheduler.is_draining)
        yield InfoMetricFamily(f"{_PREFIX}_build", "The server.", {"version": __version__})

    def _count_attempts(self, connection: sqlite3.Connection) -> None:
        """Count the attempts that have ended since the last call."""
        for attempt in list_attempts(connection, max(self._began, self._newest - _LATE_S)):
            key = (attempt.job_id, attempt.number, attempt.began_at)
            if key in self._counted:
                continue
            self._counted[key] = attempt.ended_at
            self._attempts.labels(attempt.outcome).inc()
            self._runs.observe(max(0.0, attempt.ended_at - attempt.began_at))
            if attempt.is_first:
                self._waits.observe(max(0.0, attempt.began_at - attempt.queued_at))
        self._newest = max([self._newest, *self._counted.values()])
        least = self._newest - _LATE_S
        self._counted = {key: at for key, at in self._counted.items() if at >= least}

    def _count_pins(self) -> tuple[int, int]:
        """Return the number of pins, and the bytes of their files."""
        if time.monotonic() - self._pins_at >= _PINS_EVERY_S:
            pins = [pin for pin, _ in self._service.pins.list_all()]
            total = sum(size for pin in pins for _, size, _ in pin.files.values())
            self._pins, self._pins_at = (len(pins), total), time.monotonic()
        return self._pins


class CountedRequests:
    """An ASGI layer that counts requests by route and status."""

    def __init__(self, app: ASGIApp, meter: Meter) -> None:
        self._app = app
        self._meter = meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, and count it when its answer begins."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "other")
                self._meter.count_request(route, message["status"])
            await send(message)

        await self._app(scope, receive, counted if scope["type"] == "http" else send)


def _gauge(name: str, help_text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{_PREFIX}_{name}", help_text, float(value))


def _by_label(
    name: str, help_text: str, label: str, values: Mapping[Status, int] | Mapping[Phase, int]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"{_PREFIX}_{name}", help_text, labels=[label])
    for key, value in values.items():
        family.add_metric([key.value], value)
    return family
