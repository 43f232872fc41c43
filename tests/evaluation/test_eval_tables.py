"""The tables of `unshard eval`: how they look, `--watch`, `--best`, and `compare`."""

import csv
import io
import json
import math
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest
from rich.cells import cell_len

from evaluation.running import child_environment
from evaluation.runs import checkpoint
from evaluation.servers import Fields, Live, Stub, cli, free_port, live, serving
from unshard.cli.evaluate.show import print_jobs
from unshard.evaluate import summary
from unshard.evaluate.comparing import compare_runs
from unshard.evaluate.jobs import Result
from unshard.evaluate.summary import tables_of
from unshard.evaluate.tables import lay_out_table, write_markdown, write_number
from waiting import LIMIT_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("eval-tables")]  # one server for all
NUMBERS = frozenset({"step"})

SCRIPT = """
import json, pathlib, sys
model, output, control = map(pathlib.Path, sys.argv[1:4])
tasks, step, weights = sys.argv[4:]
acc = {"0": 0.1, "5": 0.6, "10": 0.5, "20": 0.55}[step]
numbers = {"acc,none": acc, "acc_stderr,none": 0.03, "ppl,none": 10 - acc}
found = {task: numbers for task in tasks.split(",")}
found["higher_is_better"] = {"t": {"ppl": False}}
(output / "results.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tmp_path_factory.mktemp("server"), script=SCRIPT) as started:
        with started.client() as client:
            for run, steps in (("one", (5, 10)), ("two", (0, 10, 20))):
                for step in steps:
                    path = checkpoint(started.root / run, step)
                    client.submit(str(path), step, "script", ["t"], run=run)
        started.all_ended(5)
        yield started


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_columns_are_aligned_by_cells_and_hostile_names_stay_one_cell() -> None:
    rows = [
        {"job": "0123abcd", "run": name, "step": step}
        for name, step in (("\u5b9f\u9a13", 5), ("e\x1b[2J\n\t\u202e", 100), ("plain", None))
    ]
    head, *lines = lay_out_table(rows, numbers=NUMBERS)
    assert {cell_len(line) for line in (head, *lines)} == {cell_len(head)}
    assert [line.split()[-1] for line in lines] == ["5", "100", "-"]
    assert r"e\x1b[2J\n\t\u202e" in lines[1]
    head, rule, *lines = write_markdown([{"run": "a|b", "step": 1}], numbers=NUMBERS)
    assert (head, rule, lines) == ("| run | step |", "| --- | --: |", [r"| a\|b | 1 |"])


@pytest.mark.parametrize(
    ("value", "four", "two"),
    [
        (95940.0, "95940", "95940"),
        (-6738415616.0, "-6738415616", "-6738415616"),
        (95940.55, "95941", "95941"),
        (10.04, "10.04", "10"),
        (102.4, "102.4", "102"),
        (9999.96, "10000", "10000"),
        (0.123456, "0.1235", "0.12"),
        (3.2e-7, "3.2e-07", "3.2e-07"),
        (0.0, "0", "0"),
        (2.0**60, "1.153e+18", "1.2e+18"),
        (math.inf, "inf", "inf"),
        (math.nan, "nan", "nan"),
    ],
)
def test_numbers_have_the_digits_before_their_point(value: float, four: str, two: str) -> None:
    assert [write_number(value, digits) for digits in (4, 2)] == [four, two]
    assert write_number(value, 4, sign="+").lstrip("+") == four


def test_large_whole_numbers_are_written_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    """In the table when training ends, in `compare`, in `status` and in what `watch` prints."""
    values = [(1, 95940.0), (2, 95941.0), (3, 95940.0)]
    results = [
        Result(step, "job", "run", step, "model", "p", "size", "bytes", value, 1.0, 1234.5)
        for step, value in values
    ]
    (line,) = tables_of(compare_runs(["run"], results, higher_is_better=True))[1:]
    assert "2: 95941 \u00b1 1234" in line
    assert "3: 95940 \u00b1 1234" in line
    assert "e+" not in line
    job = {"id": "1" * 16, "status": "completed", "run": "r", "step": 1, "weights": "model"}
    job |= {"profile": "p", "tasks": ["t"], "metrics": {"t/n": 123456789.0}, "error": None}
    print_jobs([job | {"stderr": {"t/n": 1234567.0}}], as_json=False)
    assert "t/n = 123456789 \u00b1 1234567" in capsys.readouterr().out


@pytest.mark.parametrize("width", [30, 50, 60, 80, 120])
def test_a_narrow_terminal_cuts_names_and_never_ids(width: int) -> None:
    row: dict[str, object] = {"job": "0123abcd", "status": "completed", "run": "\u5b9f" * 40}
    row |= {"step": 12345, "weights": "model", "profile": "p", "tasks": "t," * 40}
    row |= {"submitted (local)": "1970-01-01 03:00:00"}
    head, line = lay_out_table([row], numbers=NUMBERS, width=width)
    assert {"0123abcd", "completed", "12345"} <= set(line.split())
    # Below that there is nothing left to cut.
    assert max(cell_len(head), cell_len(line)) <= max(width, 51)
    assert "\u2026" in line
    assert ("submitted" in head) == (width >= 100)
    assert max(map(cell_len, lay_out_table([row], numbers=NUMBERS))) > 160  # piped: all of it


def test_the_best_step_is_marked(server: Live) -> None:
    given = ("results", "--best", "t/acc", "--higher-is-better")
    done = cli(server.url, *given, "--csv")
    assert {(row["run"], row["step"], row["metric"]) for row in rows_of(done.stdout)} >= {
        ("one", "5", "ppl")
    }
    marked = [row for row in rows_of(done.stdout) if row["best"] == "True"]
    assert [(row["run"], row["step"], row["metric"], row["stderr"]) for row in marked] == [
        ("one", "5", "acc", "0.03"),
        ("two", "20", "acc", "0.03"),
    ]
    found = json.loads(cli(server.url, *given, "--json").stdout)["results"]
    assert [(one["step"], one["metric"]) for one in found if one["best"]] == [
        (5, "acc"),
        (20, "acc"),
    ]
    known = cli(server.url, "results", "--best", "t/ppl", "--csv")  # the evaluator says: the lowest
    marked = [row for row in rows_of(known.stdout) if row["best"] == "True"]
    assert [(row["run"], row["step"]) for row in marked] == [("one", "5"), ("two", "20")]
    lines = cli(server.url, *given, "--run", "one").stdout.splitlines()
    assert [" best " in line for line in lines] == [
        True,
        *(" acc " in line and " 5 " in line for line in lines[1:]),
    ]
    refused = cli(server.url, "results", "--best", "t/acc")
    assert (refused.returncode, "which direction is better" in refused.stderr) == (2, True)
    assert "--lower-is-better" in refused.stderr
    listed = cli(server.url, "status").stdout
    assert listed.count("t/acc = 0.5 \u00b1 0.03") == 2
    assert listed.count("t/ppl = 9.5\n") == 2
    refused = cli(server.url, "results", "--lower-is-better")
    assert (refused.returncode, "add --best TASK/METRIC" in refused.stderr) == (2, True)


def test_runs_are_compared(server: Live) -> None:
    given = ("compare", "one", "two", "--higher-is-better")
    rows = json.loads(cli(server.url, *given, "--json").stdout)["comparisons"]
    acc = {row["run"]: row for row in rows if row["metric"] == "acc"}
    assert (acc["one"]["best_step"], acc["one"]["last_step"]) == (5, 10)
    assert acc["one"]["last_minus_best"] == pytest.approx(-0.1)
    assert acc["one"]["last_minus_best_in_stderrs"] == pytest.approx(-0.1 / (0.03 * 2**0.5))
    assert (acc["two"]["base"], acc["two"]["common_step"]) == (0.1, 10)
    assert (acc["two"]["minus_first_run"], acc["one"]["minus_first_run"]) == (0.0, None)
    written = rows_of(cli(server.url, *given, "--csv").stdout)
    assert [row["run"] for row in written] == [row["run"] for row in rows]
    of_runs, between = cli(server.url, *given).stdout.split("\n\n")
    assert of_runs.splitlines()[1].split()[:3] == ["t", "acc", "one"]
    assert "5: 0.6 \u00b1 0.03" in of_runs
    assert "-2.4" in of_runs
    assert [line.split()[2] for line in between.splitlines()[1:]] == ["two", "two"]
    assert "| t | acc | one |" in cli(server.url, *given, "--markdown").stdout
    refused = cli(server.url, "compare", "one", "nowhere")
    assert (refused.returncode, "run 'nowhere' has no results" in refused.stderr) == (2, True)


def test_the_summary_of_a_run_is_the_table_of_compare_and_is_bounded(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server.client() as client:
        title, *table = summary.summarise(client, "one").splitlines()
        assert title == "evaluations of one:"
        assert table == cli(server.url, "compare", "one").stdout.splitlines()
        assert summary.summarise(client, "nowhere") == ""
        monkeypatch.setattr(summary, "MOST_METRICS", 1)
        *_, last = summary.summarise(client, "one").splitlines()
        assert last == "... and 1 more: unshard eval compare one"


class _Watched:
    """A command with `--watch`, and what it has printed so far: on a terminal, or into a pipe."""

    def __init__(self, url: str, *arguments: str, on_terminal: bool) -> None:
        self._from, into = pty.openpty() if on_terminal else os.pipe()
        environment = child_environment() | {"UNSHARD_EVAL_SERVER": url}
        environment |= {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
        line = [sys.executable, "-m", "unshard", "eval", *arguments]
        self.process = subprocess.Popen(
            [*line, "--watch", "--interval", "0.05"], stdout=into, stderr=into, env=environment
        )
        os.close(into)
        self.text = ""

    def has(self, *parts: str) -> bool:
        self.text += os.read(self._from, 65536).decode(errors="replace")
        return all(part in self.text for part in parts)

    def end(self) -> int:
        self.process.send_signal(signal.SIGINT)
        with suppress(OSError):  # of a terminal that is closed
            while data := os.read(self._from, 65536):
                self.text += data.decode(errors="replace")
        os.close(self._from)
        return self.process.wait(LIMIT_S)


@pytest.mark.parametrize("on_terminal", [True, False])
def test_watch_shows_what_changes_and_outlasts_the_server(*, on_terminal: bool) -> None:
    stub, port = Stub(), free_port()
    view: Fields = {"id": "0123abcd", "run": "evil\x1b[2Jrun", "step": 5, "weights": "model"}
    view |= {"profile": "p", "tasks": ["t"], "status": "running", "phase": "merging"}
    view |= {"metrics": {}, "error": None, "completed_at": None, "attempts": 1}
    stub.jobs["0123abcd"] = view
    with serving(stub, port):
        watched = _Watched(stub.url, "status", on_terminal=on_terminal)
        wait_until(lambda: watched.has("0123abcd", "merging"))
        view["phase"] = "evaluating"
        wait_until(lambda: watched.has("evaluating"))
    wait_until(lambda: watched.has("waiting: http://127.0.0.1"))
    view |= {"status": "completed", "metrics": {"t/acc": 0.5}, "completed_at": 1.0}
    with serving(stub, port):
        wait_until(lambda: watched.has("t/acc = 0.5"))
        tables = watched.text.count("0123abcd")
        assert watched.end() == 130
    assert r"evil\x1b[2Jrun" in watched.text
    assert "\x1b[2J" not in watched.text
    assert ("\x1b[" in watched.text) == on_terminal
    if not on_terminal:  # printed when it has changed, and not else
        assert tables == 3
