import json
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from evaluation.running import child_environment, job_of, request
from unshard.evaluate.jobs import Arguments, Filters, Job, Phase, Request, Status
from unshard.evaluate.process import Process
from unshard.evaluate.server.endings import Cause
from unshard.evaluate.server.store import statements
from unshard.evaluate.server.store.statements import (
    LONGEST_WAIT_S,
    as_request,
    request_as_json,
)
from unshard.evaluate.server.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "jobs.sqlite")


def submit(store: Store, step: int = 1, run: str = "run") -> Job:
    return store.submit(Request(f"ckpt-{step}", "script", ("task",), step, run), pin=None)[0]


def claim(store: Store) -> Job:
    job = store.claim(time.time())
    assert job is not None
    return job


def test_a_request_comes_back_as_it_was_submitted(store: Store) -> None:
    chosen = Arguments(
        model_args={"n": 1, "dtype": "auto"}, num_fewshot=5, batch_size="auto", limit=0.5
    )
    asked = Request("ckpt", "script", ("a", "b"), 3, "run", "ema", chosen)
    job, is_new = store.submit(asked, pin="/pin")
    assert is_new
    assert job.run.label == "run"
    placed = replace(asked, run_id=job.run.id)
    assert (job.request, job.pin, job.status) == (placed, "/pin", Status.QUEUED)
    assert store.get(job.id) == job
    assert store.get("other") is None


def test_requests_in_older_databases_are_read_and_keep_their_keys() -> None:
    """What an earlier version wrote, and the key that it had for it."""
    written = (
        '{"checkpoint": "ckpt", "profile": "script", "tasks": ["a", "b"], "step": 3, "run": "run",'
        ' "weights": "ema", "model_args": {"n": 1, "dtype": "auto"}, "num_fewshot": 5,'
        ' "batch_size": "auto", "limit": 0.5, "gen_kwargs": null, "num_gpus": null,'
        ' "fingerprint": "", "stamps": {}}'
    )
    read = as_request(written)
    assert read.arguments == Arguments(
        model_args={"n": 1, "dtype": "auto"}, num_fewshot=5, batch_size="auto", limit=0.5
    )
    assert (read.tasks, read.step, read.weights) == (("a", "b"), 3, "ema")
    assert read.key == "7726a90c22b90d7b87b9a4252bf5512e"
    assert json.loads(request_as_json(read)).items() >= json.loads(written).items()
    assert Request("c", "p", ("t",)).key == "1c1cde578cc8e5fdf4e0f3dd2355e1c7"
    keys = {replace(read, arguments=Arguments(seed=seed)).key for seed in (None, 0, 1)}
    assert len(keys) == 3


def test_a_request_of_a_later_version_is_read_without_what_is_unknown() -> None:
    later = {**json.loads(request_as_json(Request("c", "p", ("t",)))), "from_the_future": 1}
    assert as_request(json.dumps(later)) == Request("c", "p", ("t",))


def test_names_of_runs_and_jobs_that_wait_are_read_without_the_jobs(store: Store) -> None:
    jobs = [submit(store, step, run) for step, run in enumerate(["b", "a", "b"])]
    claim(store)
    assert [one.label for one in store.runs.all()] == ["a", "b"]
    assert store.queued_ids() == [job.id for job in jobs[1:]]


def test_the_same_key_is_the_same_job(store: Store) -> None:
    first, _ = store.submit(request(Path("a")), pin=None)
    again, is_new = store.submit(request(Path("b")), pin=None)
    assert not is_new
    assert again == first
    claim(store)
    assert store.submit(request(Path("b")), pin=None)[0].status is Status.RUNNING


