"""How `unshard eval` shows jobs and results: as tables, CSV or JSON, or as they change."""

import io
import json
import time
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING

from unshard.cli.running import say
from unshard.evaluate.tables import lay_out_table, on_one_line, terminal_width, write_number

if TYPE_CHECKING:
    from unshard.evaluate.client.v1 import EvalClient

Row = Mapping[str, object]
"""A job or a result as the server answers it."""

_SHORT = 8  # characters of a job's id: the server knows it by them
_SHOWN = ("run", "step", "weights", "profile", "task", "metric", "value", "stderr")
_SETTINGS = ("arguments", "revision", "evaluator", "task_version", "n_shot", "n_samples", "hidden")
_COLUMNS = (*_SHOWN[:-1], "job_id", "stderr")  # what is newer comes last
_NUMBERS = frozenset({"step", "value", "stderr"})  # aligned at their ends
_LOOK_S = 1.0  # between looks at the jobs


def _shorten(job_id: object) -> str:
    """Return the beginning of a job's id, which every command takes in its place."""
    return str(job_id)[:_SHORT]


def _describe_state(job: Row) -> str:
    """Return the status of a job, with its place in the queue, or the phase of a running one."""
    detail = job.get("position") if job["status"] == "queued" else job.get("phase")
    if detail is None:
        return str(job["status"])
    return f"queued #{detail}" if job["status"] == "queued" else str(detail)


def print_jobs(jobs: Sequence[Row], *, as_json: bool) -> None:
    """Print jobs; see `job_lines`."""
    print("\n".join(job_lines(jobs, run=None, as_json=as_json)))


def job_lines(jobs: Sequence[Row], *, run: str | None, as_json: bool) -> list[str]:
    """Return jobs as a table, each with its results and its error below.

    Args:
        jobs: as the server answers them.
        run: the run that these are all jobs of, if only one was asked for.
        as_json: whether to give all fields, as JSON.
    """
    if as_json:
        return [json.dumps({"jobs": list(jobs)})]
    if not jobs:
        return [f"no jobs of run {run}" if run else "no jobs yet"]
    rows = [
        {
            "job": _shorten(job["id"]),
            "status": _describe_state(job),
            "run": job.get("run_label") or job["run"],
            **{name: job[name] for name in ("step", "weights", "profile")},
            "tasks": ",".join(map(str, tasks))
            if isinstance(tasks := job["tasks"], Sequence)
            else tasks,
            **({"user": job.get("user")} if any(one.get("user") for one in jobs) else {}),
            "submitted (local)": _write_time(job.get("created_at")),
            "ended (local)": _write_time(job.get("completed_at")),
        }
        for job in jobs
    ]
    head, *lines = lay_out_table(rows, numbers=_NUMBERS, width=terminal_width())
    shown = [head]
    for job, line in zip(jobs, lines, strict=True):
        shown += [line, *_details(job)]
    return shown


def _details(job: Row) -> list[str]:
    """Return the lines below a job: what it measured, and what is wrong."""
    lines = list[str]()
    if job.get("pinned") is False and job["completed_at"] is None:
        lines.append("    not pinned: the checkpoint must stay where it is until it is merged")
    metrics, errors = job["metrics"], job.get("stderr")
    for name, value in metrics.items() if isinstance(metrics, Mapping) else ():
        error = errors.get(name) if isinstance(errors, Mapping) else None
        spread = "" if error is None else f" \u00b1 {_round(error)}"
        lines.append(f"    {on_one_line(name)} = {_round(value)}{spread}")
    if job.get("hidden"):
        lines.append(f"    hidden: {on_one_line(str(job['hidden']))}")
    if job["error"]:
        again = f"attempt {job.get('attempts')}: " if job["status"] == "queued" else ""
        lines.append(f"    {again}{job['error']}".replace("\n", "\n    "))
    if job.get("waits_for"):
        lines.append(f"    waits for {job['waits_for']}".replace("\n", "\n    "))
    return lines


