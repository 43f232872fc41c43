"""What is still to be told about jobs that have ended: one row for each, until it was delivered."""

import json
import secrets
import sqlite3
from dataclasses import asdict, dataclass

from unshard.evaluate.jobs import Status
from unshard.evaluate.server.store.connections import Connections
from unshard.evaluate.server.store.statements import read_job

MOST_WAITING = 10_000
"""How many are kept; the oldest are dropped for newer ones."""

_TOLD = ("run", "step", "weights", "profile", "tasks", "checkpoint")


@dataclass(frozen=True, slots=True)
class Delivery:
    """What is to be told.

    Attributes:
        id: the same in every try.
        body: JSON.
        tries: how many there were.
    """

    id: str
    job_id: str
    body: str
    tries: int


def record_end(connection: sqlite3.Connection, job_id: str, at: float) -> None:
    """Record that the end of a job is to be told, if it is completed or failed."""
    job = read_job(connection, job_id)
    if job is None or job.status not in {Status.COMPLETED, Status.FAILED}:
        return
    delivery, request = secrets.token_hex(8), asdict(job.request)
    body = {
        "delivery": delivery,
        "job": job.id,
        "status": job.status,
        **{name: request[name] for name in _TOLD},
        "completed_at": job.completed_at,
        "error": job.error,
        "metrics": dict(job.metrics),
        "stderr": dict(job.stderr),
    }
    connection.execute(
        "INSERT INTO deliveries (id, job_id, body, due_at) VALUES (?, ?, ?, ?)",
        (delivery, job_id, json.dumps(body), at),
    )
    connection.execute(
        "DELETE FROM deliveries WHERE number <= (SELECT MAX(number) FROM deliveries) - ?",
        (MOST_WAITING,),
    )


class Deliveries:
    """The deliveries that wait, in the order in which jobs ended.

    Attributes:
        are_wanted: whether ends of jobs are recorded at all.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self.are_wanted = False

    def next_due(self, now: float, longest_s: float) -> Delivery | None:
        """Return the oldest that is due; one further away than `longest_s` is due, too.

        It seems to be that far away if the clock was set back.
        """
        rows = self._connections.rows(
            "SELECT id, job_id, body, tries FROM deliveries"
            " WHERE due_at <= ? OR due_at > ? ORDER BY number LIMIT 1",
            now,
            now + longest_s,
        )
        return Delivery(*rows[0]) if rows else None

    def remove(self, delivery_id: str) -> None:
        """Remove one that was delivered, or given up."""
        with self._connections.transaction() as connection:
            connection.execute("DELETE FROM deliveries WHERE id = ?", (delivery_id,))

    def postpone(self, delivery_id: str, due_at: float) -> None:
        """Record a try that failed, and when the next is due."""
        with self._connections.transaction() as connection:
            connection.execute(
                "UPDATE deliveries SET tries = tries + 1, due_at = ? WHERE id = ?",
                (due_at, delivery_id),
            )