def test_names_of_metrics_that_the_database_cannot_tell_apart_are_all_kept(store: Store) -> None:
    job = submit(store)
    claim(store)
    metrics = {f"t/a{chr(0xDCFF)}": 1.0, r"t/a\udcff": 2.0, f"t/b{chr(0xDCFF)}": 3.0}
    assert store.complete(job.id, metrics, None)
    found = job_of(store, job.id)
    assert found.status is Status.COMPLETED
    assert sorted(found.metrics.values()) == [1.0, 2.0, 3.0]
    assert found.metrics[r"t/a\udcff"] == 2.0


def test_an_error_of_any_length_is_kept_in_part(store: Store) -> None:
    job = submit(store)
    claim(store)
    store.fail(job.id, "e" * 1_000_000, None)
    assert len(str(job_of(store, job.id).error)) < 21_000


def test_the_pins_of_jobs_that_wait_or_run_are_needed(store: Store) -> None:
    names = ("queued", "running", "cancelled", "completed", "neighbour")
    pins = [f"/r/run/_unshard/pins/{name}" for name in names[:-1]] + ["/r/run-2/_unshard/pins/n"]
    jobs = {
        name: store.submit(request(Path("a"), step), pin=pin)[0].id
        for step, (name, pin) in enumerate(zip(names, pins, strict=True))
    }
    store.submit(request(Path("a"), 10), pin=None)
    for name in names[1:4]:
        assert store.claim(time.time(), jobs[name]) is not None
    store.cancel(jobs["cancelled"])  # its process runs on for a moment
    store.complete(jobs["completed"], {}, None)
    needed = [(jobs[name], pin) for name, pin in zip(names, pins, strict=True)]
    del needed[3]
    assert store.pins.list_needed() == needed
    assert [store.pins.is_needed(pin) for pin in pins] == [True, True, True, False, True]
    assert not store.pins.is_needed("/r/run/_unshard/pins/\udcff")


def test_jobs_are_alike_if_their_fingerprints_differ_at_most(store: Store) -> None:
    asked = Request("ckpt", "script", ("task",), None, "run", fingerprint="old")
    requests = [
        asked,
        replace(asked, fingerprint="new"),
        replace(asked, checkpoint="other"),
        replace(asked, step=1),
        replace(asked, tasks=("other",)),
        replace(asked, weights="ema"),
    ]
    jobs = [store.submit(one, pin=None)[0] for one in requests]
    placed = replace(asked, fingerprint="", run_id=jobs[0].run.id)
    assert store.alike(placed) == [jobs[1], jobs[0]]
    assert store.status_of(jobs[0].request) is Status.QUEUED
    assert store.status_of(placed) is None


def test_a_job_that_is_not_final_can_get_another_pin(store: Store) -> None:
    job, _ = store.submit(request(Path("a")), pin="/one")
    store.repin(job.id, "/two")
    claimed = claim(store)
    assert claimed.pin == "/two"
    store.repin(job.id, "/three")
    assert job_of(store, job.id).pin == "/three"
    store.complete(job.id, {}, None)
    store.repin(job.id, "/four")
    assert job_of(store, job.id).pin == "/three"


def test_what_is_not_completed_can_be_superseded_and_submitted_again(store: Store) -> None:
    queued, running, failed, completed, cancelled = (submit(store, step) for step in range(5))
    for job in (running, failed, completed):
        assert store.claim(time.time(), job.id) is not None
    store.fail(failed.id, "rewritten", None)
    store.complete(completed.id, {}, None)
    store.cancel(cancelled.id)
    jobs = (queued, running, failed, completed, cancelled)
    assert [store.supersede(job.id, "newer") for job in jobs] == [True, True, True, False, False]
    assert {job_of(store, job.id).status for job in jobs[:3]} == {Status.SUPERSEDED}
    assert job_of(store, failed.id).superseded_by == "newer"
    assert job_of(store, failed.id).error == "saved again since: see job newer"
    assert [job.id for job in store.running()] == [running.id]  # until its process is gone
    store.release(running.id)
    assert job_of(store, running.id).status is Status.SUPERSEDED
    again = store.submit(queued.request, pin=None)[0]
    assert (again.status, again.superseded_by) == (Status.QUEUED, None)


