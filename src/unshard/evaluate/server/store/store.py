"""The jobs, their attempts and results in one SQLite database, the only authority on them.

Every method is one transaction: a process that is killed at any statement leaves the state before
or after it. Any number of threads and processes may use one database; each thread has a connection.
"""

import json
import sqlite3
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from unshard.evaluate.jobs import Filters, Job, JobEvent, Phase, Request, Result, Settings, Status
from unshard.evaluate.process import Process
from unshard.evaluate.server.store.connections import Connections
from unshard.evaluate.server.store.records import (
    Hiding,
    Leftovers,
    Ordering,
    PinRecords,
    RunRecords,
)
from unshard.evaluate.server.store.runs import run_called
from unshard.evaluate.server.store.statements import (
    CLAIMABLE,
    DUE,
    QUEUE,
    RESULT_COLUMNS,
    Facts,
    MetricRow,
    add_event,
    as_event,
    as_result,
    change_to_final,
    change_to_queued,
    condition_of,
    gpus_as_json,
    insert_job,
    queue_again,
    read_job,
    read_jobs,
    replace_results,
    settings_as_json,
    storable,
)

_NEWEST = """SELECT id, status FROM jobs WHERE key = ?1 AND (?2 = '' OR again = ?2)
    ORDER BY number DESC LIMIT 1"""
_AGAIN = (Status.FAILED, Status.CANCELLED, Status.EXPIRED, Status.SUPERSEDED)