def result_lines(
    found: Sequence[Row],
    *,
    run: str | None,
    as_csv: bool,
    as_json: bool,
    best: Container[object] | None = None,
) -> list[str]:
    """Return results, one on each line.

    Args:
        found: as the server answers them.
        run: the run that these are all results of, if only one was asked for.
        as_csv: whether to give them as CSV.
        as_json: whether to give all fields, as JSON.
        best: the numbers of those to mark; None: there is no such column.
    """
    if best is not None:
        found = [{**one, "best": one.get("number") in best} for one in found]
    if as_json:
        return [json.dumps({"results": list(found)})]
    if as_csv:
        named = [{**one, "arguments": json.dumps(one.get("arguments"))} for one in found]
        return csv_lines((*_COLUMNS, *(() if best is None else ("best",)), *_SETTINGS), named)
    if not found:
        return [f"no results of run {run}" if run else "no results yet"]
    told = _describe_settings(found)
    rows = [
        {
            **{name: one.get(name) for name in _SHOWN[:-1]},
            "stderr": _round(one.get("stderr")),
            **({} if best is None else {"best": "best" if one["best"] else ""}),
            "completed (local)": _write_time(one.get("completed_at")),
            "job": _shorten(one["job_id"]),
            **({"settings": settings} if any(told) else {}),
            **({"hidden": one["hidden"]} if any(other.get("hidden") for other in found) else {}),
        }
        for one, settings in zip(found, told, strict=True)
    ]
    return lay_out_table(rows, numbers=_NUMBERS, width=terminal_width())


def _describe_settings(found: Sequence[Row]) -> list[str]:
    """Return what distinguishes the settings of each result from the others'."""
    from unshard.evaluate.comparing import as_results, describe_settings

    results = as_results(found)
    named = describe_settings(results)
    return [named[one.profile, one.settings] for one in results]


def csv_lines(columns: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """Return the lines of a CSV file with these columns."""
    import csv

    file = io.StringIO()
    writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return [file.getvalue().removesuffix("\n")]


def _round(value: object) -> str | None:
    return write_number(value, 6) if isinstance(value, int | float) else None


def _write_time(seconds: object) -> str | None:
    """Return a time since the epoch as a local one."""
    if not isinstance(seconds, int | float):
        return None
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def wait_for(client: "EvalClient", jobs: Sequence[str]) -> list[dict[str, object]]:
    """Wait until all jobs, or those that superseded them, have ended, and return them.

    Waiting outlasts restarts of the server; after Ctrl-C the jobs continue. Changes are printed to
    stderr.
    """
    followed = [_Followed(client, job) for job in jobs]
    try:
        while not all([one.look() for one in followed]):  # noqa: C419  (look at every one)
            time.sleep(_LOOK_S)
    except KeyboardInterrupt as error:
        left = [_shorten(one.job_id) for one in followed if not one.has_ended]
        raise KeyboardInterrupt(
            f"interrupted: the server continues with {', '.join(left)}\n"
            f"to cancel a job: unshard eval cancel {left[0]}"
        ) from error
    return [dict(one.job) for one in followed]


class _Followed:
    """A job that is waited for, and what was printed about it last."""

    def __init__(self, client: "EvalClient", job_id: str) -> None:
        self.job_id = job_id
        self.job: Row = {}
        self.has_ended = False
        self._client = client
        self._said = ""
        self._failed: object = 0
        self._is_away = False
        say(f"waiting for job {_shorten(job_id)}")

    def look(self) -> bool:
        """Print what has changed; return whether the job has ended."""
        from unshard.evaluate.client.v1 import ServerAwayError

        if self.has_ended:
            return True
        try:
            self.job = self._client.job(self.job_id)
            self._is_away = False
        except ServerAwayError as error:
            if not self._is_away:
                say(f"waiting: {error}")
            self._is_away = True
            return False
        newer = self.job.get("superseded_by")
        if newer is not None:
            say(
                f"job {_shorten(self.job_id)}: saved again since; waiting for job {_shorten(newer)}"
            )
            self.job_id = str(newer)
            return self.look()
        self.has_ended = self.job["completed_at"] is not None
        self._report_change()
        return self.has_ended

    def _report_change(self) -> None:
        job, name = self.job, f"job {_shorten(self.job_id)}"
        attempts = int(str(job.get("attempts") or 0))
        over = attempts if job.get("status") == "queued" else attempts - 1
        if job.get("error") and not self.has_ended and over != self._failed:
            self._failed = over
            why = str(job["error"]).replace("\n", "\n    ")
            say(f"{name}: attempt {over} did not complete, the job is tried again: {why}")
        again = f", attempt {attempts}" if job.get("status") == "running" and over else ""
        now = f"{name}: {_describe_state(job)}{again}"
        now += f", waits for {job['waits_for']}" if job.get("waits_for") else ""
        if now != self._said:
            say(now)
        self._said = now
