"""Engines that stay between jobs: who has them, when they end, and that no job is lost."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

import pytest

from evaluation.running import child_environment, is_running, job_of, wait_for, wait_until
from evaluation.runs import checkpoint
from evaluation.warm import Place, are_gone, noted, submit
from ranks import snapshot
from unshard.evaluate.jobs import Phase, Status
from unshard.evaluate.server.queue.scheduler import Scheduler
from unshard.evaluate.server.store.store import Store
from unshard.evaluate.server.warm.worker import SOCKET_NAME

pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@contextmanager
def running(place: Place, **chosen: object) -> Iterator[tuple[Store, Scheduler]]:
    store, server = place.scheduler(**chosen)  # type: ignore[arg-type]  # its own keywords
    server.start()
    try:
        yield store, server
    finally:
        server.stop(end=True)
    assert list((place.work / "engines").iterdir()) == []


def test_one_engine_evaluates_one_checkpoint_after_the_other(place: Place) -> None:
    run = place.root / "run"
    checkpoints = [checkpoint(run, step) for step in (1, 2, 3)]
    before = snapshot(run)
    with running(place) as (store, server):
        jobs = [submit(store, one) for one in checkpoints]
        done = [wait_for(store, job.id, Status.COMPLETED) for job in jobs]
        logs = [(server.directory_of(job) / "log.txt").read_text() for job in done]
    notes = noted(place, 3)
    assert [note["checkpoint"] for note in notes] == list(map(str, checkpoints))
    assert len({note["pid"] for note in notes}) == 1
    assert [job.metrics for job in done] == [{"task/acc": float(step)} for step in (1, 2, 3)]
    assert [job.attempts for job in done] == [1, 1, 1]
    assert [note["cwd"] for note in notes] == [str(server.directory_of(job)) for job in done]
    # Each log has the output of its own job, and nothing of what was printed between.
    assert [log.splitlines() for log in logs] == [[f"evaluating {one}"] for one in checkpoints]
    assert are_gone(notes[0])
    assert snapshot(run) == before
    assert list((place.work / "merged").iterdir()) == []


def test_other_arguments_of_the_model_or_another_config_mean_another_engine(place: Place) -> None:
    first, second = (checkpoint(place.root / "run", step) for step in (1, 2))
    (second / "config.json").write_text('{"model_type": "qwen2", "rope_theta": 5}')
    with running(place) as (store, _):
        for number, (one, dtype) in enumerate(
            [(first, "auto"), (first, "float32"), (second, "float32"), (second, "float32")], 1
        ):
            job = submit(store, one, dtype=dtype, truncation_side=str(number // 4))
            wait_for(store, job.id, Status.COMPLETED)
        notes = noted(place, 4)
        assert [is_running(int(str(note["pid"]))) for note in notes] == [False, False, False, True]
    assert [note["jobs"] for note in notes] == [1, 1, 1, 1]


def test_an_idle_engine_gives_its_gpus_up_when_another_job_waits(place: Place) -> None:
    one = checkpoint(place.root / "run", 1)
    other = checkpoint(place.root / "run", 2)
    # The script fails if the engine's process is still there when it begins.
    note = place.control / "jobs"
    script = (
        f"pids = [json.loads(line)['pid'] for line in open({str(note)!r})]\n"
        "alive = [pid for pid in pids if os.path.exists(f'/proc/{pid}')]\n"
        "done(acc=len(alive))"
    )
    with running(place, script=script) as (store, _):
        wait_for(store, submit(store, one).id, Status.COMPLETED)
        found = wait_for(store, submit(store, one, "script").id, Status.COMPLETED)
        assert found.metrics == {"task/acc": 0.0}
        wait_for(store, submit(store, other).id, Status.COMPLETED)
    notes = noted(place, 2)
    assert notes[0]["pid"] != notes[1]["pid"]


def test_engines_on_other_gpus_stay_when_one_is_enough(place: Place) -> None:
    steps = [checkpoint(place.root / "run", step) for step in (1, 2, 3)]
    hold = place.hold()
    with running(place, gpus="0,1") as (store, _):
        jobs = [submit(store, one) for one in steps[:2]]
        notes = noted(place, 2)
        hold.unlink()
        for job in jobs:
            wait_for(store, job.id, Status.COMPLETED)
        wait_for(store, submit(store, steps[0], "script").id, Status.COMPLETED)
        wait_until(lambda: sum(are_gone(note) for note in notes) == 1, "one engine's end")
        wait_for(store, submit(store, steps[2]).id, Status.COMPLETED)
        assert noted(place, 3)[2]["jobs"] == 2


def test_an_engine_ends_when_it_has_been_idle_for_long(place: Place) -> None:
    one = checkpoint(place.root / "run", 1)
    with running(place, idle_timeout=0.2) as (store, _):
        wait_for(store, submit(store, one).id, Status.COMPLETED)
        wait_until(lambda: are_gone(noted(place, 1)[0]), "its end")
        wait_until(lambda: not list((place.work / "engines").iterdir()), "its directory's end")


def test_an_idle_engine_that_dies_gives_its_gpus_back(place: Place) -> None:
    first, second = (checkpoint(place.root / "run", step) for step in (1, 2))
    with running(place) as (store, _):
        wait_for(store, submit(store, first).id, Status.COMPLETED)
        os.kill(int(str(noted(place, 1)[0]["pid"])), signal.SIGKILL)
        wait_until(lambda: not list((place.work / "engines").iterdir()), "its directory's end")
        done = wait_for(store, submit(store, second).id, Status.COMPLETED)
    assert (done.attempts, done.failures) == (1, 0)


def test_a_worker_that_fails_between_jobs_ends_at_once_with_its_engine(place: Place) -> None:
    first, second = (checkpoint(place.root / "run", step) for step in (1, 2))
    with running(place) as (store, _):
        wait_for(store, submit(store, first).id, Status.COMPLETED)
        (directory,) = (place.work / "engines").iterdir()
        with socket.socket(socket.AF_UNIX) as connected, chdir(directory):
            connected.connect(SOCKET_NAME)
            connected.sendall(b"not a job\n")
        wait_until(lambda: are_gone(noted(place, 1)[0]), "its end")
        done = wait_for(store, submit(store, second).id, Status.COMPLETED)
    assert (done.attempts, done.failures) == (1, 0)


@pytest.mark.parametrize("victim", ["pid", "parent"])
def test_a_worker_that_is_killed_in_the_middle_loses_nothing(place: Place, victim: str) -> None:
    first, second = (checkpoint(place.root / "run", step) for step in (1, 2))
    with running(place) as (store, _):
        wait_for(store, submit(store, first).id, Status.COMPLETED)
        hold = place.hold()
        job = submit(store, second)
        note = noted(place, 2)[1]
        os.kill(int(str(note[victim])), signal.SIGKILL)
        wait_until(lambda: job_of(store, job.id).attempts == 2, "another attempt")
        assert are_gone(note)
        hold.unlink()
        done = wait_for(store, job.id, Status.COMPLETED)
    assert (done.attempts, done.failures, done.metrics) == (2, 0, {"task/acc": 2.0})
    assert noted(place, 3)[2]["pid"] != note["pid"]


def test_an_engine_that_does_not_take_a_checkpoint_is_replaced(place: Place) -> None:
    steps = [checkpoint(place.root / "run", step) for step in (1, 2, 3)]
    (place.control / "refuse").touch()
    with running(place) as (store, _):
        jobs = [submit(store, one) for one in steps]
        done = [wait_for(store, job.id, Status.COMPLETED) for job in jobs]
    assert [(job.attempts, job.failures) for job in done] == [(1, 0), (2, 0), (2, 0)]
    assert [note["jobs"] for note in noted(place, 5)] == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("code", [1, 75])
def test_a_job_that_fails_ends_its_engine_whatever_its_code(place: Place, code: int) -> None:
    first, second = (checkpoint(place.root / "run", step) for step in (1, 2))
    (place.control / "exit").write_text(str(code))
    with running(place) as (store, _):
        failed = wait_for(store, submit(store, first).id, Status.FAILED)
        (place.control / "exit").unlink()
        wait_for(store, submit(store, second).id, Status.COMPLETED)
    assert "exit code 1" in str(failed.error)
    assert f"evaluating {first}" in str(failed.error)
    assert [note["jobs"] for note in noted(place, 2)] == [1, 1]


def test_a_cancelled_job_or_one_that_takes_too_long_ends_its_engine(place: Place) -> None:
    first, second = (checkpoint(place.root / "run", step) for step in (1, 2))
    hold = place.hold()
    with running(place) as (store, server):
        job = submit(store, first)
        note = noted(place, 1)[0]
        assert server.cancel(job.id)
        wait_until(lambda: are_gone(note), "its end")
        wait_until(lambda: store.running() == [], "the end of the attempt")
        hold.unlink()
        wait_for(store, submit(store, second).id, Status.COMPLETED)
    (place.control / "jobs").unlink()
    hold.touch()
    with running(place, timeout=8.0) as (store, _):
        failed = wait_for(store, submit(store, first).id, Status.FAILED)
        wait_until(lambda: are_gone(noted(place, 1)[0]), "its end")
    assert "timed out after 8 s" in str(failed.error)


def test_a_worker_that_cannot_begin_is_waited_for_with_its_reason(place: Place) -> None:
    (place.root / "python").write_text("#!/bin/sh\necho no such library\nexit 3\n")
    with running(place) as (store, server):
        job = submit(store, checkpoint(place.root / "run", 1))
        wait_until(lambda: server.waits_for(job_of(store, job.id)) is not None, "the reason")
        reason = str(server.waits_for(job_of(store, job.id)))
        assert job_of(store, job.id).status is Status.QUEUED
    assert "exit code 3" in reason
    assert "no such library" in reason


@contextmanager
def killed_server(place: Place) -> Iterator[None]:
    """Run a server in a process of its own, which is killed at the end."""
    command = [sys.executable, "-m", "evaluation.warm", str(place.root)]
    with subprocess.Popen(command, env=child_environment()) as server:
        try:
            yield
        finally:
            server.kill()


def test_a_killed_servers_engine_is_adopted_with_its_job(place: Place) -> None:
    steps = [checkpoint(place.root / "run", step) for step in (1, 2)]
    store, following = place.scheduler()
    hold = place.hold()
    job = submit(store, steps[0])
    with killed_server(place):
        noted(place, 1)
        wait_until(lambda: job_of(store, job.id).phase is Phase.EVALUATING, "its process")
    following.start()
    hold.unlink()
    done = wait_for(store, job.id, Status.COMPLETED)
    wait_for(store, submit(store, steps[1]).id, Status.COMPLETED)
    following.stop(end=True)
    assert done.attempts == 1
    assert [note["jobs"] for note in noted(place, 2)] == [1, 2]
    assert are_gone(noted(place, 2)[1])


def test_a_killed_servers_idle_engine_is_adopted_or_ended(place: Place) -> None:
    steps = [checkpoint(place.root / "run", step) for step in (1, 2)]
    store, following = place.scheduler()
    job = submit(store, steps[0])
    with killed_server(place):
        wait_for(store, job.id, Status.COMPLETED)
    following.start()
    wait_for(store, submit(store, steps[1]).id, Status.COMPLETED)
    assert [note["jobs"] for note in noted(place, 2)] == [1, 2]
    following.stop(end=False)  # an idle engine does not outlive its server
    assert are_gone(noted(place, 2)[1])
    with killed_server(place):
        wait_for(store, submit(store, steps[1], dtype="auto").id, Status.COMPLETED)
    with running(place, gpus="5"):  # another GPU: the engine has none of this server's
        wait_until(lambda: are_gone(noted(place, 3)[2]), "its end")


def test_a_stopped_server_leaves_a_job_and_its_engine_to_the_next(place: Place) -> None:
    store, server = place.scheduler()
    hold = place.hold()
    job = submit(store, checkpoint(place.root / "run", 1))
    server.start()
    note = noted(place, 1)[0]
    wait_until(lambda: job_of(store, job.id).phase is Phase.EVALUATING, "its process")
    server.stop(end=False)
    assert not are_gone(note)
    with running(place):
        hold.unlink()
        assert wait_for(store, job.id, Status.COMPLETED).attempts == 1
    assert are_gone(note)
