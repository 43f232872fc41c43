"""How `unshard eval` shows jobs and results: as tables, as CSV, and as JSON."""

import json
import sys
import time
from collections.abc import Mapping, Sequence

__all__ = ["describe_state", "on_one_line", "print_jobs", "print_results", "shorten"]

Fields = Mapping[str, object]

_SHORT = 8  # characters of a job's id: the server knows it by them
_COLUMNS = ("run", "step", "weights", "profile", "task", "metric", "value", "job_id")
_NUMBERS = frozenset({"step", "value"})  # aligned at their ends


def shorten(job_id: object) -> str:
    """Return the beginning of a job's id, which every command takes in its place."""
    return str(job_id)[:_SHORT]


def on_one_line(name: str) -> str:
    r"""Return a name with `\n` for a line break: evaluators may put one into a metric's name."""
    return name.replace("\n", "\\n")


def describe_state(job: Fields) -> str:
    """Return the status of a job, with its place in the queue, or the phase of a running one."""
    detail = job.get("position") if job["status"] == "queued" else job.get("phase")
    if detail is None:
        return str(job["status"])
    return f"queued #{detail}" if job["status"] == "queued" else str(detail)


def print_jobs(jobs: Sequence[Fields], *, run: str | None = None, as_json: bool) -> None:
    """Print jobs, each with its results and its error below.

    Args:
        jobs: as the server answers them.
        run: the run that these are all jobs of, if only one was asked for.
        as_json: whether to print all fields, as JSON.
    """
    if as_json:
        print(json.dumps({"jobs": list(jobs)}))
        return
    if not jobs:
        print(f"no jobs of run {run}" if run else "no jobs yet")
        return
    rows = [
        {
            "job": shorten(job["id"]),
            "status": describe_state(job),
            **{name: job[name] for name in ("run", "step", "weights", "profile")},
            "tasks": _joined(job["tasks"]),
            "submitted (local)": _local(job.get("created_at")),
            "ended (local)": _local(job.get("completed_at")),
        }
        for job in jobs
    ]
    head, *lines = _table(rows)
    print(head)
    for job, line in zip(jobs, lines, strict=True):
        print(line)
        metrics = job["metrics"]
        if isinstance(metrics, Mapping):
            for name, value in metrics.items():
                print(f"    {on_one_line(name)} = {value:.6g}")
        if job["error"]:
            print(f"    {_reason(job)}".replace("\n", "\n    "))


def print_results(found: Sequence[Fields], *, run: str | None, as_csv: bool, as_json: bool) -> None:
    """Print results, one on each line."""
    if as_json:
        print(json.dumps({"results": list(found)}))
    elif as_csv:
        import csv

        writer = csv.DictWriter(sys.stdout, _COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
    elif not found:
        print(f"no results of run {run}" if run else "no results yet")
    else:
        rows = [
            {
                **{name: one[name] for name in _COLUMNS[:-1]},
                "completed (local)": _local(one.get("completed_at")),
                "job": shorten(one["job_id"]),
            }
            for one in found
        ]
        for line in _table(rows):
            print(line)


def _reason(job: Fields) -> str:
    """Return a job's error, with the number of the attempt if the job is tried again."""
    if job["status"] == "queued":
        return f"attempt {job.get('attempts')}: {job['error']}"
    return str(job["error"])


def _table(rows: Sequence[Fields]) -> list[str]:
    """Return the lines of a table with headings; None is shown as "-"."""
    headings = {name: name for name in rows[0]}
    cells = [
        {name: "-" if value is None else on_one_line(str(value)) for name, value in row.items()}
        for row in (headings, *rows)
    ]
    widths = {name: max(len(row[name]) for row in cells) for name in headings}
    lines = ("  ".join(_aligned(name, row[name], widths[name]) for name in row) for row in cells)
    return [line.rstrip() for line in lines]


def _aligned(name: str, text: str, width: int) -> str:
    return text.rjust(width) if name in _NUMBERS else text.ljust(width)


def _joined(tasks: object) -> str:
    return ",".join(map(str, tasks)) if isinstance(tasks, Sequence) else str(tasks)


def _local(seconds: object) -> str | None:
    """Return a time since the epoch as a local one."""
    if not isinstance(seconds, int | float):
        return None
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
