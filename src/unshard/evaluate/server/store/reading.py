"""Reading the store: jobs, their places in the queue, results, events. A connection per thread."""

import sqlite3
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from unshard.evaluate.jobs import Event, Filters, Job, Request, Result, Status
from unshard.evaluate.server.store.schema import (
    JOB_COLUMNS,
    RESULT_COLUMNS,
    as_event,
    as_job,
    as_result,
    chosen,
    connect,
)

__all__ = ["CLAIMABLE", "DIED", "FORGETTABLE", "KILLED", "LONGEST_WAIT_S", "POSTPONED", "Records"]

POSTPONED = "postponed"
"""The outcome of an attempt that was hindered by what may pass."""

KILLED = "killed"
"""The outcome of an attempt whose evaluator was ended by a signal from elsewhere."""

DIED = "died"
"""The outcome of an attempt whose processes ended together with its server."""

LONGEST_WAIT_S = 3600.0
"""No job waits longer for its next attempt: one that seems to had its clock set back."""

CLAIMABLE = f"""jobs.status = 'queued' AND jobs.not_before - ? NOT BETWEEN 1e-6 AND {LONGEST_WAIT_S}
    AND NOT EXISTS
    (SELECT 1 FROM attempts WHERE attempts.job_id = jobs.id AND attempts.ended_at IS NULL)"""  # noqa: S608  (a number of ours)
"""Which jobs may be claimed, at a time that is its one value."""


_NEEDS_PIN = """(jobs.status = 'queued' OR EXISTS
    (SELECT 1 FROM attempts WHERE attempts.job_id = jobs.id AND attempts.ended_at IS NULL))"""

_FINAL = ", ".join(f"'{status}'" for status in Status if status.is_final)

FORGETTABLE = f"""jobs.status IN ({_FINAL}) AND jobs.completed_at < ?
    AND NOT EXISTS
    (SELECT 1 FROM attempts WHERE attempts.job_id = jobs.id AND attempts.ended_at IS NULL)
    AND EXISTS (SELECT 1 FROM attempts WHERE attempts.job_id = jobs.id)"""  # noqa: S608  (words of ours)
"""Which jobs ended before a time that is its one value, and have attempts to forget."""


class _Held:
    """A connection that is closed with the thread it belongs to."""

    def __init__(self, path: Path) -> None:
        self.connection = connect(path)

    def __del__(self) -> None:
        connection = getattr(self, "connection", None)
        if connection is not None:
            connection.close()


