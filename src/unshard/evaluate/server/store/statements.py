"""What the store's statements share: conditions, and how values become rows and back."""

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
    Status,
    TrainingRun,
)
from unshard.evaluate.process import Process
from unshard.evaluate.settings import Settings

_EVENTS = 100_000
_LONGEST_ERROR = 20_000  # characters

LONGEST_WAIT_S = 3600.0
"""No job waits longer for its next attempt: if one seems to, the clock was set back."""

_ATTEMPT = "EXISTS (SELECT 1 FROM attempts WHERE attempts.job_id = jobs.id"
_FINAL = ", ".join(f"'{status}'" for status in Status if status.is_final)

CLAIMABLE = f"""jobs.status = 'queued' AND jobs.not_before - ? NOT BETWEEN 1e-6 AND {LONGEST_WAIT_S}
    AND NOT {_ATTEMPT} AND attempts.ended_at IS NULL)"""
"""Which jobs may be claimed, at a time that is its one value."""


def _in_turn(columns: str, condition: str) -> str:
    """Return a query for queued jobs: one of each run, then the second of each, and so on.

    Of runs, that is first whose last turn is longest ago. Its last value is how many at most.
    """
    order = "ORDER BY place, turn, turns.queued_at, number"
    places = "ROW_NUMBER() OVER (PARTITION BY run ORDER BY queued_at, jobs.number) AS place"
    return f"""SELECT {columns} FROM (SELECT * FROM (SELECT jobs.number, turn, queued_at, {places}
        FROM jobs LEFT JOIN runs ON runs.id = run WHERE {condition}) AS turns {order} LIMIT ?)
        AS turns JOIN jobs USING (number) {order}"""  # noqa: S608


QUEUE = _in_turn("id", "jobs.status = 'queued'")
"""Ids of queued jobs, in the order in which they begin."""

DUE = _in_turn("id, profile, json_extract(request, '$.num_gpus')", CLAIMABLE)
"""Id, profile and wanted GPUs of those that may be claimed at a time, the first value."""

NEEDS_PIN = f"(jobs.status = 'queued' OR {_ATTEMPT} AND attempts.ended_at IS NULL))"
"""Which jobs need their pins."""

FORGETTABLE = f"""jobs.status IN ({_FINAL}) AND jobs.completed_at < ?
    AND NOT {_ATTEMPT} AND attempts.ended_at IS NULL) AND {_ATTEMPT})"""
"""Which jobs ended before a time that is its one value, and have attempts to forget."""

_JOB_COLUMNS = """
    jobs.*, open.pid, open.started, open.boot, open.gpus, open.directory,
    runs.name AS run_name, runs.directory AS run_directory, runs.label AS run_label
    FROM jobs LEFT JOIN attempts AS open ON open.job_id = jobs.id AND open.ended_at IS NULL
    LEFT JOIN runs ON runs.id = jobs.run
"""  # what `_as_job` reads, after SELECT

RESULT_COLUMNS = """
    results.rowid AS number, jobs.id AS job_id, runs.label AS run, step, weights, profile, metric,
    value, completed_at, stderr, higher_is_better, jobs.run AS run_id, settings, facts, hidden
"""
"""What `as_result` reads of `results`, `jobs` and `runs`."""

_PLAIN_FIELDS = tuple(
    "id created_at started_at completed_at pin attempts error results failures "
    "superseded_by hidden was_hidden".split()
)
_OWN_FIELDS = frozenset(field.name for field in fields(Request)) - {"arguments"}
_FILTERED = ("status", "step", "weights", "profile")
IS_CALLED = """(SELECT run FROM run_calls WHERE text = ? AND rank =
    (SELECT MIN(rank) FROM run_calls WHERE text = ?))"""
"""The runs that a text means, which is both of its values: a name only if it is no run's label."""


Facts = tuple[str | None, int | None, int | None]
"""What is known of a task: its version, its few-shot examples, its samples."""

Numbers = tuple[float, float | None, bool | None]
"""What is kept of a metric: its value, its standard error, whether higher is better."""


def request_as_json(request: Request) -> str:
    """Return a request as text: one flat object, to which an argument can be added."""
    values = {name: getattr(request, name) for name in _OWN_FIELDS}
    return json.dumps({**values, **request.arguments.model_dump()})


def as_request(text: str) -> Request:
    """Return a request from its text, which another version may have written."""
    # Clients list the same jobs again and again. 512 texts of 4 KiB are at most 2 MiB.
    return (_remembered if len(text) <= 4096 else _parsed)(text)


def _parsed(text: str) -> Request:
    found = json.loads(text)
    values = {name: value for name, value in found.items() if name in _OWN_FIELDS}
    values["tasks"] = tuple(values["tasks"])
    chosen_then = {name: found[name] for name in Arguments.model_fields.keys() & found.keys()}
    # Not validated: an older server accepted them.
    return Request(**values, arguments=Arguments.model_construct(**chosen_then))


_remembered = lru_cache(maxsize=512)(_parsed)


def settings_as_json(settings: Settings) -> str:
    """Return settings as text; equal ones have the same."""
    return json.dumps(asdict(settings), sort_keys=True)


