"""Which results are left out of curves and tables: what somebody hid, and what training left."""

import time

from unshard.evaluate.jobs import Job
from unshard.evaluate.server.store.connections import Connections
from unshard.evaluate.server.store.statements import add_event, storable


class Hiding:
    """The jobs whose results are hidden, each with the reason."""

    def __init__(self, connections: Connections) -> None:
        self._transaction = connections.transaction

    def hide(self, job_id: str, why: str) -> None:
        """Leave a job's results out of curves and tables."""
        with self._transaction() as connection:
            connection.execute("UPDATE jobs SET hidden = ? WHERE id = ?", (storable(why), job_id))
            add_event(connection, job_id, time.time())

    def show(self, job_id: str) -> None:
        """Show results that are hidden again; the reason is kept."""
        with self._transaction() as connection:
            connection.execute(
                "UPDATE jobs SET was_hidden = COALESCE(hidden, was_hidden), hidden = NULL"
                " WHERE id = ?",
                (job_id,),
            )
            add_event(connection, job_id, time.time())

    def abandon(self, job: Job, written_at: float) -> list[str]:
        """Hide the jobs of the branch that training has left; return their ids.

        Training went back to before a job's step if that was written after a higher step was
        submitted: jobs of higher steps that were submitted earlier are of that branch, and so are
        those of its own step that evaluate other files. What somebody shows again stays.
        """
        step, own = job.request.step, job.request.fingerprint
        why = f"training went back: step {step} was saved again, or for the first time, after it"
        with self._transaction() as connection:
            rows = connection.execute(
                "UPDATE jobs SET hidden = ? WHERE run = ? AND created_at < ? AND hidden IS NULL"
                " AND was_hidden IS NULL AND step >= ? AND (step > ? OR id <> ?"
                " AND json_extract(request, '$.fingerprint') <> ?) RETURNING id",
                (why, job.run.id, written_at, step, step, job.id, own),
            ).fetchall()
            for row in rows:
                add_event(connection, row["id"], time.time())
        return [str(row["id"]) for row in rows]
