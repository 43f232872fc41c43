"""The parts of the store: pins, directories, order, hidden results and runs.

Each method is one transaction, as those of `store.Store`, which has an object of every class here.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from unshard.containers.json_file import is_text
from unshard.evaluate.jobs import BASE_STEP, Job, Status, TrainingRun
from unshard.evaluate.pins.files import time_written
from unshard.evaluate.server.store.connections import Connections
from unshard.evaluate.server.store.runs import (
    RUNS,
    add_name,
    as_run,
    name_apart,
    place_job,
    record_run,
)
from unshard.evaluate.server.store.statements import (
    FORGETTABLE,
    IS_CALLED,
    NEEDS_PIN,
    add_event,
    as_request,
    storable,
)

_OF_RUN = f"run = ? AND profile = ? AND status = 'queued' AND step > {BASE_STEP}"
_OF_USER = f"{_OF_RUN} AND COALESCE(json_extract(request, '$.user'), '') = ?"
_WENT_BACK = "training went back:"


@dataclass(frozen=True, slots=True)
class PinRecords:
    """The pins of jobs that have not ended, and the runs with pins of this server."""

    connections: Connections

    def will_pin(self, run: Path) -> None:
        """Record that a run is about to get a pin, so that a killed server's pin is found."""
        recorded = "SELECT 1 FROM pinned_runs WHERE run = ?"
        if not self.connections.rows(recorded, str(run)):
            with self.connections.transaction() as connection:
                connection.execute("INSERT OR IGNORE INTO pinned_runs VALUES (?)", (str(run),))

    def list_needed(self) -> list[tuple[str, str]]:
        """Return id and pin of the jobs that are queued or have an open attempt."""
        where = f"pin IS NOT NULL AND {NEEDS_PIN}"
        query = f"SELECT id, pin FROM jobs WHERE {where} ORDER BY number"  # noqa: S608
        return list(map(tuple, self.connections.rows(query)))

    def is_needed(self, pin: str) -> bool:
        """Return whether `list_needed` has a pin."""
        query = f"SELECT 1 FROM jobs WHERE pin = ? AND {NEEDS_PIN} LIMIT 1"  # noqa: S608
        return is_text(pin) and bool(self.connections.rows(query, pin))  # all of ours are text

    def list_runs(self) -> list[str]:
        """Return the directories of the runs in which this server has made pins."""
        return self.connections.texts("SELECT run FROM pinned_runs")


@dataclass(frozen=True, slots=True)
class Leftovers:
    """The directories of ended jobs, and which of them are to be removed."""

    connections: Connections

    def forget(self, job_ids: Sequence[str], before: float) -> None:
        """Forget the attempts of jobs that ended before a time; the jobs stay, with their results.

        `list_forgotten` has them until `record_removed`, except jobs queued again meanwhile.
        """
        with self.connections.transaction() as connection:
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
        with self.connections.transaction() as connection:
            connection.execute("DELETE FROM forgotten WHERE job_id = ?", (job_id,))

    def list_ended(self, time_s: float) -> list[str]:
        """Return the jobs that ended before a time and have attempts to forget.

        The oldest are first; failed jobs are last.
        """
        order = "ORDER BY status = 'failed', completed_at, number"
        query = f"SELECT id FROM jobs WHERE {FORGETTABLE} {order}"  # noqa: S608
        return self.connections.texts(query, time_s)

    def list_forgotten(self) -> list[str]:
        """Return the jobs whose directories are to be removed."""
        return self.connections.texts("SELECT job_id FROM forgotten")