def interrupt(store: Store, job: Job, outcome: str) -> int:
    """Claim a job and interrupt the attempt; return which in a row this is."""
    assert store.claim(time.time(), job.id) is not None
    before = store.count_in_a_row(job.id, outcome)
    assert store.postpone(job.id, outcome, "why", 0)
    return before + 1


def test_only_a_failure_ends_a_row_of_interruptions(store: Store) -> None:
    """Two kinds that take turns would otherwise never be bounded."""
    job = submit(store)
    killed, died = Cause.KILLED, Cause.DIED
    turns = [(killed, 1), (Cause.HINDERED, 1), (killed, 2), (died, 1), ("lost", 1), (killed, 3)]
    assert [interrupt(store, job, outcome) for outcome, _ in turns] == [count for _, count in turns]
    claim(store)
    store.fail(job.id, "why", 0)
    assert interrupt(store, job, Cause.KILLED) == 1


def test_a_job_that_is_submitted_again_begins_a_new_row(store: Store) -> None:
    job = submit(store)
    assert [interrupt(store, job, Cause.HINDERED) for _ in range(3)] == [1, 2, 3]
    assert store.cancel(job.id)
    store.submit(job.request, pin=None)
    assert [interrupt(store, job, Cause.HINDERED) for _ in range(2)] == [1, 2]


