"""What the database knows of what jobs have on the disk: their pins, and their directories."""

from collections.abc import Sequence
from pathlib import Path

from unshard.containers.json_file import is_text
from unshard.evaluate.server.store.connections import Connections
from unshard.evaluate.server.store.statements import FORGETTABLE, NEEDS_PIN


class PinRecords:
    """The pins of jobs that have not ended, and the runs in which pins were made."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def will_pin(self, run: Path) -> None:
        """Record that a pin is about to be made in a run: after a kill it is looked for there."""
        known = "SELECT 1 FROM pinned_runs WHERE run = ?"
        if not self._connections.rows(known, str(run)):
            with self._connections.transaction() as connection:
                connection.execute("INSERT OR IGNORE INTO pinned_runs VALUES (?)", (str(run),))

    def list_needed(self) -> list[tuple[str, str]]:
        """Return id and pin of the jobs that are queued or have an open attempt."""
        where = f"pin IS NOT NULL AND {NEEDS_PIN}"
        query = f"SELECT id, pin FROM jobs WHERE {where} ORDER BY number"  # noqa: S608
        return list(map(tuple, self._connections.rows(query)))

    def is_needed(self, pin: str) -> bool:
        """Return whether a job needs a pin: see `list_needed`."""
        query = f"SELECT 1 FROM jobs WHERE pin = ? AND {NEEDS_PIN} LIMIT 1"  # noqa: S608
        return is_text(pin) and bool(self._connections.rows(query, pin))  # all of ours are text

    def list_runs(self) -> list[str]:
        """Return the directories of the runs in which this server has made pins."""
        return self._connections.texts("SELECT run FROM pinned_runs")


class Leftovers:
    """The directories that ended jobs have left, and which of them are to be removed."""

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
