"""Which pins the jobs need, and in which runs pins were made."""

from pathlib import Path

from unshard.containers.json_file import is_text
from unshard.evaluate.server.store.connections import Connections
from unshard.evaluate.server.store.statements import NEEDS_PIN


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
