"""Which results are left out of curves and tables: what somebody hid, and what training left."""

import time
from collections.abc import Sequence

from unshard.evaluate.jobs import Job
from unshard.evaluate.server.store.connections import Connections
from unshard.evaluate.server.store.statements import add_event, storable

_WENT_BACK = "training went back:"


class Hiding:
    """The jobs whose results are hidden, each with the reason."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def hide(self, job_id: str, why: str) -> None:
        """Leave a job's results out of curves and tables."""
        with self._connections.transaction() as connection:
            connection.execute("UPDATE jobs SET hidden = ? WHERE id = ?", (storable(why), job_id))
            add_event(connection, job_id, time.time())

    def show(self, job_id: str) -> None:
        """Show results that are hidden again; the reason is kept."""
        with self._connections.transaction() as connection:
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
        those of its own step that evaluate other files. What was shown again stays.
        """
        step, own = job.request.step, job.request.fingerprint
        return self._hide(
            "run = ? AND created_at < ? AND step >= ? AND (step > ? OR id <> ?"
            " AND json_extract(request, '$.fingerprint') <> ?)",
            (job.run.id, written_at, step, step, job.id, own),
            f"{_WENT_BACK} step {step} was saved after it",
        )

    def is_saved_again(self, job: Job) -> bool:
        """Return whether an older job has evaluated other files at the place of its checkpoint."""
        rows = self._connections.rows(
            "SELECT 1 FROM jobs WHERE run = ? AND step = ? AND id <> ?"
            " AND json_extract(request, '$.checkpoint') = ?"
            " AND json_extract(request, '$.fingerprint') <> ? LIMIT 1",
            *(job.run.id, job.request.step, job.id),
            *(job.request.checkpoint, job.request.fingerprint),
        )
        return bool(rows)

    def hide_with_others(self, job: Job) -> list[str]:
        """Hide a new job of files whose other jobs are of a branch that training has left."""
        rows = self._connections.rows(
            "SELECT hidden FROM jobs WHERE run = ? AND step = ? AND hidden LIKE ?"
            " AND json_extract(request, '$.fingerprint') = ? LIMIT 1",
            *(job.run.id, job.request.step, f"{_WENT_BACK}%", job.request.fingerprint),
        )
        return self._hide("id = ?", (job.id,), rows[0][0]) if rows else []

    def _hide(self, where: str, values: Sequence[str | float | None], why: str) -> list[str]:
        with self._connections.transaction() as connection:
            rows = connection.execute(
                f"UPDATE jobs SET hidden = ? WHERE {where} AND hidden IS NULL"  # noqa: S608
                f" AND COALESCE(was_hidden, '') NOT LIKE '{_WENT_BACK}%' RETURNING id",
                (why, *values),
            ).fetchall()
            for row in rows:
                add_event(connection, row["id"], time.time())
        return [str(row["id"]) for row in rows]
