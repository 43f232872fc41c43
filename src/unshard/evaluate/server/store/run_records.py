"""Which training runs the jobs belong to."""

from unshard.evaluate.jobs import TrainingRun
from unshard.evaluate.server.store.connections import Connections
from unshard.evaluate.server.store.runs import (
    RUNS,
    add_name,
    as_run,
    name_apart,
    place_job,
    record_run,
)
from unshard.evaluate.server.store.statements import IS_CALLED


class RunRecords:
    """The runs that jobs belong to."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def get(self, run_id: str) -> TrainingRun | None:
        """Return the run of an id."""
        found = self._connections.rows(f"{RUNS} WHERE id = ?", run_id)
        return as_run(found[0]) if found else None

    def at(self, directory: str) -> TrainingRun | None:
        """Return the run that was seen last in a directory."""
        found = self._connections.rows(f"{RUNS} WHERE directory = ? AND is_there", directory)
        return as_run(found[0]) if found else None

    def place_of(self, run_id: str) -> str:
        """Return what a run's directory is called: a name that no other run has, and that stays."""
        return self._connections.texts("SELECT place FROM runs WHERE id = ?", run_id)[0]

    def is_written(self, run_id: str) -> bool:
        """Return whether the directory of a run has its id."""
        query = "SELECT 1 FROM runs WHERE id = ? AND is_written"
        return bool(self._connections.rows(query, run_id))

    def named(self, name: str) -> list[TrainingRun]:
        """Return the runs of a name, that first which was known first."""
        query = f"{RUNS} WHERE name = ? ORDER BY number"
        return list(map(as_run, self._connections.rows(query, name)))

    def called(self, text: str) -> list[TrainingRun]:
        """Return the runs that a text means; see `Filters`."""
        query = f"{RUNS} WHERE id IN {IS_CALLED} ORDER BY number"
        return list(map(as_run, self._connections.rows(query, text, text)))

    def all(self) -> list[TrainingRun]:
        """Return every run, by label."""
        return list(map(as_run, self._connections.rows(f"{RUNS} ORDER BY label")))

    def call(self, run_id: str, name: str) -> None:
        """Record another name by which somebody calls a run."""
        with self._connections.transaction() as connection:
            add_name(connection, run_id, name)

    def record(
        self, run_id: str, name: str, directory: str, *, is_written: bool | None = None
    ) -> TrainingRun:
        """Record where a run is, what it is called, and if its id is there; return it.

        None: whether its id is there cannot be seen, and stays as it was.
        """
        with self._connections.transaction() as connection:
            connection.execute(
                "UPDATE runs SET is_there = FALSE WHERE directory = ? AND id <> ? AND ?1 <> ''"
                " AND is_there",
                (directory, run_id),
            )
            run = record_run(connection, run_id, name, directory)
            connection.execute(
                # Each submission comes here: what changes nothing must not wait for the disk.
                "UPDATE runs SET is_there = TRUE, is_written = COALESCE(?1, is_written)"
                " WHERE id = ?2 AND NOT (is_there AND is_written = COALESCE(?1, is_written))",
                (is_written, run_id),
            )
            return run

    def join(self, run_id: str, other: str) -> None:
        """Have the jobs of another run belong to a run, which is the same one."""
        with self._connections.transaction() as connection:
            query = "SELECT number, request FROM jobs WHERE run = ?"
            for row in connection.execute(query, (other,)).fetchall():
                place_job(connection, row["number"], row["request"], run_id)
            connection.execute(
                "UPDATE OR IGNORE run_names SET run = ? WHERE run = ?", (run_id, other)
            )
            names = connection.execute("DELETE FROM runs WHERE id = ? RETURNING name", (other,))
            for row in names.fetchall():
                name_apart(connection, row["name"])
