"""The tables of the store, and the connections to them: one per thread.

An attempt without an end is open: it may have a process, and while it is open its job is not begun
again. Times are seconds since the epoch.
"""

import secrets
import sqlite3
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unshard.errors import UsageError
from unshard.evaluate.run_folder import PINS
from unshard.evaluate.server.store.statements import as_request
from unshard.read.finding.step_names import STATE_FOLDER

__all__ = ["Connections", "connect"]

VERSION = 1

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

_BUSY_S = 30.0


def connect(path: Path) -> sqlite3.Connection:
    """Open the database, and make its tables if it is new.

    Raises:
        UsageError: another version of unshard made it.
    """
    connection = sqlite3.connect(
        path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
    )
    connection.row_factory = sqlite3.Row
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        if _version(connection) != VERSION:
            _make_tables(connection, path)
        _bring_up_to_date(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _make_tables(connection: sqlite3.Connection, path: Path) -> None:
    with _writing(connection):
        found = _version(connection)
        if found not in (0, VERSION):
            raise UsageError(
                f"{path}: made by another version of unshard",
                expected=f"version {VERSION} of its tables",
                found=f"version {found}",
                hint="give another directory, or the unshard that made it",
            )
        if found == 0:
            for statement in _TABLES.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {secrets.randbits(31)}")
            connection.execute(f"PRAGMA user_version = {VERSION}")


def _bring_up_to_date(connection: sqlite3.Connection) -> None:
    """Add to a database of an earlier version what it lacks."""

    def missing() -> set[tuple[str, str]]:
        query = "SELECT name FROM pragma_table_info(?)"
        tables = {table for table, _ in _COLUMNS}
        there = {(one, row[0]) for one in tables for row in connection.execute(query, (one,))}
        return _COLUMNS.keys() - there

    if missing():
        with _writing(connection):
            for table, name in missing():  # another process may have been first
                kind = _COLUMNS[table, name]
                connection.execute(f"ALTER TABLE {table} ADD COLUMN {name} {kind}")
    for addition in _ADDITIONS:
        connection.execute(addition)
    if not connection.execute("PRAGMA table_info(pinned_runs)").fetchall():
        with _writing(connection):
            for statement in _PINNED_RUNS:
                connection.execute(statement, {"pins": f"/{STATE_FOLDER}/{PINS}/"})
    lacking = "SELECT id, request FROM jobs WHERE alike IS NULL"
    if connection.execute(f"{lacking} LIMIT 1").fetchall():
        with _writing(connection):
            found = [(as_request(row[1]).alike, row[0]) for row in connection.execute(lacking)]
            connection.executemany("UPDATE jobs SET alike = ? WHERE id = ?", found)


@contextmanager
def _writing(connection: sqlite3.Connection) -> Iterator[None]:
    """Begin a transaction that writes, and commit it; an exception rolls it back."""
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        yield


class _Held:
    """A connection that is closed with the thread it belongs to."""

    def __init__(self, path: Path) -> None:
        self.connection = connect(path)

    def __del__(self) -> None:
        connection = getattr(self, "connection", None)
        if connection is not None:
            connection.close()


class Connections:
    """The connections to a database, which is made if it is missing; for any number of threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._local = threading.local()
        self._all: weakref.WeakSet[_Held] = weakref.WeakSet()
        path.parent.mkdir(parents=True, exist_ok=True)
        _ = self.own

    @property
    def own(self) -> sqlite3.Connection:
        """Return the connection of this thread."""
        held: _Held | None = getattr(self._local, "held", None)
        if held is None:
            held = self._local.held = _Held(self._path)
            self._all.add(held)
        return held.connection

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Begin a transaction that writes, and commit it; an exception rolls it back."""
        with _writing(self.own):
            yield self.own

    def close(self) -> None:
        """Close the connections of all threads, none of which may use them any more."""
        for held in list(self._all):
            held.connection.close()
        self._local = threading.local()
