"""Training runs as rows: each is a directory; several may have one name."""

import secrets
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath

from unshard.evaluate.jobs import Request, TrainingRun
from unshard.evaluate.run_folder import RunFolder
from unshard.evaluate.server.store.statements import as_request, request_as_json
from unshard.read.step_names import step_of_parents
from unshard.stores.remote_path import path_of

RUNS = "SELECT id, name, directory, label FROM runs"  # the columns of `as_run`
_SHORT = 6  # characters of an id


def as_run(row: Sequence[str]) -> TrainingRun:
    """Return a run from a row of `RUNS`."""
    return TrainingRun(*row)


def directory_of(request: Request) -> str | None:
    """Return the run's directory as a checkpoint's path implies it; None if it does not."""
    path = path_of(request.checkpoint)
    if (step_dir := step_of_parents(path, sharded=False)) is not None:
        return str(RunFolder.around(step_dir[0]).path)
    return str(path) if request.run == RunFolder(path).name else None


def new_run_id() -> str:
    """Return the id of a new run."""
    return secrets.token_hex(8)


def run_called(connection: sqlite3.Connection, name: str) -> TrainingRun:
    """Return the run of a name that has no directory; record it if there is none."""
    query = f"{RUNS} WHERE name = ? AND directory = ''"
    row = connection.execute(query, (name,)).fetchone()
    return record_run(connection, new_run_id(), name, "") if row is None else as_run(row)


def record_run(
    connection: sqlite3.Connection, run_id: str, name: str, directory: str
) -> TrainingRun:
    """Write a run; update the labels of all runs with its new and its old name."""
    row = connection.execute(f"{RUNS} WHERE id = ?", (run_id,)).fetchone()
    before = None if row is None else as_run(row)
    if before is None or (before.name, before.directory) != (name, directory):
        connection.execute(
            "INSERT INTO runs (id, name, directory, label, place) VALUES (?1, ?2, ?3, '',"
            " IIF(EXISTS (SELECT 1 FROM runs WHERE place = ?2), ?2 || '-' || substr(?1, 1, 8), ?2))"
            " ON CONFLICT (id) DO UPDATE SET name = excluded.name, directory = excluded.directory",
            (run_id, name, directory),
        )
        add_name(connection, run_id, name)
        for changed in {name, name if before is None else before.name}:
            name_apart(connection, changed)
    return as_run(connection.execute(f"{RUNS} WHERE id = ?", (run_id,)).fetchone())


def add_name(connection: sqlite3.Connection, run_id: str, name: str) -> None:
    """Write a name of a run, which can be looked up by every name that it ever had."""
    connection.execute("INSERT OR IGNORE INTO run_names VALUES (?, ?)", (name, run_id))


def name_apart(connection: sqlite3.Connection, name: str) -> None:
    """Write the labels of the runs of a name: the name, and the distinct part of their paths."""
    query = "SELECT id, directory FROM runs WHERE name = ? ORDER BY number"
    parts = tell_apart(dict(map(tuple, connection.execute(query, (name,)))))
    labels = [(f"{name} ({part})" if part else name, key) for key, part in parts.items()]
    connection.executemany("UPDATE runs SET label = ? WHERE id = ?", labels)


def place_job(connection: sqlite3.Connection, number: int, request: str, run_id: str) -> None:
    """Give a job to a run, and the job the key that this run implies."""
    placed = replace(as_request(request), run_id=run_id)
    connection.execute(
        # One request may have been two jobs, by two names of one directory: `again` keeps both.
        "UPDATE jobs SET again = IIF(EXISTS (SELECT 1 FROM jobs AS other WHERE other.key = ?1"
        " AND other.number <> ?5), number, again), key = ?1, alike = ?2, request = ?3, run = ?4"
        " WHERE number = ?5",
        (placed.key, placed.alike, request_as_json(placed), run_id, number),
    )


def tell_apart(directories: Mapping[str, str]) -> dict[str, str]:
    """Return a text that distinguishes each directory, by the ids of their runs; "" for only one.

    The names that all paths end with are dropped, and of the rest as few names as necessary are
    taken from the end: "a" and "b" for `/x/a/output` and `/x/b/output`. Equal directories get
    their ids.
    """
    if len(directories) < 2:
        return dict.fromkeys(directories, "")
    paths = {key: PurePath(path.lstrip("/")).parts for key, path in directories.items()}
    shortest, shared = min(map(len, paths.values())), 0
    while shared < shortest - 1 and len({parts[-1 - shared] for parts in paths.values()}) == 1:
        shared += 1
    heads = {key: parts[: len(parts) - shared] for key, parts in paths.items()}
    for length in range(1, max(map(len, heads.values())) + 1):
        ends = {key: "-".join(parts[-length:]) for key, parts in heads.items()}
        if len(set(ends.values())) == len(ends):
            return ends
    return {key: key[:_SHORT] for key in directories}
