"""SQL conditions of the store, and conversions between its values and rows."""

import json
import secrets
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from functools import lru_cache
from itertools import chain, count

from unshard.evaluate.jobs import (
    Arguments,
    Filters,
    Job,
    JobEvent,
    Phase,
    Request,
    Result,
    Settings,
    Status,
    TrainingRun,
)
from unshard.evaluate.process import Process

_EVENTS = 100_000
_LONGEST_ERROR = 20_000  # characters

LONGEST_WAIT_S = 3600.0
"""The longest wait for an attempt; a longer one means that the clock was set back."""

_ATTEMPT = "EXISTS (SELECT 1 FROM attempts WHERE attempts.job_id = jobs.id"
_FINAL = ", ".join(f"'{status}'" for status in Status if status.is_final)

CLAIMABLE = f"""jobs.status = 'queued' AND jobs.not_before - ? NOT BETWEEN 1e-6 AND {LONGEST_WAIT_S}
    AND NOT {_ATTEMPT} AND attempts.ended_at IS NULL)"""
"""Condition: the job may be claimed at a time, its one value."""


def _in_turn(columns: str, condition: str) -> str:
    """Return a query for queued jobs: the first of each run, then the second of each, and so on.

    The run whose last turn is longest ago is first. The last value is the most rows to return.
    """
    order = "ORDER BY place, turn, turns.queued_at, number"
    places = "ROW_NUMBER() OVER (PARTITION BY run ORDER BY queued_at, jobs.number) AS place"
    return f"""SELECT {columns} FROM (SELECT * FROM (SELECT jobs.number, turn, queued_at, {places}
        FROM jobs LEFT JOIN runs ON runs.id = run WHERE {condition}) AS turns {order} LIMIT ?)
        AS turns JOIN jobs USING (number) {order}"""  # noqa: S608


QUEUE = _in_turn("id", "jobs.status = 'queued'")
"""Query: ids of queued jobs, in the order in which they begin."""

DUE = _in_turn("id, profile, json_extract(request, '$.num_gpus')", CLAIMABLE)
"""Query: id, profile and wanted GPUs of the jobs that may be claimed at a time, its first value."""

NEEDS_PIN = f"(jobs.status = 'queued' OR {_ATTEMPT} AND attempts.ended_at IS NULL))"
"""Condition: the job needs its pin."""

FORGETTABLE = f"""jobs.status IN ({_FINAL}) AND jobs.completed_at < ?
    AND NOT {_ATTEMPT} AND attempts.ended_at IS NULL) AND {_ATTEMPT})"""
"""Condition: the job ended before a time, its one value, and has attempts to forget."""

_JOB_COLUMNS = """
    jobs.*, open.pid, open.started, open.boot, open.gpus, open.directory,
    runs.name AS run_name, runs.directory AS run_directory, runs.label AS run_label
    FROM jobs LEFT JOIN attempts AS open ON open.job_id = jobs.id AND open.ended_at IS NULL
    LEFT JOIN runs ON runs.id = jobs.run
"""  # for `_as_job`, after SELECT

RESULT_COLUMNS = """
    results.rowid AS number, jobs.id AS job_id, runs.label AS run, step, weights, profile, metric,
    value, completed_at, stderr, higher_is_better, jobs.run AS run_id, settings, facts, hidden
"""
"""The columns of `results`, `jobs` and `runs` for `as_result`."""

_PLAIN_FIELDS = tuple(
    "id created_at started_at completed_at pin attempts error results failures "
    "superseded_by hidden was_hidden".split()
)
_OWN_FIELDS = frozenset(field.name for field in fields(Request)) - {"arguments"}
_FILTERED = ("status", "step", "weights", "profile")
IS_CALLED = """(SELECT run FROM run_calls WHERE text = ? AND rank =
    (SELECT MIN(rank) FROM run_calls WHERE text = ?))"""
"""Query: the runs that a text, both of its values, names; a label wins over a name."""

Facts = tuple[str | None, int | None, int | None, str | None]
"""A task's version, number of few-shot examples and number of samples, where known."""

MetricRow = tuple[float, float | None, bool | None]
"""A metric's value, its standard error, and whether higher is better."""


def request_as_json(request: Request) -> str:
    """Return a request as one flat JSON object, to which later versions can add arguments."""
    values = {name: getattr(request, name) for name in _OWN_FIELDS}
    return json.dumps({**values, **request.arguments.model_dump()})


