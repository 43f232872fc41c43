"""In which order `watch` takes the checkpoints of a backlog, and which it leaves out: a profile's
`order` and `max_lag`."""

import logging
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from evaluation.running import whole_model
from evaluation.runs import checkpoint
from evaluation.servers import Fields, Live, Stub, free_port, live, scores, serving
from unshard.evaluate.client.v1 import EvalClient
from unshard.evaluate.pins.pin import list_pins
from unshard.evaluate.trainer.config import EvalConfig
from unshard.evaluate.trainer.watcher import Watching
from waiting import wait_until as until

pytestmark = pytest.mark.slow

NEWEST: Fields = {"name": "script", "order": "newest", "max_lag": None}


def real(place: Path, **profile: object) -> AbstractContextManager[Live]:
    """Return a server with one slot, which evaluates the first job when the test says so."""
    command = [sys.executable, "-I", "-S", str(place / "script.py"), "{checkpoint}", "{output}"]
    command += [str(place / "control"), "{tasks}", "{step}", "{weights}"]
    return live(place, profiles={"script": {"kind": "command", "command": command, **profile}})


def save(run: Path, steps: Sequence[int]) -> Path:
    for step in steps:
        whole_model(run / f"checkpoint-{step}")
    return run


def config_for(url: str, count: int | None = 8, **more: object) -> EvalConfig:
    given = {"server_url": url, "profile": "script", "tasks": ["t"], "poll_interval": 0.02}
    return EvalConfig.from_dict({**given, "quota": {"count": count, "bytes": None}, **more})


def began(server: Live) -> list[object]:
    """Return the steps of the jobs that began, in this order."""
    with server.client() as client:
        jobs = [job for job in client.jobs(limit=1000) if job["started_at"]]
    return [job["step"] for job in sorted(jobs, key=lambda job: float(str(job["started_at"])))]


def looked(watching: Watching) -> list[int]:
    return [step for step, _ in watching.look()]


@pytest.fixture
def stub() -> Iterator[Stub]:
    with serving(Stub(profiles=[NEWEST])) as running:
        yield running


def finish_all(stub: Stub, run: Path) -> None:
    def is_done() -> bool:
        for job in list(stub.jobs):
            stub.finish(job, **{"t/acc": 1.0})
        return not list_pins(run)

    until(is_done, "the end of the pins")


@pytest.mark.parametrize("order", ["newest", "oldest"])
def test_twenty_steps_begin_in_the_order_of_the_profile(tmp_path: Path, order: str) -> None:
    steps = list(range(10, 210, 10))
    run = save(tmp_path / "root" / "run", steps)
    with real(tmp_path, order=order) as server, Watching(run, config_for(server.url)) as one:
        until(lambda: (one.look(), len(one.completed()), len(began(server)) == 20)[-1])
        server.all_ended(20)
        assert began(server) == (steps[::-1] if order == "newest" else steps)


