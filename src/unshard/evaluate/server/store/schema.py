"""The tables of the store, and how a row becomes a value.

An attempt without an end is open: it may have a process, and while it is open its job is not begun
again. Times are seconds since the epoch.
"""

import json
import secrets
import sqlite3
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from unshard.errors import UsageError
from unshard.evaluate.jobs import (
    Arguments,
    Event,
    Filters,
    Job,
    Phase,
    Process,
    Request,
    Result,
    Status,
)

__all__ = [
    "JOB_COLUMNS",
    "RESULT_COLUMNS",
    "as_event",
    "as_job",
    "as_request",
    "as_result",
    "chosen",
    "connect",
    "gpus_as_json",
    "request_as_json",
]

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
    # Ids of ended jobs whose directories are to be removed; a job may have a new id by now.
    "CREATE TABLE IF NOT EXISTS forgotten (job_id TEXT PRIMARY KEY)",
)

# Directories of runs in which the server has made pins, at any depth below its roots.
_PINNED_RUNS = (
    "CREATE TABLE IF NOT EXISTS pinned_runs (run TEXT PRIMARY KEY)",
    """INSERT OR IGNORE INTO pinned_runs
    SELECT substr(pin, 1, instr(pin, '/_unshard/pins/') - 1) FROM jobs
    WHERE instr(pin, '/_unshard/pins/')""",
)

_COLUMNS = {
    "superseded_by": "TEXT",
    "attempts_before": "INTEGER NOT NULL DEFAULT 0",  # how many when the job was last submitted
    "alike": "TEXT",
}

JOB_COLUMNS = """
    jobs.*, open.pid, open.started, open.boot, open.gpus, open.directory
    FROM jobs LEFT JOIN attempts AS open ON open.job_id = jobs.id AND open.ended_at IS NULL
"""
"""What `as_job` reads, after SELECT."""

RESULT_COLUMNS = """
    results.rowid AS number, id, run, step, weights, profile, metric, value, completed_at
    FROM results CROSS JOIN jobs ON jobs.id = results.job_id
"""
"""What `as_result` reads, after SELECT; SQLite reads the left table of a CROSS JOIN in order."""

_OWN_FIELDS = frozenset(field.name for field in fields(Request)) - {"arguments"}
_BUSY_S = 30.0
_FILTERED = ("status", "run", "step", "weights", "profile")


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
    with connection:
        connection.execute("BEGIN IMMEDIATE")
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
    if _missing(connection):
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            for name in _missing(connection):  # another process may have been first
                connection.execute(f"ALTER TABLE jobs ADD COLUMN {name} {_COLUMNS[name]}")
    for addition in _ADDITIONS:
        connection.execute(addition)
    if not connection.execute("PRAGMA table_info(pinned_runs)").fetchall():
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            for statement in _PINNED_RUNS:
                connection.execute(statement)
    lacking = "SELECT id, request FROM jobs WHERE alike IS NULL"
    if connection.execute(f"{lacking} LIMIT 1").fetchall():
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            found = [(as_request(row[1]).alike, row[0]) for row in connection.execute(lacking)]
            connection.executemany("UPDATE jobs SET alike = ? WHERE id = ?", found)


def _missing(connection: sqlite3.Connection) -> set[str]:
    there = {row["name"] for row in connection.execute("PRAGMA table_info(jobs)")}
    return _COLUMNS.keys() - there


def request_as_json(request: Request) -> str:
    """Return a request as text: one flat object, to which an argument can be added."""
    values = {name: getattr(request, name) for name in _OWN_FIELDS}
    return json.dumps({**values, **request.arguments.model_dump()})


def as_request(text: str) -> Request:
    """Return a request from its text, which another version may have written."""
    found = json.loads(text)
    values = {name: value for name, value in found.items() if name in _OWN_FIELDS}
    values["tasks"] = tuple(values["tasks"])
    chosen_then = {name: found[name] for name in Arguments.model_fields.keys() & found.keys()}
    # Not validated: an older server accepted them.
    return Request(**values, arguments=Arguments.model_construct(**chosen_then))


def as_job(row: sqlite3.Row, metrics: Mapping[str, float]) -> Job:
    """Return a job from a row of `JOB_COLUMNS`, and its results."""
    return Job(
        id=row["id"],
        request=as_request(row["request"]),
        status=Status(row["status"]),
        created_at=row["created_at"],
        phase=_as_phase(row["phase"]),
        started_at=row["started_at"],
        completed_at=row["completed_at"],
        pin=row["pin"],
        attempts=row["attempts"],
        process=_as_process(row),
        error=row["error"],
        metrics=metrics,
        results=row["results"],
        failures=row["failures"],
        superseded_by=row["superseded_by"],
    )


def _as_phase(value: str | None) -> Phase | None:
    return None if value is None else Phase(value)


def _as_process(row: sqlite3.Row) -> Process | None:
    if row["pid"] is None:
        return None
    gpus = tuple(map(str, json.loads(row["gpus"])))
    return Process(row["pid"], row["started"], row["boot"], gpus, row["directory"])


def gpus_as_json(gpus: tuple[str, ...]) -> str:
    """Return the GPUs of a process as text: numbers as such, which other versions expect."""
    return json.dumps([int(gpu) if gpu.isdecimal() else gpu for gpu in gpus])


def as_event(row: sqlite3.Row) -> Event:
    """Return an event from a row of its table."""
    status, phase = Status(row["status"]), _as_phase(row["phase"])
    return Event(row["number"], row["job_id"], status, phase, row["at"])


def as_result(row: sqlite3.Row) -> Result:
    """Return a result from a row of `RESULT_COLUMNS`."""
    task, _, metric = row["metric"].partition("/")
    return Result(
        number=row["number"],
        job_id=row["id"],
        run=row["run"],
        step=row["step"],
        weights=row["weights"],
        profile=row["profile"],
        task=task,
        metric=metric,
        value=row["value"],
        completed_at=row["completed_at"],
    )


def chosen(filters: Filters) -> tuple[str, list[str | int]]:
    """Return the condition on jobs that filters mean, and its values."""
    given = {name: getattr(filters, name) for name in _FILTERED}
    kept = {name: value for name, value in given.items() if value is not None}
    return " AND ".join(["TRUE", *(f"jobs.{name} = ?" for name in kept)]), list(kept.values())
