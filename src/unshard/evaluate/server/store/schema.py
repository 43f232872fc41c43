"""The tables of the store, as a list of migrations.

`PRAGMA user_version` is the number of migrations that a database has had. A new database has them
all, so old and new databases end with the same tables.

An attempt without an end is open: it may have a process, and while it is open its job is not begun
again. Times are seconds since the epoch.
"""

import logging
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from unshard.errors import UsageError
from unshard.evaluate.jobs import Settings, Status
from unshard.evaluate.run_folder import PINS
from unshard.evaluate.server.store.runs import (
    add_name,
    directory_of,
    new_run_id,
    place_job,
    record_run,
)
from unshard.evaluate.server.store.statements import as_request, settings_as_json
from unshard.read.step_names import STATE_FOLDER

_log = logging.getLogger(__name__)

_TABLES = """
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    key TEXT NOT NULL UNIQUE,
    request TEXT NOT NULL,
    run TEXT NOT NULL,
    step INTEGER,
    weights TEXT NOT NULL,
    profile TEXT NOT NULL,
    status TEXT NOT NULL,
    phase TEXT,
    created_at REAL NOT NULL,
    queued_at REAL NOT NULL,
    not_before REAL NOT NULL DEFAULT 0,
    started_at REAL,
    completed_at REAL,
    pin TEXT,
    attempts INTEGER NOT NULL DEFAULT 0,
    failures INTEGER NOT NULL DEFAULT 0,
    error TEXT,
    results TEXT,
    superseded_by TEXT,
    attempts_before INTEGER NOT NULL DEFAULT 0,
    alike TEXT
);
CREATE INDEX jobs_by_status ON jobs (status, queued_at, number);
CREATE TABLE attempts (
    job_id TEXT NOT NULL REFERENCES jobs (id),
    number INTEGER NOT NULL,
    began_at REAL NOT NULL,
    ended_at REAL,
    outcome TEXT,
    pid INTEGER,
    started INTEGER,
    boot TEXT,
    gpus TEXT,
    directory TEXT,
    PRIMARY KEY (job_id, number)
);
CREATE UNIQUE INDEX one_open_attempt ON attempts (job_id) WHERE ended_at IS NULL;
CREATE TABLE results (
    job_id TEXT NOT NULL REFERENCES jobs (id),
    metric TEXT NOT NULL,
    value REAL NOT NULL,
    stderr REAL,
    PRIMARY KEY (job_id, metric)
);
CREATE TABLE events (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    job_id TEXT NOT NULL,
    status TEXT NOT NULL,
    phase TEXT,
    at REAL NOT NULL
);
"""

_ADDITIONS = (
    "CREATE INDEX IF NOT EXISTS jobs_by_step ON jobs (run, step)",
    "CREATE INDEX IF NOT EXISTS jobs_by_pin ON jobs (pin)",
    "CREATE INDEX IF NOT EXISTS jobs_alike ON jobs (alike)",
    "CREATE INDEX IF NOT EXISTS jobs_of_status ON jobs (status, number)",  # the newest of a status
    "CREATE INDEX IF NOT EXISTS jobs_of_runs ON jobs (run, status, step)",  # a list of all runs
    # Ids of ended jobs whose directories are to be removed; a job may have a new id by now.
    "CREATE TABLE IF NOT EXISTS forgotten (job_id TEXT PRIMARY KEY)",
)

# Directories of runs in which the server has made pins, at any depth below its roots.
_PINNED_RUNS = (
    "CREATE TABLE IF NOT EXISTS pinned_runs (run TEXT PRIMARY KEY)",
    """INSERT OR IGNORE INTO pinned_runs
    SELECT substr(pin, 1, instr(pin, :pins) - 1) FROM jobs WHERE instr(pin, :pins)""",
)

_COLUMNS = {
    ("jobs", "superseded_by"): "TEXT",
    ("jobs", "attempts_before"): "INTEGER NOT NULL DEFAULT 0",  # how many when last submitted
    ("jobs", "alike"): "TEXT",
    ("results", "stderr"): "REAL",
}


def _make_tables(connection: sqlite3.Connection) -> None:
    """Version 1: a new database."""
    for statement in _TABLES.split(";"):
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {secrets.randbits(31)}")