def test_a_clock_that_is_set_back_does_not_end_a_row(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    job = submit(store)
    now -= 1e6
    assert [interrupt(store, job, Cause.KILLED) for _ in range(3)] == [1, 2, 3]


def test_a_job_that_ended_badly_is_queued_anew_with_the_new_checkpoint(store: Store) -> None:
    job = submit(store)
    claim(store)
    store.fail(job.id, "why", None)
    again, is_new = store.submit(request(Path("new")), pin="/new")
    assert (again.id, is_new, again.status) == (job.id, False, Status.QUEUED)
    assert (again.error, again.failures, again.pin) == (None, 0, "/new")
    assert again.request.checkpoint == "new"
    store.claim(time.time())
    store.complete(job.id, {"task/acc": 1.0}, None)
    assert store.submit(request(Path("new")), pin=None)[0].status is Status.COMPLETED


def test_the_oldest_is_claimed_first_and_only_when_it_is_due(store: Store) -> None:
    first, second = submit(store, 1), submit(store, 2)
    assert [store.position(job.id) for job in (first, second)] == [1, 2]
    due = [(first.id, "script", None), (second.id, "script", None)]
    assert list(store.due(time.time(), 9)) == due
    assert list(store.due(time.time(), 1)) == due[:1]
    claimed = claim(store)
    assert (claimed.id, claimed.status, claimed.phase) == (first.id, Status.RUNNING, Phase.MERGING)
    assert claimed.attempts == 1
    assert store.position(first.id) is None
    store.fail(first.id, "again", time.time() + 1000)
    assert claim(store).id == second.id
    assert store.claim(time.time()) is None
    later = store.claim(time.time() + 2000)
    assert later is not None
    assert (later.id, later.attempts, later.failures, later.error) == (first.id, 2, 1, "again")


def test_one_job_can_be_claimed_by_its_id(store: Store) -> None:
    submit(store, 1)
    second = submit(store, 2)
    claimed = store.claim(time.time(), second.id)
    assert claimed is not None
    assert claimed.id == second.id
    assert store.claim(time.time(), second.id) is None


def test_a_job_with_an_open_attempt_is_not_claimed(store: Store) -> None:
    job = submit(store)
    claim(store)
    process = Process(1, 2, "boot", ("0", "1"), "/directory")
    store.record_process(job.id, process)
    assert store.cancel(job.id)
    submit(store)
    assert job_of(store, job.id).status is Status.QUEUED
    assert store.claim(time.time()) is None
    assert [one.process for one in store.running()] == [process]
    store.release(job.id)
    assert store.running() == []
    assert claim(store).attempts == 2


def test_gpus_are_stored_as_numbers_or_ids(store: Store, tmp_path: Path) -> None:
    """Databases of earlier versions contain numbers; one of such a version may read ours."""
    process = Process(1, 2, "boot", ("7", "GPU-8f3a", "MIG-GPU-8f3a/1/0"), "/directory")
    job = submit(store)
    claim(store)
    store.record_process(job.id, process)
    assert [one.process for one in store.running()] == [process]
    with closing(sqlite3.connect(tmp_path / "jobs.sqlite")) as connection:
        (text,) = connection.execute("SELECT gpus FROM attempts").fetchone()
    assert json.loads(text) == [7, "GPU-8f3a", "MIG-GPU-8f3a/1/0"]


def test_what_an_attempt_says_after_its_job_was_cancelled_changes_nothing(store: Store) -> None:
    job = submit(store)
    claim(store)
    assert store.cancel(job.id)
    assert not store.cancel(job.id)
    assert not store.complete(job.id, {"task/acc": 1.0}, None)
    assert job_of(store, job.id).status is Status.CANCELLED
    assert job_of(store, job.id).metrics == {}


def test_results_are_written_under_their_step(store: Store) -> None:
    for step in (20, 10):
        submit(store, step)
    for job in (claim(store), claim(store)):
        metrics = {"task/acc": 0.5, "task/em,strict": 1.0}
        assert store.complete(job.id, metrics, Path("/results.json"))
    found = list(store.results(Filters(run="run")))
    assert [(one.step, one.task, one.metric, one.value) for one in found] == [
        (20, "task", "acc", 0.5),
        (20, "task", "em,strict", 1.0),
        (10, "task", "acc", 0.5),
        (10, "task", "em,strict", 1.0),
    ]
    assert list(store.results(Filters(step=10, limit=1))) == found[2:3]
    assert list(store.results(Filters(), found[1].number)) == found[2:]
    assert list(store.results(Filters(run="other"))) == []


def test_a_lost_attempt_is_not_a_failure(store: Store) -> None:
    job = submit(store)
    claim(store)
    assert store.requeue(job.id, "the server ended")
    lost = job_of(store, job.id)
    assert (lost.status, lost.attempts, lost.failures) == (Status.QUEUED, 1, 0)
    with store._connections.transaction() as connection:
        assert connection.execute("SELECT outcome FROM attempts").fetchone()[0] == "lost"


def test_jobs_are_listed_newest_first_and_counted(store: Store) -> None:
    jobs = [submit(store, step) for step in range(4)]
    claim(store)
    store.expire(jobs[0].id, "gone")
    store.cancel(jobs[3].id)
    assert [job.request.step for job in store.jobs(Filters())] == [3, 2, 1, 0]
    queued = store.jobs(Filters(status=Status.QUEUED, limit=1))
    assert [job.request.step for job in queued] == [2]
    assert store.jobs(Filters(step=0, run="run", profile="script", weights="ema")) == []
    assert store.counts() == {
        Status.QUEUED: 2,
        Status.RUNNING: 0,
        Status.COMPLETED: 0,
        Status.FAILED: 0,
        Status.CANCELLED: 1,
        Status.EXPIRED: 1,
        Status.SUPERSEDED: 0,
    }


def test_every_change_is_an_event(store: Store) -> None:
    job = submit(store)
    claim(store)
    store.record_phase(job.id, Phase.EVALUATING)
    store.record_phase(job.id, Phase.EVALUATING)
    store.complete(job.id, {}, None)
    events = store.events(0)
    assert [(event.status, event.phase) for event in events] == [
        (Status.QUEUED, None),
        (Status.RUNNING, Phase.MERGING),
        (Status.RUNNING, Phase.EVALUATING),
        (Status.COMPLETED, None),
    ]
    assert store.events(events[1].number) == events[2:]


def test_old_events_are_forgotten_and_few_are_sent_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statements, "_EVENTS", 1200)
    job = submit(store)
    with store._connections.transaction() as connection:
        for _ in range(1299):
            statements.add_event(connection, job.id, 0.0)
    events = store.events(0)
    assert (events[0].number, len(events)) == (101, 1000)
    assert len(store.events(events[-1].number)) == 200


