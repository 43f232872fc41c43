"""The directories that ended jobs have left, and which of them are to be removed."""

from collections.abc import Sequence

from unshard.evaluate.server.store.connections import Connections
from unshard.evaluate.server.store.statements import FORGETTABLE


class Leftovers:
    """What the database knows of the directories of ended jobs."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def forget(self, job_ids: Sequence[str], before: float) -> None:
        """Forget the attempts of jobs that ended before a time; the jobs stay, with their results.

        Those of them that were not queued again in the meantime are in `list_forgotten` until
        `record_removed`.
        """
        with self._connections.transaction() as connection:
            for job_id in job_ids:
                marked = connection.execute(
                    "INSERT OR IGNORE INTO forgotten (job_id) SELECT id FROM jobs"  # noqa: S608
                    f" WHERE {FORGETTABLE} AND id = ?",
                    (before, job_id),
                )
                if marked.rowcount:
                    connection.execute("DELETE FROM attempts WHERE job_id = ?", (job_id,))
                    connection.execute("UPDATE jobs SET results = NULL WHERE id = ?", (job_id,))

    def record_removed(self, job_id: str) -> None:
        """Record that the directory of a job is removed."""
        with self._connections.transaction() as connection:
            connection.execute("DELETE FROM forgotten WHERE job_id = ?", (job_id,))

    def list_ended(self, time_s: float) -> list[str]:
        """Return the jobs that ended before a time and have attempts to forget.

        The oldest are first, those that failed are last.
        """
        order = "ORDER BY status = 'failed', completed_at, number"
        query = f"SELECT id FROM jobs WHERE {FORGETTABLE} {order}"  # noqa: S608
        return self._connections.texts(query, time_s)

    def list_forgotten(self) -> list[str]:
        """Return the jobs whose directories are to be removed."""
        return self._connections.texts("SELECT job_id FROM forgotten")