def _complete_tables(connection: sqlite3.Connection) -> None:
    """Version 2: add the columns, indexes and tables that a database of version 1 may lack.

    Earlier versions of unshard added one part after the other, without another number.
    """
    query = "SELECT name FROM pragma_table_info(?)"
    for (table, name), kind in _COLUMNS.items():
        if name not in {row[0] for row in connection.execute(query, (table,))}:
            connection.execute(f"ALTER TABLE {table} ADD COLUMN {name} {kind}")
    for addition in _ADDITIONS:
        connection.execute(addition)
    if not connection.execute("PRAGMA table_info(pinned_runs)").fetchall():
        for statement in _PINNED_RUNS:
            connection.execute(statement, {"pins": f"/{STATE_FOLDER}/{PINS}/"})
    lacking = "SELECT id, request FROM jobs WHERE alike IS NULL"
    values = [(as_request(row[1]).alike, row[0]) for row in connection.execute(lacking)]
    connection.executemany("UPDATE jobs SET alike = ? WHERE id = ?", values)


def _add_direction(connection: sqlite3.Connection) -> None:
    """Version 3: whether higher values of a metric are better; NULL: not known."""
    connection.execute("ALTER TABLE results ADD COLUMN higher_is_better INTEGER")


def _add_deliveries(connection: sqlite3.Connection) -> None:
    """Version 4: deliveries of an earlier `on_result`; version 5 drops them."""
    connection.execute(
        "CREATE TABLE deliveries (number INTEGER PRIMARY KEY AUTOINCREMENT,"
        " id TEXT NOT NULL UNIQUE, job_id TEXT NOT NULL, body TEXT NOT NULL,"
        " tries INTEGER NOT NULL DEFAULT 0, due_at REAL NOT NULL)"
    )


_RUNS_AND_SETTINGS = """
CREATE TABLE runs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    name TEXT NOT NULL,
    directory TEXT NOT NULL,
    label TEXT NOT NULL,
    place TEXT NOT NULL,
    is_there INTEGER NOT NULL DEFAULT 1,
    is_written INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE run_names (name TEXT NOT NULL, run TEXT NOT NULL, PRIMARY KEY (name, run));
CREATE VIEW run_calls AS SELECT id AS text, id AS run, 1 AS rank FROM runs UNION ALL
    SELECT label, id, 1 FROM runs UNION ALL SELECT directory, id, 1 FROM runs WHERE is_there
    UNION ALL SELECT name, run, 2 FROM run_names;
CREATE INDEX runs_by_name ON runs (name);
CREATE INDEX runs_by_directory ON runs (directory);
CREATE INDEX runs_by_label ON runs (label);
ALTER TABLE jobs ADD COLUMN again TEXT NOT NULL DEFAULT '';
ALTER TABLE jobs ADD COLUMN settings TEXT;
ALTER TABLE jobs ADD COLUMN hidden TEXT;
ALTER TABLE jobs ADD COLUMN was_hidden TEXT;
CREATE UNIQUE INDEX jobs_by_key ON jobs (key, again);
ALTER TABLE jobs ADD COLUMN facts TEXT;
DROP TABLE IF EXISTS deliveries
"""


def _let_keys_be_equal(connection: sqlite3.Connection) -> None:
    """Copy the table of jobs into one without the unique key, which SQLite cannot drop."""
    query = "SELECT name, sql FROM sqlite_master WHERE tbl_name = 'jobs' AND sql IS NOT NULL"
    statements = dict(connection.execute(query).fetchall())
    table = statements.pop("jobs").replace("jobs", "new_jobs", 1)
    connection.execute(table.replace("key TEXT NOT NULL UNIQUE", "key TEXT NOT NULL"))
    connection.execute("INSERT INTO new_jobs SELECT * FROM jobs")
    connection.execute("DROP TABLE jobs")
    connection.execute("ALTER TABLE new_jobs RENAME TO jobs")
    for index in statements.values():
        connection.execute(index)


