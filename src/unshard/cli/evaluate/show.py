"""Show jobs and results as tables, CSV or JSON, once, with refreshes, or until jobs end."""

import io
import json
import os
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from unshard.cli.running import say
from unshard.errors import printable
from unshard.evaluate.tables import lay_out_table, on_one_line, terminal_width, write_number

if TYPE_CHECKING:
    from rich.live import Live

    from unshard.evaluate.client.v1 import EvalClient

Row = Mapping[str, object]
"""A job or a result in the server's answer."""

_SHORT = 8  # characters of a job's id; the server accepts the beginning of an id
_SHOWN = ("run", "step", "weights", "profile", "task", "metric", "value", "stderr")
_SETTINGS = ("arguments", "revision", "evaluator", "task_version", "n_shot", "n_samples", "hidden")
_COLUMNS = (*_SHOWN[:-1], "job_id", "stderr")  # newer columns are last
_NUMBERS = frozenset({"step", "value", "stderr"})  # right-aligned
_LOOK_S = 1.0  # between looks at the jobs


def _shorten(job_id: object) -> str:
    """Return the beginning of a job's id, which every command accepts."""
    return str(job_id)[:_SHORT]


def _describe_state(job: Row) -> str:
    """Return the status of a job, with its place in the queue, or the phase of a running one."""
    detail = job.get("position") if job["status"] == "queued" else job.get("phase")
    if detail is None:
        return str(job["status"])
    return f"queued #{detail}" if job["status"] == "queued" else str(detail)


def print_jobs(jobs: Sequence[Row], *, as_json: bool) -> None:
    """Print jobs as `job_lines` returns them."""
    print("\n".join(job_lines(jobs, run=None, as_json=as_json)))


def job_lines(jobs: Sequence[Row], *, run: str | None, as_json: bool) -> list[str]:
    """Return jobs as a table, each with its results and its error below, or all fields as JSON.

    `run` is the run of all these jobs, if there is a filter.
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
    below = zip(jobs, lines, strict=True)
    return [head, *(text for job, line in below for text in (line, *_details(job)))]


def _details(job: Row) -> list[str]:
    """Return the lines below a job: its results and problems."""
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
    results: Sequence[Row],
    *,
    run: str | None,
    as_csv: bool,
    as_json: bool,
    best: Container[object] | None = None,
) -> list[str]:
    """Return results as a table, as CSV, or all fields as JSON.

    `run` is the run of all these results, if there is a filter. `best` are the numbers of the
    results to mark in a further column; None: without this column.
    """
    if best is not None:
        results = [{**one, "best": one.get("number") in best} for one in results]
    if as_json:
        return [json.dumps({"results": list(results)})]
    if as_csv:
        flat = [{**one, "arguments": json.dumps(one.get("arguments"))} for one in results]
        return csv_lines((*_COLUMNS, *(() if best is None else ("best",)), *_SETTINGS), flat)
    if not results:
        return [f"no results of run {run}" if run else "no results yet"]
    settings = _describe_settings(results)
    rows = [
        {
            **{name: one.get(name) for name in _SHOWN[:-1]},
            "stderr": _round(one.get("stderr")),
            **({} if best is None else {"best": "best" if one["best"] else ""}),
            "completed (local)": _write_time(one.get("completed_at")),
            "job": _shorten(one["job_id"]),
            **({"settings": own} if any(settings) else {}),
            **({"hidden": one["hidden"]} if any(other.get("hidden") for other in results) else {}),
        }
        for one, own in zip(results, settings, strict=True)
    ]
    return lay_out_table(rows, numbers=_NUMBERS, width=terminal_width())


def _describe_settings(rows: Sequence[Row]) -> list[str]:
    """Return the distinguishing part of each result's settings."""
    from unshard.evaluate.comparing import as_results, describe_settings

    results = as_results(rows)
    descriptions = describe_settings(results)
    return [descriptions[one.profile, one.settings] for one in results]


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
    """Wait until all jobs, or the jobs that superseded them, have ended, and return them.

    Waiting continues across restarts of the server; after Ctrl-C the jobs continue. Changes are
    printed to stderr.
    """
    waiting = [_WaitingFor(client, job) for job in jobs]
    try:
        while not all([one.look() for one in waiting]):  # noqa: C419  (look at every one)
            time.sleep(_LOOK_S)
    except KeyboardInterrupt as error:
        unfinished = [_shorten(one.job_id) for one in waiting if not one.has_ended]
        raise KeyboardInterrupt(
            f"interrupted: the server continues with {', '.join(unfinished)}\n"
            f"to cancel a job: unshard eval cancel {unfinished[0]}"
        ) from error
    return [dict(one.job) for one in waiting]


class _WaitingFor:
    """An awaited job, and the last printed line about it."""

    def __init__(self, client: "EvalClient", job_id: str) -> None:
        self.job_id = job_id
        self.job: Row = {}
        self.has_ended = False
        self._client = client
        self._printed = ""
        self._failed = 0  # attempts, as printed
        self._is_away = False
        say(f"waiting for job {_shorten(job_id)}")

    def look(self) -> bool:
        """Print changes; return whether the job has ended."""
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
        if now != self._printed:
            say(now)
        self._printed = now


def show_lines(read: Callable[[], Sequence[str]], every_s: float | None) -> None:
    """Print lines once; or every few seconds, until a signal.

    On a terminal new lines replace the old ones, elsewhere they are printed after each change.
    While the server is away, the lines stay, and the reason is shown.
    """
    if every_s is None:
        print("\n".join(read()))
        return
    from unshard.evaluate.client.v1 import ServerAwayError

    lines: Sequence[str] = ()
    printed: Sequence[str] | None = None
    was_away = False
    with _screen() as screen:
        while True:
            away = ""
            try:
                lines = read()
            except ServerAwayError as error:
                away = f"waiting: {error}"
            if screen is not None:
                _redraw(screen, lines, away)
            elif away and not was_away:
                say(away)
            elif not away and lines != printed:
                print("\n".join(lines if printed is None else ["", *lines]), flush=True)
                printed = lines
            was_away = bool(away)
            time.sleep(every_s)


def _redraw(screen: "Live", lines: Sequence[str], away: str) -> None:
    from rich.text import Text

    foot = f"{time.strftime('%H:%M:%S')}  Ctrl-C ends"
    text = printable("\n".join([*lines, "", *([away] if away else []), foot]))
    screen.update(Text(text, no_wrap=True, overflow="crop"), refresh=True)


@contextmanager
def _screen() -> "Iterator[Live | None]":
    """Yield a display on stdout; None if stdout is not a terminal that can redraw."""
    is_dumb = os.environ.get("TERM", "").lower() in {"", "dumb", "unknown"}
    if not sys.stdout.isatty() or is_dumb:
        yield None
        return
    from rich.console import Console
    from rich.live import Live

    # A second stream: stdout itself escapes control sequences. `_redraw` escapes those of texts.
    number, encoding = sys.stdout.fileno(), sys.stdout.encoding
    with (
        open(number, "w", encoding=encoding, errors="backslashreplace", closefd=False) as plain,
        Live(
            console=Console(file=plain),
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as screen,
    ):
        yield screen