class Records:
    """What the database says.

    Args:
        path: of the database; made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._local = threading.local()
        self._all: weakref.WeakSet[_Held] = weakref.WeakSet()
        path.parent.mkdir(parents=True, exist_ok=True)
        _ = self._connection

    def close(self) -> None:
        """Close the connections of all threads; nobody may be using the store."""
        for held in list(self._all):
            held.connection.close()
        self._local = threading.local()

    @property
    def identity(self) -> int:
        """What tells this database from others."""
        return int(self._connection.execute("PRAGMA application_id").fetchone()[0])

    @property
    def _connection(self) -> sqlite3.Connection:
        held: _Held | None = getattr(self._local, "held", None)
        if held is None:
            held = self._local.held = _Held(self._path)
            self._all.add(held)
        return held.connection

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        connection = self._connection
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection

    def _one(self, connection: sqlite3.Connection, job_id: str) -> Job | None:
        return next(_jobs(connection, "WHERE jobs.id = ?", [job_id]), None)

    def _many(self, rest: str, values: list[str | int | float]) -> list[Job]:
        return list(_jobs(self._connection, rest, values))

    def due(self, now: float) -> Job | None:
        """Return the oldest job that could be claimed."""
        found = self._many(f"WHERE {CLAIMABLE} ORDER BY queued_at, jobs.number LIMIT 1", [now])
        return found[0] if found else None

    def running(self) -> list[Job]:
        """Return every job with an open attempt, those that are cancelled meanwhile too."""
        # The plus keeps SQLite from walking through all jobs in the order of their numbers.
        return self._many("WHERE open.job_id IS NOT NULL ORDER BY +jobs.number", [])

    def pins_below(self, directory: Path | None = None) -> list[tuple[str, str]]:
        """Return id and pin of every job that needs one: it is queued, or an attempt of it is open.

        Args:
            directory: only pins below it.
        """
        start = "/" if directory is None else f"{directory}/"
        rows = self._connection.execute(
            f"SELECT id, pin FROM jobs WHERE pin >= ? AND pin < ? AND {_NEEDS_PIN} ORDER BY number",  # noqa: S608
            (start, f"{start[:-1]}0"),  # the character after "/"
        )
        return [(row["id"], row["pin"]) for row in rows.fetchall()]

    def is_needed(self, pin: str) -> bool:
        """Return whether a job needs a pin: see `pins_below`."""
        query = f"SELECT 1 FROM jobs WHERE pin = ? AND {_NEEDS_PIN} LIMIT 1"  # noqa: S608
        return self._connection.execute(query, (pin,)).fetchone() is not None

    def pinned_runs(self) -> list[str]:
        """Return the directories of the runs in which this server has made pins."""
        return [row[0] for row in self._connection.execute("SELECT run FROM pinned_runs")]

    def status_of(self, key: str) -> Status | None:
        """Return the status of the job of a request's key, if there is one."""
        found = self._connection.execute("SELECT status FROM jobs WHERE key = ?", (key,)).fetchone()
        return None if found is None else Status(found[0])

    def alike(self, request: Request) -> list[Job]:
        """Return the jobs that differ from a request in the fingerprint at most, newest first."""
        return self._many("WHERE jobs.alike = ? ORDER BY jobs.number DESC", [request.alike])

    def get(self, job_id: str) -> Job | None:
        """Return a job."""
        return self._one(self._connection, job_id)

    def ids_like(self, start: str, most: int) -> list[str]:
        """Return the ids that begin like this, `most` of them at most."""
        rows = self._connection.execute(
            "SELECT id FROM jobs WHERE id >= ? AND id < ? ORDER BY id LIMIT ?",
            (start, f"{start}g", most),  # the letter after "f"
        )
        return [row[0] for row in rows.fetchall()]

    def jobs(self, filters: Filters) -> list[Job]:
        """Return jobs, the newest first."""
        return list(self.newest(filters))

    def newest(self, filters: Filters, before: str | None = None) -> Iterator[Job]:
        """Read jobs one by one, the newest first.

        Args:
            filters: which.
            before: only jobs that are older than the job of this id.
        """
        where, values = chosen(filters)
        if before is not None:
            where += " AND jobs.number < (SELECT number FROM jobs WHERE id = ?)"
            values.append(before)
        limit = -1 if filters.limit is None else filters.limit
        rest = f"WHERE {where} ORDER BY jobs.number DESC LIMIT ?"
        return _jobs(self._connection, rest, [*values, limit])

    def position(self, job_id: str) -> int | None:
        """Return a queued job's place in the queue, 1 for the next; None if it is not queued."""
        row = self._connection.execute(
            "SELECT COUNT(*) FROM jobs AS other JOIN jobs AS own ON own.id = ?"
            " WHERE own.status = 'queued' AND other.status = 'queued'"
            " AND (other.queued_at, other.number) <= (own.queued_at, own.number)",
            (job_id,),
        ).fetchone()
        return row[0] or None

    def in_a_row(self, job_id: str, outcome: str) -> int:
        """Return how many attempts ended like this since the job was submitted, or last failed.

        Attempts that were interrupted in another way do not end the row: two kinds of
        interruption that take turns would otherwise never be bounded.
        """
        row = self._connection.execute(
            "SELECT COUNT(*) FROM attempts JOIN jobs ON jobs.id = attempts.job_id"
            " WHERE jobs.id = :id AND outcome = :outcome"
            " AND attempts.number > jobs.attempts_before"
            " AND attempts.number > (SELECT COALESCE(MAX(number), 0) FROM attempts AS other"
            " WHERE other.job_id = :id AND outcome = :failed)",
            {"id": job_id, "outcome": outcome, "failed": Status.FAILED},
        ).fetchone()
        return int(row[0])

    def counts(self) -> dict[Status, int]:
        """Return how many jobs there are of every status."""
        rows = self._connection.execute("SELECT status, COUNT(*) FROM jobs GROUP BY status")
        found = {row[0]: row[1] for row in rows.fetchall()}
        return {status: found.get(status, 0) for status in Status}

    def queued_ids(self) -> list[str]:
        """Return the jobs that wait, the next first."""
        rows = self._connection.execute(
            "SELECT id FROM jobs WHERE status = 'queued' ORDER BY queued_at, number"
        )
        return [row[0] for row in rows.fetchall()]

    def ended_before(self, time_s: float) -> list[str]:
        """Return the jobs that ended before a time and have attempts to forget."""
        rows = self._connection.execute(f"SELECT id FROM jobs WHERE {FORGETTABLE}", (time_s,))  # noqa: S608
        return [row[0] for row in rows.fetchall()]

    def forgotten(self) -> list[str]:
        """Return the jobs whose directories are to be removed."""
        return [row[0] for row in self._connection.execute("SELECT job_id FROM forgotten")]

    def runs(self) -> list[str]:
        """Return the names of all runs."""
        rows = self._connection.execute("SELECT DISTINCT run FROM jobs ORDER BY run")
        return [row[0] for row in rows.fetchall()]

    def results(self, filters: Filters, after: int = 0) -> Iterator[Result]:
        """Read the numbers of completed jobs one by one, in the order in which they came.

        Args:
            filters: which; `limit` counts numbers.
            after: only what came after the result of this number.
        """
        where, values = chosen(filters)
        limit = -1 if filters.limit is None else filters.limit
        rows = self._connection.execute(
            f"SELECT {RESULT_COLUMNS} WHERE results.rowid > ? AND jobs.status = 'completed'"
            f" AND {where} ORDER BY results.rowid LIMIT ?",
            [after, *values, limit],
        )
        return map(as_result, rows)

    def events(self, since: int) -> list[Event]:
        """Return the changes after the one of this number, the oldest first, 1,000 at most."""
        rows = self._connection.execute(
            "SELECT * FROM events WHERE number > ? ORDER BY 1 LIMIT 1000", (since,)
        )
        return [as_event(row) for row in rows.fetchall()]


def _jobs(
    connection: sqlite3.Connection, rest: str, values: Sequence[str | int | float]
) -> Iterator[Job]:
    rows = connection.execute(f"SELECT {JOB_COLUMNS} {rest}", values)
    return (as_job(row, _metrics(connection, row)) for row in rows)


def _metrics(connection: sqlite3.Connection, row: sqlite3.Row) -> dict[str, float]:
    """Return the results of a job; SQLite's JSON would round them."""
    if row["status"] != Status.COMPLETED:
        return {}
    found = connection.execute("SELECT metric, value FROM results WHERE job_id = ?", (row["id"],))
    return dict(found.fetchall())