def as_request(text: str) -> Request:
    """Return a request from its JSON, which another version may have written."""
    # Clients list the same jobs again and again. 512 texts of 4 KiB are at most 2 MiB.
    return (_cached_request if len(text) <= 4096 else _parse_request)(text)


def _parse_request(text: str) -> Request:
    fields = json.loads(text)
    values = {name: value for name, value in fields.items() if name in _OWN_FIELDS}
    values["tasks"] = tuple(values["tasks"])
    arguments = {name: fields[name] for name in Arguments.model_fields.keys() & fields.keys()}
    # Not validated: an older server accepted them.
    return Request(**values, arguments=Arguments.model_construct(**arguments))


_cached_request = lru_cache(maxsize=512)(_parse_request)


def settings_as_json(settings: Settings) -> str:
    """Return settings as JSON, equal for equal settings."""
    return json.dumps(asdict(settings), sort_keys=True)


@lru_cache(maxsize=512)
def _as_settings(text: str) -> tuple[Settings, str]:
    """Return settings and their id, a digest: many results have the same."""
    settings = Settings(**json.loads(text))
    return settings, settings.id


@lru_cache(maxsize=512)
def _as_facts(text: str) -> dict[str, Facts]:
    # Earlier versions recorded no group.
    return {task: (*facts, None)[:4] for task, facts in json.loads(text).items()}


def _as_job(connection: sqlite3.Connection, row: sqlite3.Row) -> Job:
    process, metrics, errors = None, dict[str, float](), dict[str, float]()
    if row["pid"] is not None:
        gpus = tuple(map(str, json.loads(row["gpus"])))
        process = Process(row["pid"], row["started"], row["boot"], gpus, row["directory"])
    if row["status"] == Status.COMPLETED:  # as rows: SQLite's JSON functions would round them
        query = "SELECT metric, value, stderr FROM results WHERE job_id = ?"
        for name, value, error in connection.execute(query, (row["id"],)):
            metrics[name] = value
            if error is not None:
                errors[name] = error
    return Job(
        request=as_request(row["request"]),
        status=Status(row["status"]),
        phase=None if row["phase"] is None else Phase(row["phase"]),
        process=process,
        metrics=metrics,
        stderr=errors,
        run=TrainingRun(row["run"], row["run_name"], row["run_directory"], row["run_label"]),
        settings=None if row["settings"] is None else _as_settings(row["settings"])[0],
        **{name: row[name] for name in _PLAIN_FIELDS},
    )


def gpus_as_json(gpus: tuple[str, ...]) -> str:
    """Return the GPUs of a process as JSON, with numbers as such: other versions expect that."""
    return json.dumps([int(gpu) if gpu.isdecimal() else gpu for gpu in gpus])


def as_event(row: sqlite3.Row) -> JobEvent:
    """Return an event from a row of its table."""
    phase = None if row["phase"] is None else Phase(row["phase"])
    return JobEvent(row["number"], row["job_id"], Status(row["status"]), phase, row["at"])


def as_result(row: sqlite3.Row) -> Result:
    """Return a result from a row of `RESULT_COLUMNS`."""
    values = dict(row)
    task, _, metric = values.pop("metric").partition("/")
    better = values.pop("higher_is_better")
    settings, settings_id = _as_settings(values.pop("settings") or "{}")
    facts = _as_facts(values.pop("facts") or "{}").get(task, (None, None, None, None))
    return Result(
        **values,
        task=task,
        metric=metric,
        higher_is_better=None if better is None else bool(better),
        settings=settings_id,
        arguments=settings.arguments,
        revision=settings.revision,
        evaluator=settings.evaluator,
        task_version=facts[0],
        n_shot=facts[1],
        n_samples=facts[2],
    )


def condition_of(filters: Filters) -> tuple[str, list[str | int]]:
    """Return the condition on jobs that filters stand for, and its values."""
    wanted = {name: getattr(filters, name) for name in _FILTERED}
    equal = {f"jobs.{name} = ?": value for name, value in wanted.items() if value is not None}
    where, values = ["TRUE", *equal], list(equal.values())
    if filters.run is not None:
        where.append(f"jobs.run IN {IS_CALLED}")
        values += [filters.run, filters.run]
    return " AND ".join(where), values


