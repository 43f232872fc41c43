"""What both protocols answer about a queue that stands still: no scheduler, no process."""

import secrets
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from evaluation.running import script_profile
from unshard.evaluate.jobs import Job, Request
from unshard.evaluate.server.config.profiles import ServerConfig
from unshard.evaluate.server.http.app import make_app
from unshard.evaluate.server.http.security import rules_for
from unshard.evaluate.server.serve import make_service
from unshard.evaluate.server.service import Service
from unshard.evaluate.server.store import connections, schema


@dataclass(frozen=True)
class Still:
    """A server whose jobs stay in the queue, and a client of it."""

    service: Service
    client: TestClient

    def queue(self, step: int) -> Job:
        return self.service.store.submit(Request("/x", "script", ("task",), step), pin=None)[0]


@pytest.fixture
def still(tmp_path: Path) -> Iterator[Still]:
    profiles = {"script": script_profile(gpus=0)}
    config = ServerConfig(roots=(tmp_path,), work_directory=tmp_path / "work", profiles=profiles)
    service = make_service(config)
    app = make_app(service, rules_for("127.0.0.1", None))
    with closing(service.store), TestClient(app, base_url="http://127.0.0.1") as client:
        yield Still(service, client)


def test_the_place_in_the_queue_is_found_by_the_beginning_of_an_id(still: Still) -> None:
    still.queue(1)
    job = still.queue(2)
    for name in (job.id, job.id[:8]):
        assert still.client.get(f"/jobs/{name}").json()["position_in_queue"] == 2
        assert still.client.get(f"/api/v1/jobs/{name}").json()["position"] == 2


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_an_ambiguous_id_is_refused_in_the_form_of_each_protocol(
    still: Still, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    ids = ["abcdabcd00000000", "abcdabcd11111111"]
    alike = iter(ids)
    monkeypatch.setattr(secrets, "token_hex", lambda _: next(alike))
    for step in (1, 2):
        still.queue(step)
    theirs = still.client.request(method, "/jobs/abcd")
    ours = still.client.request(method, "/api/v1/jobs/abcd")
    assert (theirs.status_code, ours.status_code) == (400, 400)
    assert list(theirs.json()) == ["detail"]
    assert all(name in theirs.json()["detail"] for name in ids)
    assert ours.json()["error"]["found"] == ", ".join(ids)


def test_a_list_of_jobs_reads_the_queue_once(still: Still, monkeypatch: pytest.MonkeyPatch) -> None:
    running = still.queue(0)
    assert still.service.store.claim(time.time(), running.id) is not None
    queued = [still.queue(step) for step in range(1, 6)]
    statements = list[str]()

    def traced(path: Path) -> sqlite3.Connection:
        connection = schema.connect(path)
        connection.set_trace_callback(statements.append)
        return connection

    monkeypatch.setattr(connections, "connect", traced)  # of the threads that answer

    def listed(query: str) -> tuple[dict[str, int | None], int]:
        before = len(statements)
        jobs = still.client.get(f"/api/v1/jobs?{query}").json()["jobs"]
        return {job["id"]: job["position"] for job in jobs}, len(statements) - before

    every, cost = listed("limit=1000")
    assert every == {
        running.id: None,
        **{job.id: place for place, job in enumerate(queued, start=1)},
    }
    last, cost_of_one = listed("limit=1")
    assert last == {queued[-1].id: 5}
    assert cost == cost_of_one > 0
