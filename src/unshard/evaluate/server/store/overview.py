"""Queries for the page and the metrics: runs, plots, attempts.

Every function reads by a connection of its caller's thread.
"""

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from unshard.evaluate.jobs import Filters, Phase, Result, Status, TrainingRun
from unshard.evaluate.server.store.statements import RESULT_COLUMNS, as_result, condition_of

_FROM = "FROM jobs JOIN results ON results.job_id = jobs.id JOIN runs ON runs.id = jobs.run"
_SHOWN = "status = 'completed' AND step IS NOT NULL AND hidden IS NULL"
_MOST_JOBS = 2000
_MOST_METRICS = 1000
# The newest job of each run, profile and tasks, of so many jobs of some runs.
_NEWEST = (
    "(SELECT MAX(number) AS number, run, profile FROM jobs WHERE number IN"  # noqa: S608
    f" (SELECT number FROM jobs WHERE run IN (SELECT value FROM json_each(?)) AND {_SHOWN}"
    # The index of runs, and not the order of numbers: it would read the whole table.
    f" ORDER BY +number DESC LIMIT {_MOST_JOBS})"
    " GROUP BY run, profile, json_extract(request, '$.tasks'))"
)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A training run.

    Attributes:
        counts: number of jobs, by status.
        step: the highest step that was submitted; None if no step is known.
    """

    run: TrainingRun
    counts: Mapping[Status, int] = field(default_factory=dict)
    step: int | None = None


class Holder(NamedTuple):
    """A job with GPUs; it may be cancelled, with its processes still being ended."""

    job_id: str
    run: str
    step: int | None
    status: Status
    gpus: tuple[str, ...]


class EndedAttempt(NamedTuple):
    """An attempt that has ended; `is_first`: the first since its job was last submitted."""

    job_id: str
    number: int
    outcome: str
    began_at: float
    ended_at: float
    queued_at: float
    is_first: bool


class Point(NamedTuple):
    """A result as lists of runs need it, which have many; `settings` is only compared."""

    number: int
    run: str
    metric: str
    weights: str
    profile: str
    settings: str | None
    step: int
    value: float
    higher_is_better: int | None


def list_runs(connection: sqlite3.Connection, text: str) -> list[RunSummary]:
    """Return runs whose labels or directories contain a text, the run of the newest job first.

    Upper and lower case are the same.
    """
    statuses = tuple(Status)
    states = ", ".join(f"SUM(IIF(status = '{status}', jobs, 0))" for status in statuses)
    rows = connection.execute(
        f"SELECT runs.id, name, directory, label, MAX(step), {states} FROM"  # noqa: S608
        # An index has all of this, in this order.
        " (SELECT run, status, COUNT(*) AS jobs, MAX(step) AS step, MAX(number) AS newest FROM jobs"
        " GROUP BY run, status) JOIN runs ON runs.id = run"
        " GROUP BY run ORDER BY MAX(newest) DESC"
    )
    return [
        RunSummary(TrainingRun(*row[:4]), dict(zip(statuses, row[5:], strict=True)), row[4])
        for row in rows
        if _contains(text, row["label"], row["directory"])
    ]


def list_metrics(connection: sqlite3.Connection, runs: Sequence[str], text: str) -> list[str]:
    """Return the names "task/metric" of the results of runs (ids) that contain a text.

    Upper and lower case are the same.
    """
    rows = connection.execute(
        f"SELECT DISTINCT metric {_FROM}"
        f" WHERE jobs.run IN ({_marks(runs)}) AND {_SHOWN} ORDER BY metric",
        runs,
    )
    return [row[0] for row in rows if _contains(text, row[0])]


def list_recent_metrics(connection: sqlite3.Connection, runs: Sequence[str]) -> list[str]:
    """Return metrics of runs: first those that most of the newest jobs of a profile have.

    All jobs for the same tasks are taken to have the same metrics.
    """
    rows = connection.execute(
        "SELECT metric FROM (SELECT number, number = MAX(number) OVER (PARTITION BY run, profile)"  # noqa: S608
        f" AS is_newest FROM {_NEWEST}) CROSS JOIN jobs USING (number)"
        " CROSS JOIN results ON job_id = jobs.id"
        f" GROUP BY metric ORDER BY SUM(is_newest) DESC, metric LIMIT {_MOST_METRICS}",
        (json.dumps(runs),),
    )
    return [row[0] for row in rows]


def list_groups(connection: sqlite3.Connection, runs: Sequence[str]) -> dict[str, str]:
    """Return the group of each task of runs (ids), where evaluators report one."""
    rows = connection.execute(
        f"SELECT DISTINCT facts FROM {_NEWEST} CROSS JOIN jobs USING (number)",  # noqa: S608
        (json.dumps(runs),),
    )
    facts = [json.loads(row[0] or "{}") for row in rows]
    return {task: of[3] for one in facts for task, of in one.items() if of[3:] and of[3]}


def list_curves(
    connection: sqlite3.Connection, runs: Sequence[str], metrics: Sequence[str]
) -> Iterator[Point]:
    """Yield the results of `list_points`, with fewer fields."""
    rows = connection.execute(
        "SELECT results.rowid, run, metric, weights, profile, settings, step, value,"  # noqa: S608
        # CROSS JOIN fixes the order of the tables: results have no index of metrics.
        " higher_is_better FROM jobs CROSS JOIN results ON job_id = jobs.id"
        " WHERE run IN (SELECT value FROM json_each(?))"
        f" AND {_SHOWN} AND metric IN ({_marks(metrics)}) ORDER BY results.rowid",
        (json.dumps(runs), *metrics),
    )
    return map(Point._make, rows)


def list_points(
    connection: sqlite3.Connection, runs: Sequence[str], metrics: Sequence[str]
) -> list[Result]:
    """Return the results of runs (ids) that plots show, in the order they came.

    Results without a step and hidden results are left out.
    """
    rows = connection.execute(
        f"SELECT {RESULT_COLUMNS} {_FROM} WHERE jobs.run IN ({_marks(runs)})"
        f" AND {_SHOWN} AND metric IN ({_marks(metrics)}) ORDER BY results.rowid",
        (*runs, *metrics),
    )
    return list(map(as_result, rows))


def results_of(connection: sqlite3.Connection, job_id: str) -> list[Result]:
    """Return the results of a completed job."""
    where, values = condition_of(Filters(status=Status.COMPLETED))
    rows = connection.execute(
        f"SELECT {RESULT_COLUMNS} {_FROM} WHERE results.job_id = ? AND {where} ORDER BY metric",
        (job_id, *values),
    )
    return list(map(as_result, rows))


def recipe_of(connection: sqlite3.Connection, job_id: str) -> tuple[str, str]:
    """Return the script that repeats a job, and its model's record; each may be empty."""
    query = "SELECT script, record FROM jobs WHERE id = ?"
    row = connection.execute(query, (job_id,)).fetchone()
    return row[0], row[1]