def _add_runs_and_settings(connection: sqlite3.Connection) -> None:
    """Version 5: runs are directories, and results have the settings of their evaluation.

    For earlier results only the arguments of the submission are known. A base model, which
    is in no run's directory, belongs to the run of its name that began after it.
    """
    _let_keys_be_equal(connection)
    for statement in _RUNS_AND_SETTINGS.split(";"):
        connection.execute(statement)
    rows = connection.execute("SELECT number, request, status FROM jobs ORDER BY number DESC")
    ids: dict[tuple[str, str], str] = {}  # by directory, or by name without one
    newest: dict[str, str] = {}  # directories, by name: of the job that came next
    for number, text, status in rows.fetchall():
        request = as_request(text)
        path = directory_of(request)
        path = newest.get(request.run, "") if path is None else path
        newest[request.run] = path
        place = (path, "" if path else request.run)
        if place not in ids:
            ids[place] = record_run(connection, new_run_id(), request.run, path).id
        add_name(connection, ids[place], request.run)
        place_job(connection, number, text, ids[place])
        if status == Status.COMPLETED:
            settings = settings_as_json(Settings(request.arguments.given()))
            connection.execute("UPDATE jobs SET settings = ? WHERE number = ?", (settings, number))


def _add_recipes_and_turns(connection: sqlite3.Connection) -> None:
    """Version 6: the script that repeats a job, and the number of a run's last turn."""
    for column in ("script", "record"):
        connection.execute(f"ALTER TABLE jobs ADD COLUMN {column} TEXT NOT NULL DEFAULT ''")
    connection.execute("ALTER TABLE runs ADD COLUMN turn INTEGER NOT NULL DEFAULT 0")
    connection.execute("CREATE INDEX jobs_in_turn ON jobs (status, run, queued_at, number)")


_MIGRATIONS: tuple[Callable[[sqlite3.Connection], None], ...] = (
    _make_tables,
    _complete_tables,
    _add_direction,
    _add_deliveries,
    _add_runs_and_settings,
    _add_recipes_and_turns,
)
"""A released migration is never changed: append a new one, and give the tests a database of the
version before it."""

LATEST = len(_MIGRATIONS)


def migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Bring a database to the latest version; first copy it next to itself if it has tables.

    All in one transaction: several processes may do it at once, none sees a version in between,
    and a failure changes nothing. A database that is up to date is not written to.

    Raises:
        UsageError: a later version of unshard wrote it, or the copy cannot be made.
    """
    if check_version(connection, path) == LATEST:
        return
    with writing(connection):
        began_with = check_version(connection, path)  # another process may have been first
        if 0 < began_with < LATEST:
            _back_up(path, began_with)
        for change in _MIGRATIONS[began_with:]:
            change(connection)
        connection.execute(f"PRAGMA user_version = {LATEST}")
    if 0 < began_with < LATEST:
        _log.info("%s: updated to version %d", path, LATEST)


def is_outdated(path: Path) -> bool:
    """Return whether a database exists that `migrate` would change."""
    if not path.is_file():
        return False
    with suppress(sqlite3.DatabaseError), closing(sqlite3.connect(path)) as connection:
        return _version(connection) < LATEST
    return False  # it is damaged


@contextmanager
def writing(connection: sqlite3.Connection) -> Iterator[None]:
    """Begin a transaction that writes, and commit it; an exception rolls it back."""
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        yield


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def check_version(connection: sqlite3.Connection, path: Path) -> int:
    """Return the version of a database's tables.

    Raises:
        UsageError: a later version of unshard made them.
    """
    version = _version(connection)
    if not 0 <= version <= LATEST:
        raise UsageError(
            f"{path}: made by a later version of unshard",
            expected=f"tables of version {LATEST} or earlier",
            found=f"version {version}",
            hint="update unshard, or choose another directory; "
            f"{path.stem}-v{LATEST}.sqlite is the copy from before the update, if it exists",
        )
    return version


def _back_up(path: Path, version: int) -> None:
    """Copy a database next to itself, so that the update can be undone.

    An earlier copy of the same version is older than the database, and replaced. Another connection
    reads the database for it, because SQLite copies nothing by a connection that is writing.
    """
    target = path.with_stem(f"{path.stem}-v{version}")
    draft = target.with_suffix(".draft")
    try:
        draft.unlink(missing_ok=True)
        with closing(sqlite3.connect(path)) as reading, closing(sqlite3.connect(draft)) as copy:
            reading.backup(copy)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(target)
    except (OSError, sqlite3.Error) as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise UsageError(
            f"{path}: cannot be copied before its update from version {version} to {LATEST}",
            found=str(error),
            hint=f"make room for {target}",
        ) from error
    _log.info("%s: copied, at version %d, to %s", path, version, target)