@pytest.mark.parametrize(("order", "count"), [("newest", 500), ("oldest", 50)])
def test_the_highest_of_many_steps_are_evaluated_and_the_others_named(
    tmp_path: Path, order: str, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    run = save(tmp_path / "root" / "run", range(count))
    with real(tmp_path, order=order, max_lag=3) as server:
        with Watching(run, config_for(server.url, count=2)) as one:
            until(lambda: (one.look(), len(list_pins(run)) <= 2, len(began(server)) == 4)[-1])
        # Step 0 is never skipped: it may be the model that training began with.
        highest = [count - 3, count - 2, count - 1]
        assert began(server) == ([*highest[::-1], 0] if order == "newest" else [0, *highest])
        assert caplog.text.count(f"{count - 4} steps, 1 to {count - 4}: skipped") == 1
        with Watching(run, config_for(server.url)) as one:
            assert [one.look() for _ in range(2)] == [[], []]
            assert one.held_back == 0
            assert sum("skipped" in line for line in one.left_out()) == 1
            save(run, [count])
            until(lambda: looked(one) == [count])
            server.all_ended(5)
        assert caplog.text.count("skipped") == 1


def test_a_newer_step_gets_room_before_older_ones(tmp_path: Path, stub: Stub) -> None:
    """What has a pin keeps it; among those that wait for one, the newest is first."""
    run = save(tmp_path / "run", range(1, 6))
    with Watching(run, config_for(stub.url, count=2)) as one:
        one.look()
        assert (looked(one), one.held_back) == ([5, 4], 3)
        save(run, [6])
        assert [looked(one), looked(one)] == [[], []]
        assert ({pin.step for pin in list_pins(run)}, one.held_back) == ({5, 4}, 4)
        finish_all(stub, run)
        assert (looked(one), one.held_back) == ([6, 3], 2)
    with Watching(run, config_for(stub.url, count=2)) as one:  # after a restart, too
        one.look()
        assert (looked(one), one.held_back) == ([], 2)
        finish_all(stub, run)
        assert (looked(one), one.held_back) == ([2, 1], 0)
    assert [body["step"] for body in stub.submissions] == [5, 4, 6, 3, 2, 1]


def test_steps_that_fall_behind_while_they_wait_for_room_are_skipped(
    tmp_path: Path, stub: Stub
) -> None:
    stub.profiles = [{**NEWEST, "max_lag": 2}]
    run = save(tmp_path / "run", range(1, 3))
    with Watching(run, config_for(stub.url, count=1)) as one:
        one.look()
        assert (looked(one), one.held_back) == ([2], 1)
        save(run, [3, 4])
        assert [looked(one), looked(one)] == [[], []]
        assert one.held_back == 2
        assert [line for line in one.left_out() if "skipped" in line] == [
            "step 1: skipped, because newer steps wait (max_lag: 2)"
        ]
        for _ in range(2):
            finish_all(stub, run)
            one.look()
    assert [body["step"] for body in stub.submissions] == [2, 4, 3]


def test_what_was_evaluated_takes_no_place_of_what_waits(tmp_path: Path, stub: Stub) -> None:
    """Neither of `max_lag` nor among those that wait for room."""
    stub.profiles = [{**NEWEST, "max_lag": 1}]
    stub.finishes = scores
    run = save(tmp_path / "run", [10, 20, 30])
    with EvalClient(stub.url) as client:
        body = {"checkpoint": str(run / "checkpoint-30"), "step": 30, "profile": "script"}
        client.submit_body({**body, "tasks": ["t"], "weights": "model", "run": "run"})
    with Watching(run, config_for(stub.url)) as one:
        one.look()
        assert (looked(one), one.held_back) == ([20], 0)
        assert one.left_out() == [
            "step 10: skipped, because newer steps wait (max_lag: 1)",
            "steps 20, 30: submitted before",
        ]


def test_of_every_nth_step_the_first_is_taken_the_newest_first(tmp_path: Path, stub: Stub) -> None:
    run = save(tmp_path / "run", (200, 400, 600, 800, 1000, 1200, 1500))
    with Watching(run, config_for(stub.url, eval_steps=500)) as one:
        one.look()
        assert [looked(one), looked(one)] == [[1500, 1000, 600], []]
    stub.profiles = [{**NEWEST, "max_lag": 1}]
    other = save(tmp_path / "other", (600, 800, 1000, 1200))
    for expected in ([1000], []):
        with Watching(other, config_for(stub.url, eval_steps=500)) as one:
            assert [looked(one) for _ in range(3)] == [[], expected, []]


def test_both_sets_of_weights_are_one_step_of_max_lag(tmp_path: Path, stub: Stub) -> None:
    stub.profiles = [{**NEWEST, "max_lag": 2}]
    for step in (1, 2, 3):
        checkpoint(tmp_path / "run", step, ema=True)
    both = ("model", "ema")
    with Watching(tmp_path / "run", config_for(stub.url, weights=["model", "ema"])) as one:
        one.look()
        assert one.look() == [(3, both), (2, both)]


def test_a_server_that_has_not_answered_yet_decides_from_its_answer_on(
    tmp_path: Path, stub: Stub
) -> None:
    """Until then the lowest is first, which the trainer removes first."""
    port = free_port()
    run = save(tmp_path / "run", range(1, 6))
    away = config_for(f"http://127.0.0.1:{port}", count=2)
    with Watching(run, away) as one:
        one.look()
        assert looked(one) == [1, 2]
        with serving(Stub(profiles=[NEWEST], finishes=scores), port):
            assert one.wait_until_sent(20)
            until(lambda: not list_pins(run))
            assert looked(one)[:2] == [5, 4]
    stub.profiles = []  # an older server, which has no such answer
    shutil.rmtree(run / "_unshard")
    with Watching(run, config_for(stub.url, count=2)) as one:
        one.look()
        assert looked(one) == [1, 2]