@lru_cache(maxsize=512)
def _as_settings(text: str) -> tuple[Settings, str]:
    """Return settings, and their id, which is not made anew for each of many numbers."""
    settings = Settings(**json.loads(text))
    return settings, settings.id


@lru_cache(maxsize=512)
def _as_facts(text: str) -> dict[str, Facts]:
    return {task: (facts[0], facts[1], facts[2]) for task, facts in json.loads(text).items()}


def _as_job(connection: sqlite3.Connection, row: sqlite3.Row) -> Job:
    process, metrics, errors = None, dict[str, float](), dict[str, float]()
    if row["pid"] is not None:
        gpus = tuple(map(str, json.loads(row["gpus"])))
        process = Process(row["pid"], row["started"], row["boot"], gpus, row["directory"])
    if row["status"] == Status.COMPLETED:  # one by one, because SQLite's JSON would round them
        query = "SELECT metric, value, stderr FROM results WHERE job_id = ?"
        for name, value, error in connection.execute(query, (row["id"],)):
            metrics[name] = value
            if error is not None:
                errors[name] = error
    return Job(
        request=as_request(row["request"]),
        status=Status(row["status"]),
        phase=_as_phase(row["phase"]),
        process=process,
        metrics=metrics,
        stderr=errors,
        run=TrainingRun(row["run"], row["run_name"], row["run_directory"], row["run_label"]),
        settings=None if row["settings"] is None else _as_settings(row["settings"])[0],
        **{name: row[name] for name in _PLAIN_FIELDS},
    )


def _as_phase(value: str | None) -> Phase | None:
    return None if value is None else Phase(value)


def gpus_as_json(gpus: tuple[str, ...]) -> str:
    """Return the GPUs of a process as text: numbers as such, which other versions expect."""
    return json.dumps([int(gpu) if gpu.isdecimal() else gpu for gpu in gpus])


def as_event(row: sqlite3.Row) -> JobEvent:
    """Return an event from a row of its table."""
    status, phase = Status(row["status"]), _as_phase(row["phase"])
    return JobEvent(row["number"], row["job_id"], status, phase, row["at"])


def as_result(row: sqlite3.Row) -> Result:
    """Return a result from a row of `RESULT_COLUMNS`."""
    values = dict(row)
    task, _, metric = values.pop("metric").partition("/")
    better = values.pop("higher_is_better")
    settings, settings_id = _as_settings(values.pop("settings") or "{}")
    facts = _as_facts(values.pop("facts") or "{}").get(task, (None, None, None))
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
    """Return the condition on jobs that filters mean, and its values."""
    given = {name: getattr(filters, name) for name in _FILTERED}
    kept = {f"jobs.{name} = ?": value for name, value in given.items() if value is not None}
    where, values = ["TRUE", *kept], list(kept.values())
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
    """Read jobs one by one; `rest` is what follows FROM."""
    rows = connection.execute(f"SELECT {_JOB_COLUMNS} {rest}", values)
    return (_as_job(connection, row) for row in rows)


def insert_job(
    connection: sqlite3.Connection, request: Request, pin: str | None, now: float
) -> str:
    """Queue a job that is new; return its id."""
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
    """Queue a job that has ended; return its id, which is new if its attempts were forgotten."""
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
    """Append a job's change, and forget the oldest."""
    connection.execute(
        "INSERT INTO events (job_id, status, phase, at) SELECT id, status, phase, ? FROM jobs"
        " WHERE id = ?",
        (at, job_id),
    )
    connection.execute(
        "DELETE FROM events WHERE number <= (SELECT MAX(number) FROM events) - ?", (_EVENTS,)
    )


def _error(text: str) -> str:
    """Return an error as it is kept: an evaluator's may have any length."""
    return storable(text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}...")


def storable(text: str) -> str:
    """Return a text that SQLite takes: a file's name may have bytes that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def replace_results(
    connection: sqlite3.Connection,
    job_id: str,
    metrics: Mapping[str, Numbers],
) -> None:
    """Write what was measured, instead of what an earlier attempt measured.

    A name that SQLite does not take is changed; if
    another has that name, it gets a number.
    """
    found = {name: value for name, value in metrics.items() if storable(name) == name}
    for name, value in metrics.items():
        fit = storable(name)
        if fit != name:
            others = (f"{fit} ({number})" for number in count(2))
            found[next(one for one in chain([fit], others) if one not in found)] = value
    connection.execute("DELETE FROM results WHERE job_id = ?", (job_id,))
    connection.executemany(
        "INSERT INTO results (job_id, metric, value, stderr, higher_is_better)"
        " VALUES (?, ?, ?, ?, ?)",
        [(job_id, name, *numbers) for name, numbers in found.items()],
    )


def change_to_final(status: Status, error: str | None = None) -> dict[str, str | float | None]:
    """Return what changes in a job that has ended."""
    why = None if error is None else _error(error)
    return {"status": status, "completed_at": time.time(), "error": why}


def change_to_queued(why: str, due_at: float) -> dict[str, str | float | None]:
    """Return what changes in a job that is queued again."""
    return {"status": Status.QUEUED, "not_before": due_at, "error": _error(why)}
