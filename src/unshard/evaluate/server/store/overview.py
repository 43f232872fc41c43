"""What the page shows of the database that no protocol asks for: runs, plots, and who has GPUs.

Every function reads by a connection of its caller's thread, and writes nothing.
"""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unshard.evaluate.jobs import Filters, Result, Status
from unshard.evaluate.server.store.statements import RESULT_COLUMNS, as_result, condition_of

__all__ = [
    "Holder",
    "RunSummary",
    "last_event",
    "list_holders",
    "list_metrics",
    "list_points",
    "list_runs",
    "results_of",
]

_FROM = "FROM jobs JOIN results ON results.job_id = jobs.id"


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A training run.

    Attributes:
        name: the run's.
        counts: how many jobs it has of each status.
        step: the highest step that was submitted, if one is known.
    """

    name: str
    counts: Mapping[Status, int] = field(default_factory=dict)
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Holder:
    """A job that has GPUs, even if it was cancelled and its processes are still being ended."""

    job_id: str
    run: str
    step: int | None
    status: Status
    gpus: tuple[str, ...]


def list_runs(
    connection: sqlite3.Connection, text: str, *, limit: int, offset: int
) -> list[RunSummary]:
    """Return runs whose names contain a text, that of the newest job first."""
    states = ", ".join(f"SUM(status = '{status}')" for status in Status)
    rows = connection.execute(
        f"SELECT run, MAX(step), {states} FROM jobs WHERE instr(run, ?) OR ? = ''"  # noqa: S608
        " GROUP BY run ORDER BY MAX(number) DESC LIMIT ? OFFSET ?",
        (text, text, limit, offset),
    )
    return [RunSummary(row[0], dict(zip(Status, row[2:], strict=True)), row[1]) for row in rows]


def list_metrics(connection: sqlite3.Connection, runs: Sequence[str], text: str) -> list[str]:
    """Return the names "task/metric" of all results of runs that contain a text."""
    rows = connection.execute(
        f"SELECT DISTINCT metric {_FROM}"
        f" WHERE run IN ({_marks(runs)}) AND status = 'completed' AND step IS NOT NULL"
        " AND (instr(metric, ?) OR ? = '') ORDER BY metric",
        (*runs, text, text),
    )
    return [row[0] for row in rows]


def list_points(
    connection: sqlite3.Connection, runs: Sequence[str], metrics: Sequence[str]
) -> list[Result]:
    """Return the results of runs that have a step, of some metrics, in the order they came."""
    rows = connection.execute(
        f"SELECT {RESULT_COLUMNS} {_FROM} WHERE run IN ({_marks(runs)}) AND status = 'completed'"
        f" AND step IS NOT NULL AND metric IN ({_marks(metrics)}) ORDER BY results.rowid",
        (*runs, *metrics),
    )
    return list(map(as_result, rows))


def results_of(connection: sqlite3.Connection, job_id: str) -> list[Result]:
    """Return the numbers of a completed job."""
    where, values = condition_of(Filters(status=Status.COMPLETED))
    rows = connection.execute(
        f"SELECT {RESULT_COLUMNS} {_FROM} WHERE results.job_id = ? AND {where} ORDER BY metric",
        (job_id, *values),
    )
    return list(map(as_result, rows))


def list_holders(connection: sqlite3.Connection) -> list[Holder]:
    """Return the jobs that have GPUs, or the CPU."""
    rows = connection.execute(
        "SELECT jobs.id, run, step, status, attempts.gpus FROM attempts"
        " JOIN jobs ON jobs.id = attempts.job_id"
        " WHERE attempts.ended_at IS NULL ORDER BY began_at"
    )
    return [
        Holder(row[0], row[1], row[2], Status(row[3]), tuple(map(str, json.loads(row[4] or "[]"))))
        for row in rows
    ]


def last_event(connection: sqlite3.Connection) -> int:
    """Return the number of the last change; 0 if there was none."""
    return int(connection.execute("SELECT COALESCE(MAX(number), 0) FROM events").fetchone()[0])


def _marks(values: Sequence[str]) -> str:
    return ", ".join("?" * len(values))