def test_numbers_come_back_bit_for_bit(store: Store) -> None:
    metrics = {"t/a": 0.1 + 0.2, "t/b": 1 / 3, "t/c": 1.7976931348623157e308, "t/d": 5e-324}
    job = submit(store)
    claim(store)
    store.complete(job.id, metrics, None, {"t/b": 1 / 7})
    assert job_of(store, job.id).metrics == metrics
    errors = {f"{one.task}/{one.metric}": one.stderr for one in store.results(Filters())}
    assert errors == {**dict.fromkeys(metrics), "t/b": 1 / 7}
    assert {f"{one.task}/{one.metric}": one.value for one in store.results(Filters())} == metrics


def test_a_clock_that_is_set_back_makes_no_job_wait_longer(store: Store) -> None:
    job = submit(store)
    now = time.time()
    store.claim(now)
    store.postpone(job.id, Cause.HINDERED, "full", now + LONGEST_WAIT_S)
    assert list(store.due(now + 1, 1)) == []
    assert len(list(store.due(now - 10, 1))) == 1
    assert store.claim(now - 10) is not None


def test_a_value_that_is_not_a_number_leaves_the_job_running(store: Store) -> None:
    job = submit(store)
    claim(store)
    with pytest.raises(sqlite3.IntegrityError):
        store.complete(job.id, {"task/a": 1.0, "task/b": float("nan")}, None)
    assert job_of(store, job.id).status is Status.RUNNING
    assert job_of(store, job.id).metrics == {}


def test_submits_of_one_key_from_many_threads_make_one_job(store: Store) -> None:
    barrier = threading.Barrier(8)

    def one(_number: int) -> tuple[Job, bool]:
        barrier.wait()
        return store.submit(request(Path("ckpt")), pin=None)

    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(one, range(8)))
    assert len({job.id for job, _ in done}) == 1
    assert sum(is_new for _, is_new in done) == 1


def claim_all(path: Path) -> list[str]:
    store = Store(path)
    found = []
    while (job := store.claim(time.time())) is not None:
        found.append(job.id)
    store.close()
    return found


def claim_in_threads(path: Path) -> list[str]:
    with ThreadPoolExecutor(3) as pool:
        return [job for found in pool.map(claim_all, [path] * 3) for job in found]


def test_no_job_is_claimed_twice_by_threads_of_several_processes(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite"
    store = Store(path)
    made = {submit(store, step).id for step in range(60)}
    store.close()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.map(claim_in_threads, [path, path], chunksize=1)
    claimed = [job for part in found for job in part]
    assert len(claimed) == 60
    assert set(claimed) == made


SUBMITTING = """
import itertools, pathlib, sys
from unshard.evaluate.jobs import Request
from unshard.evaluate.server.store.store import Store
store = Store(pathlib.Path(sys.argv[1]))
for step in itertools.count():
    job, _ = store.submit(Request("c", "p", ("t",), step), pin=None)
    print(job.id, flush=True)
"""


def test_what_was_answered_survives_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite"
    command = [sys.executable, "-c", SUBMITTING, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environment()) as child:
        assert child.stdout is not None
        answered = [child.stdout.readline() for _ in range(20)]
        os.kill(child.pid, signal.SIGKILL)
        answered += [line for line in child.stdout if line.endswith(b"\n")]
    store = Store(path)
    jobs = {job.id for job in store.jobs(Filters())}
    assert {line.decode().strip() for line in answered} <= jobs
    assert len(store.events(0)) == len(jobs)