@dataclass(frozen=True, slots=True)
class Ordering:
    """The order of a run's queued jobs, where its profile does not take them as they come.

    Every statement that reads the queue sorts by `queued_at`. So jobs that are to begin earlier
    exchange these times with other jobs of their run.
    """

    connections: Connections

    def put_newest_first(self, job: Job) -> None:
        """Give the first places of a job's run and profile to the highest steps.

        Other jobs keep their places, and so do jobs that had an attempt, jobs without a step, and
        step 0.
        """
        query = (
            f"SELECT id, queued_at, step FROM jobs WHERE {_OF_RUN}"  # noqa: S608
            " AND attempts = attempts_before ORDER BY queued_at, number"
        )
        with self.connections.transaction() as connection:
            rows = connection.execute(query, (job.run.id, job.request.profile)).fetchall()
            before = -math.inf
            for place, row in zip(rows, sorted(rows, key=lambda row: -row["step"]), strict=True):
                # With equal times, the jobs' numbers would decide, which cannot be exchanged.
                before = max(place["queued_at"], math.nextafter(before, math.inf))
                if before != row["queued_at"]:
                    connection.execute(
                        "UPDATE jobs SET queued_at = ? WHERE id = ?", (before, row["id"])
                    )

    def skip(self, job: Job, most: int) -> list[str]:
        """Supersede the queued jobs of steps below a job's, except the `most` highest steps.

        Only jobs of the same run, profile and user are skipped, and never step 0. No other job
        replaces them.

        Returns:
            Their ids.
        """
        step, now = job.request.step or 0, time.time()
        of_run = (job.run.id, job.request.profile, job.request.user)
        query = f"SELECT DISTINCT step FROM jobs WHERE {_OF_USER} ORDER BY step DESC LIMIT ?"  # noqa: S608
        with self.connections.transaction() as connection:
            steps = [row["step"] for row in connection.execute(query, (*of_run, most))]
            rows = connection.execute(
                "UPDATE jobs SET status = ?, completed_at = ?, superseded_by = NULL,"  # noqa: S608
                f" error = ? WHERE {_OF_USER} AND step < ? AND step < ? RETURNING id",
                (
                    *(Status.SUPERSEDED, now),
                    f"skipped: {most} newer steps of the run wait (max_lag: {most})",
                    *(*of_run, step, min(steps, default=0)),
                ),
            ).fetchall()
            for row in rows:
                add_event(connection, row["id"], now)
        return [str(row["id"]) for row in rows]


@dataclass(frozen=True, slots=True)
class Hiding:
    """The jobs whose results curves and tables leave out, each with the reason."""

    connections: Connections

    def hide(self, job_id: str, why: str) -> None:
        """Leave a job's results out of curves and tables."""
        with self.connections.transaction() as connection:
            connection.execute("UPDATE jobs SET hidden = ? WHERE id = ?", (storable(why), job_id))
            add_event(connection, job_id, time.time())

    def show(self, job_id: str) -> None:
        """Show hidden results again; the reason is kept."""
        with self.connections.transaction() as connection:
            connection.execute(
                "UPDATE jobs SET was_hidden = COALESCE(hidden, was_hidden), hidden = NULL"
                " WHERE id = ?",
                (job_id,),
            )
            add_event(connection, job_id, time.time())

    def abandon(self, job: Job, written_at: float, *, is_sure: bool) -> list[str]:
        """Hide the jobs of the branch that training has left; return their ids.

        Training went back to before a job's step if that was written after a higher step was:
        jobs of higher steps whose files are older are of that branch, and so are jobs of the same
        step that evaluate other files. Copied files have other times: unless it `is_sure` that the
        step was saved again, they must have been written after those jobs were submitted, and into
        the same directory. Results that were shown again stay.
        """
        own, folder = job.request, PurePath(job.request.checkpoint).parent
        rows = self.connections.rows(
            "SELECT id, step, request FROM jobs WHERE run = ? AND step >= ? AND id <> ?"
            " AND created_at < ? AND hidden IS NULL",
            *(job.run.id, own.step, job.id, time.time() if is_sure else written_at),
        )
        abandoned = list[str]()
        for row in rows:
            other = as_request(row["request"])
            is_other = row["step"] != own.step or other.fingerprint != own.fingerprint
            before = time_written(other.stamps)
            is_older = before is not None and before < written_at
            if is_other and is_older and PurePath(other.checkpoint).parent == folder:
                abandoned.append(row["id"])
        return self._hide(abandoned, f"{_WENT_BACK} step {own.step} was saved after it")

    def is_saved_again(self, job: Job) -> bool:
        """Return whether an older job has evaluated other files at the path of its checkpoint."""
        rows = self.connections.rows(
            "SELECT 1 FROM jobs WHERE run = ? AND step = ? AND id <> ?"
            " AND json_extract(request, '$.checkpoint') = ?"
            " AND json_extract(request, '$.fingerprint') <> ? LIMIT 1",
            *(job.run.id, job.request.step, job.id),
            *(job.request.checkpoint, job.request.fingerprint),
        )
        return bool(rows)

    def hide_with_others(self, job: Job) -> list[str]:
        """Hide a new job of files whose other jobs are of a branch that training has left."""
        rows = self.connections.rows(
            "SELECT hidden FROM jobs WHERE run = ? AND step = ? AND hidden LIKE ?"
            " AND json_extract(request, '$.fingerprint') = ? LIMIT 1",
            *(job.run.id, job.request.step, f"{_WENT_BACK}%", job.request.fingerprint),
        )
        return self._hide([job.id], rows[0][0]) if rows else []

    def _hide(self, job_ids: Sequence[str], why: str) -> list[str]:
        hidden = list[str]()
        with self.connections.transaction() as connection:
            for job_id in job_ids:
                cursor = connection.execute(
                    "UPDATE jobs SET hidden = ? WHERE id = ? AND hidden IS NULL"
                    " AND COALESCE(was_hidden, '') NOT LIKE ?",
                    (why, job_id, f"{_WENT_BACK}%"),
                )
                if cursor.rowcount:
                    add_event(connection, job_id, time.time())
                    hidden.append(job_id)
        return hidden


