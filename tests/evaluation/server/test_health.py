"""A server that cannot keep a job says so and accepts none; clients send it again later."""

import os
import resource
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from evaluation.runs import checkpoint
from evaluation.servers import Fields, Live, cli, live
from unshard.evaluate.client.v1 import EvalClient, ServerAwayError
from unshard.evaluate.server import health
from unshard.evaluate.server.health import HealthCheck, UnhealthyError
from unshard.evaluate.server.store.store import Store
from unshard.evaluate.trainer.config import EvalConfig
from unshard.evaluate.trainer.spool import Spool
from unshard.evaluate.trainer.submitter import Submitter
from waiting import LIMIT_S
from waiting import wait_until as until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("eval-health")]  # one server for all

Condition = Callable[[Live], "Iterator[None]"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tmp_path_factory.mktemp("server")) as started:
        yield started


def moved_away(server: Live) -> Iterator[None]:
    away = server.work.with_name("moved")
    server.work.rename(away)
    yield
    away.rename(server.work)


def locked(server: Live) -> Iterator[None]:
    with closing(sqlite3.connect(server.work / "jobs.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def full(server: Live) -> Iterator[None]:
    """Let the server's process write no byte to any file, as on a full disk."""
    assert server.process is not None
    pid = server.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    yield
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


CONDITIONS = [
    (moved_away, "was moved, removed or replaced"),
    (locked, "database is locked; end the process that has locked it"),
    (full, "cannot be written; File too large; check free space"),
]


def is_healthy(server: Live) -> bool:
    return server.call("GET", "/health").status_code == 200


@pytest.mark.parametrize(("condition", "why"), CONDITIONS)
def test_what_is_submitted_meanwhile_is_evaluated_later(
    server: Live, caplog: pytest.LogCaptureFixture, condition: Condition, why: str
) -> None:
    until(lambda: is_healthy(server), "a healthy server")
    run = server.root / condition.__name__
    fields = {"server_url": server.url, "profile": "script", "tasks": ["score"]}
    submitter = Submitter(EvalConfig.from_dict({**fields, "poll_interval": 0.05}), run)
    body: Fields = {"checkpoint": str(checkpoint(run, 5)), "profile": "script", "tasks": ["score"]}
    with contextmanager(condition)(server):
        until(lambda: not is_healthy(server), "a server that is not healthy")
        assert submitter.submit(run / "checkpoint-5", 5)
        until(lambda: "submissions wait until" in caplog.text, "a refusal")
        assert [entry.step for entry in Spool(run).waiting()] == [5]
        for place, asked in (("/api/v1/jobs", body), ("/evaluate", evaluated(body))):
            answer = server.call("POST", place, json=asked)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")
            assert "accepts no jobs now" in answer.text
        found = server.call("GET", "/health").json()
        assert (found["status"], found["queue_size"]) == ("unhealthy", None)
        assert found["problems"][0]["hint"]
        with EvalClient(server.url) as client:
            assert not client.is_healthy()
            assert any(why in problem for problem in client.problems())
            with pytest.raises(ServerAwayError, match="accepts no jobs now"):
                client.submit_body(body)
    results: list[tuple[int, dict[str, float]]] = []

    def has_come() -> bool:
        results.extend(submitter.completed())
        return bool(results)

    until(has_come, "the result")
    assert [(step, found["unshard_eval/score/acc"]) for step, found in results] == [(5, 0.05)]
    submitter.close()
    assert not list(Spool(run).refused())
    assert list((run / "_unshard" / "pins").iterdir()) == []


def evaluated(body: Fields) -> Fields:
    """Return the same in the words of lmms-eval's protocol."""
    arguments = {"pretrained": body["checkpoint"]}
    return {"model": body["profile"], "tasks": body["tasks"], "model_args": arguments}


def test_status_says_that_the_server_accepts_nothing(server: Live) -> None:
    until(lambda: is_healthy(server), "a healthy server")
    with contextmanager(moved_away)(server):
        shown = cli(server.url, "status")
    assert shown.returncode == 0
    assert "the server accepts no jobs now: the server's database" in shown.stderr
    assert "put the work directory back, or restart the server" in shown.stderr


@pytest.fixture
def work(tmp_path: Path) -> Path:
    Store(tmp_path / "jobs.sqlite").close()
    return tmp_path


def test_a_server_in_order_has_no_problems_and_leaves_nothing(work: Path) -> None:
    before = set(work.iterdir())
    checked = HealthCheck(work / "jobs.sqlite")
    checked.check()
    assert checked.problems() == []
    assert set(work.iterdir()) <= before | {work / "jobs.sqlite-wal", work / "jobs.sqlite-shm"}


def test_a_disk_with_little_room_is_full(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = os.statvfs(work)
    free = there.f_bavail * there.f_frsize
    monkeypatch.setattr(health, "_LEAST_BYTES", free + (1 << 40))
    checked = HealthCheck(work / "jobs.sqlite")
    with pytest.raises(UnhealthyError, match="is full") as caught:
        checked.check()
    assert "MiB free" in caught.value.expected
    assert caught.value.hint == "make room on it"
    monkeypatch.setattr(health, "_LEAST_BYTES", 0)
    checked.check()


def test_a_disk_that_reports_only_zeros_is_not_full(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some network and FUSE file systems do."""
    zeros = os.statvfs_result([0] * 10)
    monkeypatch.setattr(os, "statvfs", lambda _path: zeros)
    HealthCheck(work / "jobs.sqlite").check()


def test_a_disk_that_hangs_is_waited_for_by_one_alone(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = HealthCheck(work / "jobs.sqlite")
    real, has_begun, goes_on = os.statvfs, threading.Event(), threading.Event()

    def hangs(path: Path) -> os.statvfs_result:
        has_begun.set()
        assert goes_on.wait(LIMIT_S)
        return real(path)

    monkeypatch.setattr(os, "statvfs", hangs)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(checked.problems)
        assert has_begun.wait(LIMIT_S)
        try:
            monkeypatch.setattr(health, "_HUNG_S", 0.0)
            problems = checked.problems()
        finally:
            goes_on.set()
        assert ["does not answer" in problem.subject for problem in problems] == [True]
        assert first.result() == []
    assert checked.problems() == []


def test_a_database_that_became_another_is_noticed_and_never_made_anew(work: Path) -> None:
    database = work / "jobs.sqlite"
    checked = HealthCheck(database)
    database.rename(work / "other")
    assert ["moved" in problem.subject for problem in checked.problems()] == [True]
    assert not database.exists()
    Store(database).close()
    assert ["replaced" in problem.subject for problem in checked.problems()] == [True]
