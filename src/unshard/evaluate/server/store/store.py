"""The jobs, their attempts and results in one SQLite database, which is the truth.

Every method is one transaction: a process that is killed at any statement leaves the state before
or after it. Any number of threads and processes may use one database; each thread has a connection.
"""

import secrets
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path

from unshard.evaluate.jobs import Job, Phase, Process, Request, Status
from unshard.evaluate.server.store.reading import CLAIMABLE, FORGETTABLE, Records
from unshard.evaluate.server.store.schema import gpus_as_json, request_as_json

__all__ = ["Store"]

_AGAIN = (Status.FAILED, Status.CANCELLED, Status.EXPIRED, Status.SUPERSEDED)
_EVENTS = 100_000
_LONGEST_ERROR = 20_000  # characters


class Store(Records):
    """The jobs and what became of them: `Records`, and how they change."""

    # What clients do.

    def submit(self, request: Request, *, pin: str | None) -> tuple[Job, bool]:
        """Queue a request; return its job, and whether there was none of its key.

        The same key again returns the same job. A job that failed, was cancelled or expired is
        queued anew, with the new request's checkpoint and pin; under a new id if its attempts were
        forgotten, because the directory that its old id names may be being removed.
        """
        now, key = time.time(), request.key
        with self._transaction() as connection:
            found = connection.execute("SELECT id, status FROM jobs WHERE key = ?", (key,))
            row = found.fetchone()
            if row is None:
                job_id = _new_id()
                connection.execute(
                    "INSERT INTO jobs (id, key, alike, request, run, step, weights, profile,"
                    " status, created_at, queued_at, pin)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        *(job_id, key, request.alike, request_as_json(request)),
                        *(request.run, request.step),
                        *(request.weights, request.profile, Status.QUEUED, now, now, pin),
                    ),
                )
                _tell(connection, job_id, now)
            else:
                job_id = row["id"]
                if Status(row["status"]) in _AGAIN:
                    job_id = _renamed_if_forgotten(connection, job_id)
                    connection.execute(
                        "UPDATE jobs SET status = ?, request = ?, pin = ?, queued_at = ?,"
                        " not_before = 0, failures = 0, phase = NULL, error = NULL,"
                        " started_at = NULL, completed_at = NULL, superseded_by = NULL,"
                        " attempts_before = attempts"
                        " WHERE id = ?",
                        (Status.QUEUED, request_as_json(request), pin, now, job_id),
                    )
                    _tell(connection, job_id, now)
            job = self._one(connection, job_id)
        if job is None:
            raise RuntimeError(f"job {job_id}: not there after it was written")
        return job, row is None

    def cancel(self, job_id: str) -> bool:
        """Cancel a job that is queued or running; tell whether it was.

        The process of a running one is ended by the scheduler, and is open until then.
        """
        return self._stop(job_id, Status.CANCELLED, (Status.QUEUED,))

    def supersede(self, job_id: str, by: str) -> bool:
        """End a job in whose place another has come; return whether it was queued, running, failed.

        The process of a running one is ended by the scheduler, and is open until then.
        """
        return self._stop(job_id, Status.SUPERSEDED, (Status.QUEUED, Status.FAILED), by)

    def _stop(
        self, job_id: str, status: Status, among: tuple[Status, ...], by: str | None = None
    ) -> bool:
        marks = ", ".join("?" * len(among))
        why = None if by is None else f"saved again since: see job {by}"
        with self._transaction() as connection:
            done = connection.execute(
                "UPDATE jobs SET status = ?, phase = NULL, completed_at = ?,"  # noqa: S608
                " error = COALESCE(?, error), superseded_by = ?"
                f" WHERE id = ? AND status IN (?, {marks})",
                (status, time.time(), why, by, job_id, Status.RUNNING, *among),
            )
            if done.rowcount:
                _tell(connection, job_id, time.time())
            return done.rowcount > 0

    def repin(self, job_id: str, pin: str) -> None:
        """Give a job that is queued or running another pin: its next attempt reads that."""
        with self._transaction() as connection:
            connection.execute(
                "UPDATE jobs SET pin = ? WHERE id = ? AND status IN (?, ?)",
                (pin, job_id, Status.QUEUED, Status.RUNNING),
            )

    def will_pin(self, run: Path) -> None:
        """Record that a pin is about to be made in a run: after a kill it is looked for there."""
        known = "SELECT 1 FROM pinned_runs WHERE run = ?"
        if self._connection.execute(known, (str(run),)).fetchone() is None:
            with self._transaction() as connection:
                connection.execute("INSERT OR IGNORE INTO pinned_runs VALUES (?)", (str(run),))

    # What a scheduler does.

    def claim(self, now: float, job_id: str | None = None) -> Job | None:
        """Begin an attempt of the oldest job that is queued and due, or of this one if it is.

        Whoever else claims at the same time gets another job.
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
                "INSERT INTO attempts (job_id, number, began_at) VALUES (?, ?, ?)",
                (row["id"], row["attempts"], now),
            )
            _tell(connection, row["id"], now)
            return self._one(connection, row["id"])

    def attempt_started(self, job_id: str, process: Process) -> None:
        """Record the process of the open attempt."""
        gpus = gpus_as_json(process.gpus)
        with self._transaction() as connection:
            connection.execute(
                "UPDATE attempts SET pid = ?, started = ?, boot = ?, gpus = ?, directory = ?"
                " WHERE job_id = ? AND ended_at IS NULL",
                (process.pid, process.started, process.boot, gpus, process.directory, job_id),
            )

    def phase(self, job_id: str, phase: Phase) -> None:
        """Record what a running job is doing now."""
        with self._transaction() as connection:
            done = connection.execute(
                "UPDATE jobs SET phase = ? WHERE id = ? AND status = ? AND phase IS NOT ?",
                (phase, job_id, Status.RUNNING, phase),
            )
            if done.rowcount:
                _tell(connection, job_id, time.time())

    def complete(self, job_id: str, metrics: Mapping[str, float], results: Path | None) -> bool:
        """End the open attempt with what was measured; tell whether the job was still running."""
        file = None if results is None else str(results)
        with self._ending(job_id, Status.COMPLETED) as (connection, still):
            if still:
                connection.execute(
                    "UPDATE jobs SET status = ?, completed_at = ?, error = NULL, results = ?"
                    " WHERE id = ?",
                    (Status.COMPLETED, time.time(), file, job_id),
                )
                connection.execute("DELETE FROM results WHERE job_id = ?", (job_id,))
                connection.executemany(
                    "INSERT INTO results (job_id, metric, value) VALUES (?, ?, ?)",
                    [(job_id, name, value) for name, value in _storable_names(metrics).items()],
                )
        return still

    def fail(self, job_id: str, error: str, retry_at: float | None) -> bool:
        """End the open attempt as failed; None: for good, else the job is due again then."""
        status = Status.FAILED if retry_at is None else Status.QUEUED
        completed = time.time() if retry_at is None else None
        with self._ending(job_id, Status.FAILED) as (connection, still):
            if still:
                connection.execute(
                    "UPDATE jobs SET status = ?, completed_at = ?, error = ?, not_before = ?,"
                    " failures = failures + 1 WHERE id = ?",
                    (status, completed, _error(error), retry_at or 0, job_id),
                )
        return still

    def expire(self, job_id: str, why: str) -> bool:
        """End the open attempt: the checkpoint is gone."""
        with self._ending(job_id, Status.EXPIRED) as (connection, still):
            if still:
                connection.execute(
                    "UPDATE jobs SET status = ?, completed_at = ?, error = ? WHERE id = ?",
                    (Status.EXPIRED, time.time(), _error(why), job_id),
                )
        return still

    def requeue(self, job_id: str, why: str) -> bool:
        """End the open attempt as lost; the job keeps its place in the queue, and its retries."""
        return self._queue_again(job_id, "lost", why, 0)

    def postpone(self, job_id: str, outcome: str, why: str, due_at: float) -> bool:
        """End the open attempt for what may pass; the job is due again then, with its retries."""
        return self._queue_again(job_id, outcome, why, due_at)

    def _queue_again(self, job_id: str, outcome: str, why: str, due_at: float) -> bool:
        with self._ending(job_id, outcome) as (connection, still):
            if still:
                connection.execute(
                    "UPDATE jobs SET status = ?, started_at = NULL, not_before = ?, error = ?"
                    " WHERE id = ?",
                    (Status.QUEUED, due_at, _error(why), job_id),
                )
        return still

    def release(self, job_id: str) -> None:
        """End the open attempt of a job that was cancelled: its process is gone."""
        with self._ending(job_id, Status.CANCELLED):
            pass

    # What retention does.

    def forget(self, job_ids: Sequence[str], before: float) -> None:
        """Forget the attempts of jobs that ended before a time; the jobs stay, with their results.

        Those of them that were not queued again in the meantime are `forgotten` until
        `forgotten_is_gone`.
        """
        with self._transaction() as connection:
            for job_id in job_ids:
                marked = connection.execute(
                    "INSERT OR IGNORE INTO forgotten (job_id) SELECT id FROM jobs"  # noqa: S608
                    f" WHERE {FORGETTABLE} AND id = ?",
                    (before, job_id),
                )
                if marked.rowcount:
                    connection.execute("DELETE FROM attempts WHERE job_id = ?", (job_id,))
                    connection.execute("UPDATE jobs SET results = NULL WHERE id = ?", (job_id,))

    def forgotten_is_gone(self, job_id: str) -> None:
        """Record that the directory of a job is removed."""
        with self._transaction() as connection:
            connection.execute("DELETE FROM forgotten WHERE job_id = ?", (job_id,))

    @contextmanager
    def _ending(self, job_id: str, outcome: str) -> Iterator[tuple[sqlite3.Connection, bool]]:
        """End the open attempt; yield whether the job still is as the attempt left it."""
        now = time.time()
        with self._transaction() as connection:
            found = connection.execute("SELECT status FROM jobs WHERE id = ?", (job_id,)).fetchone()
            still = found is not None and found["status"] == Status.RUNNING
            yield connection, still
            connection.execute(
                "UPDATE attempts SET ended_at = ?, outcome = ?"
                " WHERE job_id = ? AND ended_at IS NULL",
                (now, outcome if still else Status.CANCELLED, job_id),
            )
            if still:
                connection.execute("UPDATE jobs SET phase = NULL WHERE id = ?", (job_id,))
                _tell(connection, job_id, now)


def _new_id() -> str:
    return secrets.token_hex(8)


def _renamed_if_forgotten(connection: sqlite3.Connection, job_id: str) -> str:
    """Give a job a new id if its attempts were forgotten; return the id that it has then."""
    renamed = connection.execute(
        "UPDATE jobs SET id = ? WHERE id = ? AND attempts > 0"
        " AND NOT EXISTS (SELECT 1 FROM attempts WHERE job_id = jobs.id) RETURNING id",
        (_new_id(), job_id),
    ).fetchone()
    return job_id if renamed is None else str(renamed["id"])


def _error(text: str) -> str:
    """Return an error as it is kept: an evaluator may have put a book into it."""
    return _storable(text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}...")


def _storable(text: str) -> str:
    """Return a text that SQLite takes: a file's name may hold bytes that are no UTF-8."""
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


def _tell(connection: sqlite3.Connection, job_id: str, at: float) -> None:
    """Append a job's change, and forget the oldest."""
    connection.execute(
        "INSERT INTO events (job_id, status, phase, at) SELECT id, status, phase, ? FROM jobs"
        " WHERE id = ?",
        (at, job_id),
    )
    connection.execute(
        "DELETE FROM events WHERE number <= (SELECT MAX(number) FROM events) - ?", (_EVENTS,)
    )