def read_job(connection: sqlite3.Connection, job_id: str) -> Job | None:
    """Return the job of this id."""
    return next(read_jobs(connection, "WHERE jobs.id = ?", [job_id]), None)


def read_jobs(
    connection: sqlite3.Connection, rest: str, values: Sequence[str | float | None]
) -> Iterator[Job]:
    """Read jobs one by one; `rest` follows the FROM clause."""
    rows = connection.execute(f"SELECT {_JOB_COLUMNS} {rest}", values)
    return (_as_job(connection, row) for row in rows)


def insert_job(
    connection: sqlite3.Connection, request: Request, pin: str | None, now: float
) -> str:
    """Queue a new job; return its id."""
    job_id = secrets.token_hex(8)
    connection.execute(
        "INSERT INTO jobs (id, key, again, alike, request, run, step, weights, profile,"
        " status, created_at, queued_at, pin) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(job_id, request.key, request.again, request.alike, request_as_json(request)),
            *(request.run_id, request.step, request.weights, request.profile),
            *(Status.QUEUED, now, now, pin),
        ),
    )
    add_event(connection, job_id, now)
    return job_id


def queue_again(
    connection: sqlite3.Connection, job_id: str, request: Request, pin: str | None, now: float
) -> str:
    """Queue a job that has ended; return its id, a new one if its attempts were forgotten."""
    renamed = connection.execute(
        "UPDATE jobs SET id = ? WHERE id = ? AND attempts > 0"
        " AND NOT EXISTS (SELECT 1 FROM attempts WHERE job_id = jobs.id) RETURNING id",
        (secrets.token_hex(8), job_id),
    ).fetchone()
    job_id = job_id if renamed is None else str(renamed["id"])
    connection.execute(
        "UPDATE jobs SET status = ?, request = ?, pin = ?, queued_at = ?,"
        " not_before = 0, failures = 0, phase = NULL, error = NULL,"
        " started_at = NULL, completed_at = NULL, superseded_by = NULL,"
        " attempts_before = attempts"
        " WHERE id = ?",
        (Status.QUEUED, request_as_json(request), pin, now, job_id),
    )
    add_event(connection, job_id, now)
    return job_id


def add_event(connection: sqlite3.Connection, job_id: str, at: float) -> None:
    """Append a job's change, and delete the oldest events."""
    connection.execute(
        "INSERT INTO events (job_id, status, phase, at) SELECT id, status, phase, ? FROM jobs"
        " WHERE id = ?",
        (at, job_id),
    )
    connection.execute(
        "DELETE FROM events WHERE number <= (SELECT MAX(number) FROM events) - ?", (_EVENTS,)
    )


def _error(text: str) -> str:
    """Return an evaluator's error, which may be of any length, cut to 20,000 characters."""
    return storable(text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}...")


def storable(text: str) -> str:
    """Return a text in UTF-8, which SQLite requires: file names may have other bytes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def replace_results(
    connection: sqlite3.Connection, job_id: str, metrics: Mapping[str, MetricRow]
) -> None:
    """Write the results of a job in place of those of an earlier attempt.

    A name that is not UTF-8 is escaped, and gets a number if another metric has that name.
    """
    rows = {name: row for name, row in metrics.items() if storable(name) == name}
    for name, row in metrics.items():
        fit = storable(name)
        if fit != name:
            numbered = (f"{fit} ({number})" for number in count(2))
            rows[next(free for free in chain([fit], numbered) if free not in rows)] = row
    connection.execute("DELETE FROM results WHERE job_id = ?", (job_id,))
    connection.executemany(
        "INSERT INTO results (job_id, metric, value, stderr, higher_is_better)"
        " VALUES (?, ?, ?, ?, ?)",
        [(job_id, name, *row) for name, row in rows.items()],
    )


def change_to_final(status: Status, error: str | None = None) -> dict[str, str | float | None]:
    """Return the columns to change in a job that has ended."""
    why = None if error is None else _error(error)
    return {"status": status, "completed_at": time.time(), "error": why}


def change_to_queued(why: str, due_at: float) -> dict[str, str | float | None]:
    """Return the columns to change in a job that is queued again."""
    return {"status": Status.QUEUED, "not_before": due_at, "error": _error(why)}