@dataclass(frozen=True, slots=True)
class RunRecords:
    """The training runs that jobs belong to."""

    connections: Connections

    def get(self, run_id: str) -> TrainingRun | None:
        """Return the run of an id."""
        return next(iter(self._list("WHERE id = ?", run_id)), None)

    def at(self, directory: str) -> TrainingRun | None:
        """Return the run that was seen last in a directory."""
        return next(iter(self._list("WHERE directory = ? AND is_there", directory)), None)

    def named(self, name: str) -> list[TrainingRun]:
        """Return the runs of a name, the first recorded first."""
        return self._list("WHERE name = ? ORDER BY number", name)

    def called(self, text: str) -> list[TrainingRun]:
        """Return the runs that a text names; see `Filters`."""
        return self._list(f"WHERE id IN {IS_CALLED} ORDER BY number", text, text)

    def all(self) -> list[TrainingRun]:
        """Return every run, by label."""
        return self._list("ORDER BY label")

    def _list(self, rest: str, *values: str) -> list[TrainingRun]:
        return list(map(as_run, self.connections.rows(f"{RUNS} {rest}", *values)))

    def place_of(self, run_id: str) -> str:
        """Return the name of a run's directory below `best/`: it is unique, and stays."""
        return self.connections.texts("SELECT place FROM runs WHERE id = ?", run_id)[0]

    def is_written(self, run_id: str) -> bool:
        """Return whether the directory of a run has its id."""
        query = "SELECT 1 FROM runs WHERE id = ? AND is_written"
        return bool(self.connections.rows(query, run_id))

    def call(self, run_id: str, name: str) -> None:
        """Record another name of a run."""
        with self.connections.transaction() as connection:
            add_name(connection, run_id, name)

    def record(
        self, run_id: str, name: str, directory: str, *, is_written: bool | None = None
    ) -> TrainingRun:
        """Record the directory and name of a run, and whether its id is there; return it.

        None: the directory cannot be looked at, so the last record is kept.
        """
        with self.connections.transaction() as connection:
            connection.execute(
                "UPDATE runs SET is_there = FALSE WHERE directory = ? AND id <> ? AND ?1 <> ''"
                " AND is_there",
                (directory, run_id),
            )
            run = record_run(connection, run_id, name, directory)
            connection.execute(
                # Each submission comes here: without a change, it must not wait for the disk.
                "UPDATE runs SET is_there = TRUE, is_written = COALESCE(?1, is_written)"
                " WHERE id = ?2 AND NOT (is_there AND is_written = COALESCE(?1, is_written))",
                (is_written, run_id),
            )
            return run

    def join(self, run_id: str, other: str) -> None:
        """Give the jobs of another run to a run: both are the same training."""
        with self.connections.transaction() as connection:
            query = "SELECT number, request FROM jobs WHERE run = ?"
            for row in connection.execute(query, (other,)).fetchall():
                place_job(connection, row["number"], row["request"], run_id)
            connection.execute(
                "UPDATE OR IGNORE run_names SET run = ? WHERE run = ?", (run_id, other)
            )
            names = connection.execute("DELETE FROM runs WHERE id = ? RETURNING name", (other,))
            for row in names.fetchall():
                name_apart(connection, row["name"])
