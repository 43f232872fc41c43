"""What an attempt on a Ray cluster records, and how it is judged; without Ray."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from evaluation.running import is_running, request, script_profile
from unshard.evaluate.server.cluster.assignment import (
    ENDED_NAME,
    NODE,
    NOT_PLACED,
    assign,
    grace_on,
    is_placed,
    read_assignment,
    read_end,
    read_node,
    record_node,
)
from unshard.evaluate.server.cluster.place import _await_files
from unshard.evaluate.server.cluster.seat import Seat, clear, sizes_below
from unshard.evaluate.server.endings import Cause, Failed, Postponed, judge
from unshard.evaluate.server.evaluators.work import Work
from unshard.evaluate.server.processes.supervise import Exit, Order, write_exit
from unshard.evaluate.server.processes.table import MARK
from waiting import wait_until


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    directory = tmp_path / "jobs" / "1a2b" / "3"
    directory.mkdir(parents=True)
    return directory


def assigned(attempt: Path) -> Order:
    order = Order(["evaluate"], {"ALL": "of it"}, str(attempt), 7.0, 0.5, 1000)
    return assign(order, {"OWN": "1"}, address="here:1", gpus=2, model=Path("/model"))


def end(directory: Path, reason: str, error: str = "", **more: str) -> None:
    write_exit(directory, Exit(reason, 1, error, 0.0), lambda: True, **more)


def test_what_the_node_gets_is_what_would_run_here(
    attempt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_placed(attempt)
    local = assigned(attempt)
    assert is_placed(attempt)
    for name, value in local.environment.items():
        monkeypatch.setenv(name, value)
    found = read_assignment()
    there = Order(["evaluate"], {"OWN": "1"}, str(attempt / NODE), 7.0, 0.5, 1000, is_tied=True)
    assert asdict(found.order) == asdict(there)
    assert (found.address, found.name, found.gpus, found.model) == ("here:1", "1a2b/3", 2, "/model")
    assert found.attempt == attempt
    assert local.grace_s == grace_on(attempt, 0.5) > 0.5
    json.dumps(asdict(local), allow_nan=True)


def test_an_attempt_ended_on_its_node_as_that_says(attempt: Path) -> None:
    end(attempt, "exited")
    assert read_end(attempt) == Exit("exited", 1, "", 0.0)  # it ran here
    assigned(attempt)
    assert read_node(attempt) is None
    record_node(attempt, "n1")
    assert read_node(attempt) == "n1"
    found = read_end(attempt)
    assert found is not None
    assert found.reason == NOT_PLACED  # the process that watched it has crashed
    end(attempt / NODE, "timeout", name=ENDED_NAME)
    assert read_end(attempt) == Exit("timeout", 1, "", 0.0)
    assert read_node(attempt) is None  # nothing of it is left there
    (attempt / "exit.json").unlink()
    assert read_end(attempt) is None  # killed here


@pytest.mark.parametrize(
    ("reason", "cause"),
    [("lost", Cause.NODE), ("killed", Cause.KILLED), ("not placed", Cause.HINDERED)],
)
def test_what_ray_could_not_do_is_not_a_failure(attempt: Path, reason: str, cause: Cause) -> None:
    work = Work(attempt, attempt, attempt, request(attempt), script_profile())
    outcome = judge(work, Exit(reason, 1, "why", 0.0))
    assert outcome == Postponed("why", cause)
    assert isinstance(judge(work, Exit("timeout", 1, "", 0.0)), Failed)


def test_what_is_left_on_a_node_is_ended_by_its_mark(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    marked, other = (
        subprocess.Popen(command, env={**os.environ, MARK: str(tmp_path / name)})
        for name in ("this", "other")
    )
    try:
        wait_until(lambda: all(is_running(one.pid) for one in (marked, other)))
        clear(str(tmp_path / "this"), 5)
        assert marked.wait() == -15
        assert is_running(other.pid)
    finally:
        for one in (marked, other):
            one.kill()
            one.wait()


def test_a_seat_tells_what_it_runs_and_how_that_ended(
    attempt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor's methods, called without Ray; each may be called again."""
    for name, value in assigned(attempt).environment.items():
        monkeypatch.setenv(name, value)
    assignment = read_assignment()
    monkeypatch.setenv("RAY_JOB_ID", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = "import os; print(sorted(n for n in os.environ if n[:3] in ('RAY', 'OMP', 'OWN')))"
    script += "; print(os.environ['CUDA_VISIBLE_DEVICES']); open('../output/r.json', 'w').close()"
    assignment.order.command[:] = [sys.executable, "-I", "-S", "-c", script]
    (attempt / "output").mkdir()
    seat = Seat()
    seat.start(assignment, ("4", "5"))
    seat.start(assignment, ("4", "5"))
    wait_until(lambda: seat.news(0).exit is not None)
    news = seat.news(0)
    assert news.text == "['OWN']\n4,5\n"
    assert news.exit is not None
    assert (news.exit.reason, news.exit.returncode) == ("exited", 0)
    assert news.files == {str(attempt / "output" / "r.json"): 0}
    _await_files(news.files, lambda: False)
    seat.stop()


def test_a_seat_reports_a_program_that_is_not_on_its_node(
    attempt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in assigned(attempt).environment.items():
        monkeypatch.setenv(name, value)
    assignment = read_assignment()
    assignment.order.command[:] = ["/nowhere"]
    seat = Seat()
    seat.start(assignment, ())
    wait_until(lambda: seat.news(0).exit is not None)
    done = seat.news(0).exit
    assert done is not None
    assert done.reason == "not started"
    assert "/nowhere" in done.error


def test_files_that_are_not_seen_yet_are_waited_for(tmp_path: Path) -> None:
    asked: list[int] = []

    def appears() -> bool:
        asked.append(1)
        (tmp_path / "late").write_text("12")
        return False

    _await_files({str(tmp_path / "late"): 2}, appears)
    assert asked
    assert sizes_below(tmp_path) == {str(tmp_path / "late"): 2}
