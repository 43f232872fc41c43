"""What both protocols answer about a queue that does not move: no scheduler, no process."""

import secrets
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from evaluation.running import script_profile
from evaluation.servers import Still, still
from unshard.evaluate.jobs import Job, Request
from unshard.evaluate.server.store import connections


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Still]:
    with still(tmp_path, script=script_profile(gpus=0)) as made:
        yield made


def queue(server: Still, step: int) -> Job:
    return server.service.store.submit(Request("/x", "script", ("task",), step), pin=None)[0]


def test_the_place_in_the_queue_is_found_by_the_beginning_of_an_id(server: Still) -> None:
    queue(server, 1)
    job = queue(server, 2)
    for name in (job.id, job.id[:8]):
        assert server.client.get(f"/jobs/{name}").json()["position_in_queue"] == 2
        assert server.client.get(f"/api/v1/jobs/{name}").json()["position"] == 2


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_an_ambiguous_id_is_refused_in_the_form_of_each_protocol(
    server: Still, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    ids = ["abcdabcd00000000", "abcdabcd11111111"]
    alike = iter(ids)
    queue(server, 0)  # which makes the run
    monkeypatch.setattr(secrets, "token_hex", lambda _: next(alike))
    for step in (1, 2):
        queue(server, step)
    theirs = server.client.request(method, "/jobs/abcd")
    ours = server.client.request(method, "/api/v1/jobs/abcd")
    assert (theirs.status_code, ours.status_code) == (400, 400)
    assert list(theirs.json()) == ["detail"]
    assert all(name in theirs.json()["detail"] for name in ids)
    assert ours.json()["error"]["found"] == ", ".join(ids)


def test_a_list_of_jobs_reads_the_queue_once(
    server: Still, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = queue(server, 0)
    assert server.service.store.claim(time.time(), running.id) is not None
    queued = [queue(server, step) for step in range(1, 6)]
    statements, connect = list[str](), connections.connect

    def traced(path: Path) -> sqlite3.Connection:
        connection = connect(path)
        connection.set_trace_callback(statements.append)
        return connection

    monkeypatch.setattr(connections, "connect", traced)  # of the threads that answer

    def listed(query: str) -> tuple[dict[str, int | None], int]:
        before = len(statements)
        jobs = server.client.get(f"/api/v1/jobs?{query}").json()["jobs"]
        return {job["id"]: job["position"] for job in jobs}, len(statements) - before

    every, cost = listed("limit=1000")
    assert every == {
        running.id: None,
        **{job.id: place for place, job in enumerate(queued, start=1)},
    }
    last, cost_of_one = listed("limit=1")
    assert last == {queued[-1].id: 5}
    assert cost == cost_of_one > 0
