"""What the store's statements share: conditions, and how values become rows and back."""

import secrets
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count

from unshard.evaluate.jobs import Job, Request, Status
from unshard.evaluate.server.store.schema import JOB_COLUMNS, as_job, request_as_json

__all__ = [
    "CLAIMABLE",
    "DIED",
    "FORGETTABLE",
    "KILLED",
    "LONGEST_WAIT_S",
    "NEEDS_PIN",
    "POSTPONED",
    "add_event",
    "final",
    "insert_job",
    "queue_again",
    "queued",
    "read_job",
    "read_jobs",
    "replace_results",
]

_EVENTS = 100_000
_LONGEST_ERROR = 20_000  # characters

POSTPONED = "postponed"
"""The outcome of an attempt that was hindered by what may pass."""

KILLED = "killed"
"""The outcome of an attempt whose evaluator was ended by a signal from elsewhere."""

DIED = "died"
"""The outcome of an attempt whose processes ended together with its server."""

LONGEST_WAIT_S = 3600.0
"""No job waits longer for its next attempt: if one seems to, the clock was set back."""

CLAIMABLE = f"""jobs.status = 'queued' AND jobs.not_before - ? NOT BETWEEN 1e-6 AND {LONGEST_WAIT_S}
    AND NOT EXISTS
    (SELECT 1 FROM attempts WHERE attempts.job_id = jobs.id AND attempts.ended_at IS NULL)"""  # noqa: S608  (a number of ours)
"""Which jobs may be claimed, at a time that is its one value."""

NEEDS_PIN = """(jobs.status = 'queued' OR EXISTS
    (SELECT 1 FROM attempts WHERE attempts.job_id = jobs.id AND attempts.ended_at IS NULL))"""
"""Which jobs need their pins."""

_FINAL = ", ".join(f"'{status}'" for status in Status if status.is_final)

FORGETTABLE = f"""jobs.status IN ({_FINAL}) AND jobs.completed_at < ?
    AND NOT EXISTS
    (SELECT 1 FROM attempts WHERE attempts.job_id = jobs.id AND attempts.ended_at IS NULL)
    AND EXISTS (SELECT 1 FROM attempts WHERE attempts.job_id = jobs.id)"""  # noqa: S608  (words of ours)
"""Which jobs ended before a time that is its one value, and have attempts to forget."""


def read_job(connection: sqlite3.Connection, job_id: str) -> Job | None:
    """Return the job of this id."""
    return next(read_jobs(connection, "WHERE jobs.id = ?", [job_id]), None)


def read_jobs(
    connection: sqlite3.Connection, rest: str, values: Sequence[str | float | None]
) -> Iterator[Job]:
    """Read jobs one by one; `rest` is what follows FROM."""
    rows = connection.execute(f"SELECT {JOB_COLUMNS} {rest}", values)
    return (as_job(row, _metrics(connection, row)) for row in rows)


def _metrics(connection: sqlite3.Connection, row: sqlite3.Row) -> dict[str, float]:
    """Return the results of a job; SQLite's JSON would round them."""
    if row["status"] != Status.COMPLETED:
        return {}
    found = connection.execute("SELECT metric, value FROM results WHERE job_id = ?", (row["id"],))
    return dict(found.fetchall())


def insert_job(
    connection: sqlite3.Connection, request: Request, pin: str | None, now: float
) -> str:
    """Queue the first job of a request's key; return its id."""
    job_id = secrets.token_hex(8)
    connection.execute(
        "INSERT INTO jobs (id, key, alike, request, run, step, weights, profile,"
        " status, created_at, queued_at, pin) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(job_id, request.key, request.alike, request_as_json(request)),
            *(request.run, request.step, request.weights, request.profile),
            *(Status.QUEUED, now, now, pin),
        ),
    )
    add_event(connection, job_id, now)
    return job_id


def queue_again(
    connection: sqlite3.Connection, job_id: str, request: Request, pin: str | None, now: float
) -> str:
    """Queue a job that has ended; return its id, which is new if its attempts were forgotten."""
    renamed = connection.execute(
        "UPDATE jobs SET id = ? WHERE id = ? AND attempts > 0"
        " AND NOT EXISTS (SELECT 1 FROM attempts WHERE job_id = jobs.id) RETURNING id",
        (secrets.token_hex(8), job_id),
    ).fetchone()
    job_id = job_id if renamed is None else str(renamed["id"])
    connection.execute(
        "UPDATE jobs SET status = ?, request = ?, pin = ?, queued_at = ?,"
        " not_before = 0, failures = 0, phase = NULL, error = NULL,"
        " started_at = NULL, completed_at = NULL, superseded_by = NULL,"
        " attempts_before = attempts"
        " WHERE id = ?",
        (Status.QUEUED, request_as_json(request), pin, now, job_id),
    )
    add_event(connection, job_id, now)
    return job_id


def add_event(connection: sqlite3.Connection, job_id: str, at: float) -> None:
    """Append a job's change, and forget the oldest."""
    connection.execute(
        "INSERT INTO events (job_id, status, phase, at) SELECT id, status, phase, ? FROM jobs"
        " WHERE id = ?",
        (at, job_id),
    )
    connection.execute(
        "DELETE FROM events WHERE number <= (SELECT MAX(number) FROM events) - ?", (_EVENTS,)
    )


def _error(text: str) -> str:
    """Return an error as it is kept: an evaluator's may have any length."""
    return _storable(text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}...")


def _storable(text: str) -> str:
    """Return a text that SQLite takes: a file's name may have bytes that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _storable_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics under names that SQLite takes; a name that is taken gets a number."""
    found = {name: value for name, value in metrics.items() if _storable(name) == name}
    for name, value in metrics.items():
        fit = _storable(name)
        if fit != name:
            others = (f"{fit} ({number})" for number in count(2))
            found[next(one for one in chain([fit], others) if one not in found)] = value
    return found


def replace_results(
    connection: sqlite3.Connection, job_id: str, metrics: Mapping[str, float]
) -> None:
    """Write what was measured, instead of what an earlier attempt measured."""
    connection.execute("DELETE FROM results WHERE job_id = ?", (job_id,))
    connection.executemany(
        "INSERT INTO results (job_id, metric, value) VALUES (?, ?, ?)",
        [(job_id, name, value) for name, value in _storable_names(metrics).items()],
    )


def final(status: Status, error: str | None = None) -> dict[str, str | float | None]:
    """Return what changes in a job that has ended."""
    why = None if error is None else _error(error)
    return {"status": status, "completed_at": time.time(), "error": why}


def queued(why: str, due_at: float) -> dict[str, str | float | None]:
    """Return what changes in a job that is queued again."""
    return {"status": Status.QUEUED, "not_before": due_at, "error": _error(why)}
