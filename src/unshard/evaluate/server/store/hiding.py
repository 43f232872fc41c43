"""Which results are left out of curves and tables: what somebody hid, and what training left."""

import time
from collections.abc import Sequence
from pathlib import PurePath

from unshard.evaluate.jobs import Job
from unshard.evaluate.pins.files import time_written
from unshard.evaluate.server.store.connections import Connections
from unshard.evaluate.server.store.statements import add_event, as_request, storable

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

    def abandon(self, job: Job, written_at: float, *, is_sure: bool) -> list[str]:
        """Hide the jobs of the branch that training has left; return their ids.

        Training went back to before a job's step if that was written after a higher step was:
        jobs of higher steps whose files are older are of that branch, and so are those of its own
        step that evaluate other files. Copied files have other times: unless it `is_sure` that the
        step was saved again, they must have been written after those jobs were submitted, and into
        the same directory. What was shown again stays.
        """
        own, folder = job.request, PurePath(job.request.checkpoint).parent
        rows = self._connections.rows(
            "SELECT id, step, request FROM jobs WHERE run = ? AND step >= ? AND id <> ?"
            " AND created_at < ? AND hidden IS NULL",
            *(job.run.id, own.step, job.id, time.time() if is_sure else written_at),
        )
        left = list[str]()
        for row in rows:
            other = as_request(row["request"])
            is_other = row["step"] != own.step or other.fingerprint != own.fingerprint
            before = time_written(other.stamps)
            is_older = before is not None and before < written_at
            if is_other and is_older and PurePath(other.checkpoint).parent == folder:
                left.append(row["id"])
        return self._hide(left, f"{_WENT_BACK} step {own.step} was saved after it")

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
        return self._hide([job.id], rows[0][0]) if rows else []

    def _hide(self, job_ids: Sequence[str], why: str) -> list[str]:
        hidden = list[str]()
        with self._connections.transaction() as connection:
            for job_id in job_ids:
                done = connection.execute(
                    "UPDATE jobs SET hidden = ? WHERE id = ? AND hidden IS NULL"
                    " AND COALESCE(was_hidden, '') NOT LIKE ?",
                    (why, job_id, f"{_WENT_BACK}%"),
                )
                if done.rowcount:
                    add_event(connection, job_id, time.time())
                    hidden.append(job_id)
        return hidden