def list_holders(connection: sqlite3.Connection) -> list[Holder]:
    """Return the jobs with GPUs or a slot of the CPU."""
    rows = connection.execute(
        "SELECT jobs.id, label, step, status, attempts.gpus FROM attempts"
        " JOIN jobs ON jobs.id = attempts.job_id JOIN runs ON runs.id = jobs.run"
        " WHERE attempts.ended_at IS NULL ORDER BY began_at"
    )
    return [
        Holder(row[0], row[1], row[2], Status(row[3]), tuple(map(str, json.loads(row[4] or "[]"))))
        for row in rows
    ]


def list_attempts(connection: sqlite3.Connection, since: float) -> list[EndedAttempt]:
    """Return the attempts that ended at a time or later."""
    rows = connection.execute(
        "SELECT job_id, attempts.number, outcome, began_at, ended_at, queued_at,"
        " attempts.number = attempts_before + 1 AS is_first FROM attempts"
        " JOIN jobs ON jobs.id = attempts.job_id WHERE ended_at >= ?",
        (since,),
    )
    return list(map(EndedAttempt._make, rows))


def count_phases(connection: sqlite3.Connection) -> dict[Phase, int]:
    """Return how many running jobs are in each phase."""
    rows = connection.execute(
        "SELECT phase, COUNT(*) FROM jobs WHERE status = 'running' GROUP BY phase"
    )
    by_phase = dict(map(tuple, rows))
    return {phase: by_phase.get(phase, 0) for phase in Phase}


def last_event(connection: sqlite3.Connection) -> int:
    """Return the number of the last change; 0 if there was none."""
    return int(connection.execute("SELECT COALESCE(MAX(number), 0) FROM events").fetchone()[0])


def _contains(text: str, *names: str) -> bool:
    return any(text.casefold() in name.casefold() for name in names)


def _marks(values: Sequence[str]) -> str:
    return ", ".join("?" * len(values))