class Store:
    """The jobs and their outcomes, in the database at a path; created if it is missing."""

    def __init__(self, path: Path) -> None:
        self._connections = Connections(path)
        self._transaction = self._connections.transaction
        self.ordering = Ordering(self._connections)
        self._rows, self._texts = self._connections.rows, self._connections.texts
        self.pins = PinRecords(self._connections)
        self.leftovers = Leftovers(self._connections)
        self.hiding = Hiding(self._connections)
        self.runs = RunRecords(self._connections)

    def close(self) -> None:
        """Close the connections of all threads, none of which may use the store any more."""
        self._connections.close()

    @property
    def connection(self) -> sqlite3.Connection:
        """The connection of this thread, for the queries of `overview`."""
        return self._connections.own

    @property
    def identity(self) -> int:
        """A random number that distinguishes this database from others."""
        return int(self._rows("PRAGMA application_id")[0][0])

    def submit(self, request: Request, *, pin: str | None) -> tuple[Job, bool]:
        """Queue a request; return its job, and whether it is new.

        The same request again returns the same job, the newest of its key. A job that failed, was
        cancelled or expired is queued again, with the new request's checkpoint and pin; under a new
        id if its attempts were forgotten, because the directory of its old id may be being
        removed. A request to evaluate again gets a job of its own. A request without a run's id is
        of the run that has its name and no directory.
        """
        now = time.time()
        with self._transaction() as connection:
            if not request.run_id:
                request = replace(request, run_id=run_called(connection, request.run).id)
            row = connection.execute(_NEWEST, (request.key, request.again)).fetchone()
            job_id = insert_job(connection, request, pin, now) if row is None else str(row["id"])
            is_again = row is not None and Status(row["status"]) in _AGAIN
            if is_again:
                job_id = queue_again(connection, job_id, request, pin, now)
            if row is None or is_again:  # a job that is sent twice keeps its place
                # Put a run with its first queued job behind the runs that wait: otherwise one new
                # run after the other would get the turn. LIMIT bounds the time of a long queue.
                connection.execute(
                    "UPDATE runs SET turn = (SELECT MAX(turn) FROM runs) WHERE id = ?1 AND 1 ="
                    " (SELECT COUNT(*) FROM"
                    " (SELECT 1 FROM jobs WHERE run = ?1 AND status = 'queued' LIMIT 2))",
                    (request.run_id,),
                )
            job = read_job(connection, job_id)
        if job is None:
            raise RuntimeError(f"job {job_id} is missing after it was written")
        return job, row is None

    def cancel(self, job_id: str) -> bool:
        """Cancel a job that is queued or running; return whether it was.

        The scheduler ends the process of a running job, whose attempt is open until then.
        """
        return self._stop(job_id, Status.CANCELLED, (Status.QUEUED,))

    def supersede(self, job_id: str, by: str) -> bool:
        """End a queued, running or failed job that another replaces; return whether it was one."""
        return self._stop(job_id, Status.SUPERSEDED, (Status.QUEUED, Status.FAILED), by)

    def _stop(
        self, job_id: str, status: Status, among: tuple[Status, ...], by: str | None = None
    ) -> bool:
        marks = ", ".join("?" * len(among))
        why = None if by is None else f"saved again since: see job {by}"
        with self._transaction() as connection:
            cursor = connection.execute(
                "UPDATE jobs SET status = ?, phase = NULL, completed_at = ?,"  # noqa: S608
                " error = COALESCE(?, error), superseded_by = ?"
                f" WHERE id = ? AND status IN (?, {marks})",
                (status, time.time(), why, by, job_id, Status.RUNNING, *among),
            )
            if cursor.rowcount:
                add_event(connection, job_id, time.time())
            return cursor.rowcount > 0

    def repin(self, job_id: str, pin: str) -> None:
        """Give a queued or running job another pin, which its next attempt reads."""
        with self._transaction() as connection:
            connection.execute(
                "UPDATE jobs SET pin = ? WHERE id = ? AND status IN (?, ?)",
                (pin, job_id, Status.QUEUED, Status.RUNNING),
            )

    # Writes of a scheduler.

    def claim(
        self, now: float, job_id: str | None = None, gpus: tuple[str, ...] = ()
    ) -> Job | None:
        """Begin an attempt on `gpus` of a job that is queued and due: `job_id`, or the oldest.

        A concurrent call gets another job.
        """
        only, values = ("", []) if job_id is None else ("AND jobs.id = ?", [job_id])
        with self._transaction() as connection:
            row = connection.execute(
                "UPDATE jobs SET status = 'running', phase = 'merging', started_at = ?,"  # noqa: S608
                " attempts = attempts + 1 WHERE id = (SELECT id FROM jobs"
                f" WHERE {CLAIMABLE} {only} ORDER BY queued_at, jobs.number LIMIT 1)"
                " RETURNING id, attempts",
                [now, now, *values],
            ).fetchone()
            if row is None:
                return None
            connection.execute(
                "INSERT INTO attempts (job_id, number, began_at, gpus) VALUES (?, ?, ?, ?)",
                (row["id"], row["attempts"], now, gpus_as_json(gpus)),
            )
            connection.execute(
                "UPDATE runs SET turn = (SELECT MAX(turn) + 1 FROM runs)"
                " WHERE id = (SELECT run FROM jobs WHERE id = ?)",
                (row["id"],),
            )
            add_event(connection, row["id"], now)
            return read_job(connection, row["id"])

    def record_process(self, job_id: str, process: Process) -> None:
        """Record the process of the open attempt."""
        gpus = gpus_as_json(process.gpus)
        with self._transaction() as connection:
            connection.execute(
                "UPDATE attempts SET pid = ?, started = ?, boot = ?, gpus = ?, directory = ?"
                " WHERE job_id = ? AND ended_at IS NULL",
                (process.pid, process.started, process.boot, gpus, process.directory, job_id),
            )

    def record_phase(self, job_id: str, phase: Phase) -> None:
        """Record the phase of a running job."""
        with self._transaction() as connection:
            cursor = connection.execute(
                "UPDATE jobs SET phase = ? WHERE id = ? AND status = ? AND phase IS NOT ?",
                (phase, job_id, Status.RUNNING, phase),
            )
            if cursor.rowcount:
                add_event(connection, job_id, time.time())

    def describe(self, job_id: str, settings: Settings, facts: Mapping[str, Facts]) -> None:
        """Record the settings that a running job's results depend on, and facts about its tasks."""
        with self._transaction() as connection:
            connection.execute(
                "UPDATE jobs SET settings = ?, facts = ? WHERE id = ?",
                (settings_as_json(settings), json.dumps(facts), job_id),
            )

    def record_recipe(self, job_id: str, script: str, record: str) -> None:
        """Record a script that repeats a job, and the record of the model that it evaluates."""
        with self._transaction() as connection:
            connection.execute(
                "UPDATE jobs SET script = ?, record = ? WHERE id = ?",
                (storable(script), storable(record), job_id),
            )

    def complete(
        self,
        job_id: str,
        metrics: Mapping[str, float],
        results: Path | None,
        errors: Mapping[str, float] | None = None,
        directions: Mapping[str, bool] | None = None,
    ) -> bool:
        """End the open attempt with its metrics; return whether the job was still running.

        `errors` has the standard errors of metrics, and `directions` whether higher is better,
        where they are known.
        """
        errors, directions = errors or {}, directions or {}
        file = None if results is None else str(results)
        changes = {**change_to_final(Status.COMPLETED), "results": file}
        rows = {
            name: (value, errors.get(name), directions.get(name)) for name, value in metrics.items()
        }
        return self._end(job_id, Status.COMPLETED, changes, rows)

    def fail(self, job_id: str, error: str, retry_at: float | None) -> bool:
        """End the open attempt as failed; the job is due again at `retry_at`, or failed if None."""
        if retry_at is None:
            return self._end(job_id, Status.FAILED, change_to_final(Status.FAILED, error))
        return self._end(job_id, Status.FAILED, change_to_queued(error, retry_at))

    def expire(self, job_id: str, why: str) -> bool:
        """End the open attempt: the checkpoint is gone."""
        return self._end(job_id, Status.EXPIRED, change_to_final(Status.EXPIRED, why))

    def requeue(self, job_id: str, why: str) -> bool:
        """End the open attempt as lost; the job keeps its place in the queue, and its retries."""
        return self.postpone(job_id, "lost", why, 0)

    def postpone(self, job_id: str, outcome: str, why: str, due_at: float) -> bool:
        """End the open attempt for a passing cause; the job is due again, and keeps its retries."""
        return self._end(job_id, outcome, {**change_to_queued(why, due_at), "started_at": None})

    def release(self, job_id: str) -> None:
        """End the open attempt of a job that was cancelled: its process is gone."""
        self._end(job_id, Status.CANCELLED, {})

    def _end(
        self,
        job_id: str,
        outcome: str,
        changes: Mapping[str, str | float | None],
        metrics: Mapping[str, MetricRow] | None = None,
    ) -> bool:
        """End the open attempt; change its job if that is still running; return whether it is."""
        now = time.time()
        with self._transaction() as connection:
            row = connection.execute("SELECT status FROM jobs WHERE id = ?", (job_id,)).fetchone()
            is_running = row is not None and row["status"] == Status.RUNNING
            connection.execute(
                "UPDATE attempts SET ended_at = ?, outcome = ?"
                " WHERE job_id = ? AND ended_at IS NULL",
                (now, outcome if is_running else Status.CANCELLED, job_id),
            )
            if is_running:
                columns = "".join(f", {name} = ?" for name in changes)
                connection.execute(
                    f"UPDATE jobs SET phase = NULL, failures = failures + ?{columns} WHERE id = ?",  # noqa: S608
                    (outcome == Status.FAILED, *changes.values(), job_id),
                )
                if metrics is not None:
                    replace_results(connection, job_id, metrics)
                ended_at = changes.get("completed_at")
                add_event(connection, job_id, ended_at if isinstance(ended_at, float) else now)
        return is_running

    # Reads.

    def due(self, now: float, most: int) -> Iterator[tuple[str, str, int | None]]:
        """Read id, profile and wanted GPUs of the jobs that may be claimed, the next first."""
        return map(tuple, self.connection.execute(DUE, (now, most)))

    def running(self) -> list[Job]:
        """Return every job with an open attempt, cancelled ones included."""
        # The plus keeps SQLite from walking through all jobs in the order of their numbers.
        where = "WHERE open.job_id IS NOT NULL ORDER BY +jobs.number"
        return list(read_jobs(self.connection, where, ()))

    def status_of(self, request: Request) -> Status | None:
        """Return the status of the job of a request, if there is one."""
        rows = self._rows(_NEWEST, request.key, request.again)
        return Status(rows[0]["status"]) if rows else None

    def alike(self, request: Request) -> list[Job]:
        """Return the jobs that differ from a request in the fingerprint at most, newest first.

        The checkpoint's path is compared as well, because a run may have been moved.
        """
        where = "WHERE jobs.alike = ? ORDER BY jobs.number DESC"
        jobs = read_jobs(self.connection, where, [request.alike])
        return [job for job in jobs if job.request.checkpoint == request.checkpoint]

    def get(self, job_id: str) -> Job | None:
        """Return a job."""
        return read_job(self._connections.own, job_id)

    def ids_like(self, start: str, most: int) -> list[str]:
        """Return the ids that begin with a text, `most` of them at most."""
        query = "SELECT id FROM jobs WHERE id >= ? AND id < ? ORDER BY id LIMIT ?"
        return self._texts(query, start, f"{start}g", most)  # the letter after "f"

    def jobs(self, filters: Filters) -> list[Job]:
        """Return jobs, the newest first."""
        return list(self.newest(filters))

    def newest(self, filters: Filters, before: str | None = None) -> Iterator[Job]:
        """Read jobs one by one, the newest first; only jobs before the one of an id, if given."""
        where, values = condition_of(filters)
        if before is not None:
            where += " AND jobs.number < (SELECT number FROM jobs WHERE id = ?)"
            values.append(before)
        rest = f"WHERE {where} ORDER BY jobs.number DESC LIMIT COALESCE(?, -1)"
        return read_jobs(self.connection, rest, [*values, filters.limit])

    def position(self, job_id: str) -> int | None:
        """Return a queued job's place in the queue, 1 for the next; None if it is not queued."""
        if not self._rows("SELECT 1 FROM jobs WHERE id = ? AND status = 'queued'", job_id):
            return None
        ids = self.queued_ids()
        return ids.index(job_id) + 1 if job_id in ids else None  # it may have begun meanwhile

    def count_in_a_row(self, job_id: str, outcome: str) -> int:
        """Return how many attempts had an outcome since the job was submitted or last failed.

        Attempts that were interrupted in another way do not end the row: two kinds of
        interruption that take turns would otherwise never be bounded.
        """
        (row,) = self._rows(
            "SELECT COUNT(*) FROM attempts JOIN jobs ON jobs.id = attempts.job_id"
            " WHERE jobs.id = ? AND outcome = ?"
            " AND attempts.number > jobs.attempts_before"
            " AND attempts.number > (SELECT COALESCE(MAX(number), 0) FROM attempts AS other"
            " WHERE other.job_id = ? AND outcome = ?)",
            *(job_id, outcome, job_id, Status.FAILED),
        )
        return int(row[0])

    def counts(self) -> dict[Status, int]:
        """Return how many jobs there are of every status."""
        by_status = dict(
            map(tuple, self._rows("SELECT status, COUNT(*) FROM jobs GROUP BY status"))
        )
        return {status: by_status.get(status, 0) for status in Status}

    def queued_ids(self, most: int | None = None) -> list[str]:
        """Return the queued jobs, the next first; `most` of them at most."""
        return self._texts(QUEUE, -1 if most is None else most)

    def results(
        self, filters: Filters, after: int = 0, *, are_hidden_read: bool = False
    ) -> Iterator[Result]:
        """Read the results of completed jobs one by one, in the order in which they came.

        The filters' `limit` counts results; results up to the number `after` are left out.
        """
        where, values = condition_of(filters)
        where += "" if are_hidden_read else " AND hidden IS NULL"
        # SQLite reads the left table of a CROSS JOIN first: all results in order, or a run's jobs.
        tables = ("results CROSS JOIN jobs", "jobs CROSS JOIN results")[filters.run is not None]
        query = (
            f"SELECT {RESULT_COLUMNS} FROM {tables} ON jobs.id = results.job_id"  # noqa: S608
            " CROSS JOIN runs ON runs.id = jobs.run WHERE results.rowid > ?"
            f" AND jobs.status = 'completed' AND {where}"
            " ORDER BY results.rowid LIMIT COALESCE(?, -1)"
        )
        return map(as_result, self.connection.execute(query, [after, *values, filters.limit]))

    def events(self, since: int, most: int = 1000) -> list[JobEvent]:
        """Return the changes after a number, the oldest first, `most` at most."""
        rows = self._rows("SELECT * FROM events WHERE number > ? ORDER BY 1 LIMIT ?", since, most)
        return list(map(as_event, rows))
