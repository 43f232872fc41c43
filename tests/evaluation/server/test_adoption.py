"""A server that is killed at any moment loses nothing, and the next one goes on."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest
import torch

from evaluation.running import (
    all_final,
    child_environment,
    is_running,
    job_of,
    request,
    scheduler,
    script_profile,
    start_server,
    wait_for,
    wait_until,
    whole_model,
)
from ranks import save_ranks
from unshard.evaluate.jobs import Filters, Job, Phase, Status
from unshard.evaluate.process import Process
from unshard.evaluate.server.processes.launching import start_supervisor
from unshard.evaluate.server.processes.supervise import LOG_NAME
from unshard.evaluate.server.processes.table import boot_id, is_alive, kill_group
from unshard.evaluate.server.store.statements import LONGEST_WAIT_S
from unshard.evaluate.server.store.store import Store

pytestmark = pytest.mark.slow

# Notes when it begins and ends, and refuses to be two of one step; waits for `go` meanwhile.
WAITS = """
place = model.parent
running = place / f"running-{step}"
os.close(os.open(running, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
(place / f"began-{step}-{os.getpid()}").touch()
while not (place / "go").exists(): time.sleep(0.01)
running.unlink()
done(acc=int(step))
"""


def submit(store: Store, model: Path, step: int) -> Job:
    return store.submit(request(model, step), pin=None)[0]


@contextmanager
def killed_after(
    work_dir: Path, script: str, moment: str, place: Path, *, gpus: str = "0,1"
) -> Iterator[None]:
    """Run a server until there are files of a pattern, and kill it."""
    with start_server(work_dir, script, gpus=gpus) as server:
        try:
            wait_until(lambda: len(list(place.glob(moment))) >= 2, moment)
        finally:
            os.kill(server.pid, signal.SIGKILL)
    yield


def began(place: Path, step: int) -> int:
    return len(list(place.glob(f"began-{step}-*")))


def test_a_killed_servers_evaluators_are_adopted_and_the_rest_is_run(tmp_path: Path) -> None:
    model, work_dir = whole_model(tmp_path / "model"), tmp_path / "work"
    store = Store(work_dir / "jobs.sqlite")
    jobs = [submit(store, model, step) for step in range(5)]
    with killed_after(work_dir, WAITS, "began-*", tmp_path):
        before = store.running()
    assert len(before) == 2
    assert all(job.process is not None and is_alive(job.process) for job in before)
    _, server = scheduler(work_dir, WAITS, gpus="0,1")
    server.start()
    submit(store, model, 5)
    assert len(store.running()) == 2  # their slots stay taken: nothing else begins
    time.sleep(0.2)
    assert {job.id for job in store.running()} == {job.id for job in before}
    (tmp_path / "go").touch()
    wait_until(lambda: all_final(store), "six jobs")
    server.stop(end=True)
    assert store.counts()[Status.COMPLETED] == 6
    assert [began(tmp_path, step) for step in range(6)] == [1] * 6
    assert {job.metrics["task/acc"] for job in store.jobs(Filters())} == set(range(6))
    assert all(job_of(store, job.id).attempts == 1 for job in jobs)
    assert list(tmp_path.glob("running-*")) == []


def test_what_ends_while_no_server_is_there_is_judged_like_any_other(tmp_path: Path) -> None:
    model, work_dir = whole_model(tmp_path / "model"), tmp_path / "work"
    script = WAITS + "if step == '1': sys.exit(1)"
    store = Store(work_dir / "jobs.sqlite")
    good, bad = submit(store, model, 0), submit(store, model, 1)
    with killed_after(work_dir, script, "began-*", tmp_path):
        processes = [job.process for job in store.running()]
    (tmp_path / "go").touch()
    wait_until(lambda: not any(one and is_alive(one) for one in processes), "their end")
    _, server = scheduler(work_dir, script, gpus="0,1")
    server.start()
    assert wait_for(store, good.id, Status.COMPLETED).metrics == {"task/acc": 0}
    assert "exit code 1" in str(wait_for(store, bad.id, Status.FAILED).error)
    server.stop(end=True)
    assert began(tmp_path, 0) == began(tmp_path, 1) == 1


def test_a_job_whose_process_is_gone_is_queued_again_and_has_not_failed(tmp_path: Path) -> None:
    model, work_dir = whole_model(tmp_path / "model"), tmp_path / "work"
    store = Store(work_dir / "jobs.sqlite")
    jobs = [submit(store, model, step) for step in range(2)]
    with killed_after(work_dir, WAITS, "began-*", tmp_path):
        for job in store.running():
            assert job.process is not None
            os.kill(job.process.pid, signal.SIGKILL)  # and the evaluator with it
            assert kill_group(job.process, grace_s=0)
    for path in tmp_path.glob("running-*"):
        path.unlink()
    (tmp_path / "go").touch()
    _, server = scheduler(work_dir, WAITS, gpus="0,1")
    server.start()
    done = [wait_for(store, job.id, Status.COMPLETED) for job in jobs]
    server.stop(end=True)
    assert [(job.attempts, job.failures) for job in done] == [(2, 0), (2, 0)]


def test_a_job_that_takes_its_server_down_every_time_fails_in_the_end(tmp_path: Path) -> None:
    """As where the kernel ends the whole cgroup when memory runs out: memory.oom.group."""
    store = Store(tmp_path / "work" / "jobs.sqlite")
    job = submit(store, whole_model(tmp_path / "model"), 1)
    number = 0
    while not job_of(store, job.id).status.is_final:
        number += 1
        assert number < 100
        claimed = store.claim(time.time() + LONGEST_WAIT_S, job.id)
        assert claimed is not None
        _, server = scheduler(tmp_path / "work", WAITS, backoff_s=LONGEST_WAIT_S)
        directory = server.directory_of(claimed)
        (directory / "output").mkdir(parents=True)
        if number % 2:  # else it had the memory for the merge only
            (directory / LOG_NAME).write_text("a lot of memory\n")
            process = Process(2**22 - 5, 1, boot_id(), (), str(directory))
            store.record_process(job.id, process)
        server.start()
        wait_until(lambda: store.running() == [], "the end of the attempt")
        server.stop(end=True)
    failed = job_of(store, job.id)
    assert (failed.status, failed.attempts) == (Status.FAILED, 11)
    assert "ended together with the server" in str(failed.error)
    assert "a lot of memory" in str(failed.error)
    assert "11 times in a row" in str(failed.error)


def test_a_supervisor_that_never_got_its_order_is_not_a_failure(tmp_path: Path) -> None:
    """The server was killed after it had recorded it, and the next one finds it alive."""
    store, server = scheduler(tmp_path / "work", "done(acc=1)", profile=script_profile(retries=0))
    job = submit(store, whole_model(tmp_path / "model"), 1)
    claimed = store.claim(time.time())
    assert claimed is not None
    directory = server.directory_of(claimed)
    (directory / "output").mkdir(parents=True)
    child = start_supervisor(gpus=("0",), directory=directory)
    store.record_process(job.id, child.process)
    server.start()
    assert [one.process for one in store.running()] == [child.process]
    child.reap()  # what the kernel does with the pipe of a killed server
    done = wait_for(store, job.id, Status.COMPLETED)
    server.stop(end=True)
    assert (done.attempts, done.failures) == (2, 0)


@pytest.mark.parametrize("moment_s", [0, 0.02, 0.04, 0.08])
def test_a_stop_of_the_whole_service_while_an_evaluator_starts_fails_nothing(
    tmp_path: Path, moment_s: float
) -> None:
    """systemd sends SIGTERM to the server, supervisors and evaluators at once."""
    profile = script_profile(retries=0)
    store, server = scheduler(tmp_path / "work", "done(acc=1)", profile=profile)
    job = submit(store, whole_model(tmp_path / "model"), 1)
    server.start()
    wait_until(lambda: job_of(store, job.id).attempts > 0, "an attempt")
    wait_until(lambda: job_of(store, job.id).phase is not Phase.MERGING, "a supervisor")
    time.sleep(moment_s)
    process = job_of(store, job.id).process
    if process is not None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    server.stop(end=False)
    _, following = scheduler(tmp_path / "work", "done(acc=1)", profile=profile)
    following.start()
    done = wait_for(store, job.id, Status.COMPLETED)
    following.stop(end=True)
    assert done.failures == 0


@pytest.mark.parametrize("gpus", ["2,3", ""])
def test_an_evaluator_on_gpus_of_another_server_is_ended_and_run_again(
    tmp_path: Path, gpus: str
) -> None:
    model, work_dir = whole_model(tmp_path / "model"), tmp_path / "work"
    store = Store(work_dir / "jobs.sqlite")
    jobs = [submit(store, model, step) for step in range(2)]
    with killed_after(work_dir, WAITS, "began-*", tmp_path):
        pids = [int(path.name.split("-")[2]) for path in tmp_path.glob("began-*")]
    _, server = scheduler(work_dir, WAITS, gpus=gpus)
    for path in tmp_path.glob("running-*"):
        path.unlink()
    server.start()
    wait_until(lambda: not any(is_running(pid) for pid in pids), "their end")
    (tmp_path / "go").touch()
    for job in jobs:
        assert wait_for(store, job.id, Status.COMPLETED).failures == 0
    server.stop(end=True)


def test_a_job_cancelled_while_no_server_is_there_is_ended_by_the_next(tmp_path: Path) -> None:
    model, work_dir = whole_model(tmp_path / "model"), tmp_path / "work"
    store = Store(work_dir / "jobs.sqlite")
    jobs = [submit(store, model, step) for step in range(2)]
    with killed_after(work_dir, WAITS, "began-*", tmp_path):
        processes = [job.process for job in store.running()]
    for job in jobs:
        assert store.cancel(job.id)
    _, server = scheduler(work_dir, WAITS, gpus="0,1")
    server.start()
    wait_until(lambda: store.running() == [], "their end")
    server.stop(end=True)
    assert not any(one and is_alive(one) for one in processes)
    assert store.counts()[Status.CANCELLED] == 2


def test_a_server_killed_while_it_merges_leaves_no_merge_and_merges_again(tmp_path: Path) -> None:
    checkpoint = save_ranks(tmp_path / "ckpt", {"big": torch.zeros(10_000_000)}, 2)
    work_dir = tmp_path / "work"
    store = Store(work_dir / "jobs.sqlite")

    def merges() -> bool:
        return any((work_dir / "merged").glob("_unshard-partial-*"))

    with start_server(work_dir, "done(acc=1)", gpus="0") as child:
        for step in count():  # a merge may be over before it is seen
            job = submit(store, checkpoint, step)
            wait_until(lambda: merges() or all_final(store), "a merge")
            if merges():
                break
        os.kill(child.pid, signal.SIGKILL)
    _, server = scheduler(work_dir, "done(acc=1)")
    server.start()
    done = wait_for(store, job.id, Status.COMPLETED)
    server.stop(end=True)
    assert done.failures == 0
    assert list((work_dir / "merged").iterdir()) == []


def test_a_server_killed_again_and_again_runs_every_job_once_at_a_time(tmp_path: Path) -> None:
    model, work_dir = whole_model(tmp_path / "model"), tmp_path / "work"
    store = Store(work_dir / "jobs.sqlite")
    (tmp_path / "go").touch()
    for step in range(6):
        submit(store, model, step)
    for number in range(3):
        with start_server(work_dir, WAITS, gpus="0,1") as child:
            target = 2 * number
            wait_until(lambda: store.counts()[Status.COMPLETED] >= target, "some jobs")  # noqa: B023
            time.sleep(0.03 * number)
            os.kill(child.pid, signal.SIGKILL)
    profile = script_profile(retries=0)
    _, server = scheduler(work_dir, WAITS, gpus="0,1", profile=profile)
    server.start()
    wait_until(lambda: all_final(store), "all jobs")
    server.stop(end=True)
    assert store.counts()[Status.COMPLETED] == 6
    connection = sqlite3.connect(work_dir / "jobs.sqlite")
    open_ones = connection.execute("SELECT COUNT(*) FROM attempts WHERE ended_at IS NULL")
    assert open_ones.fetchone()[0] == 0
    connection.close()


KILLED_WHILE_IT_FORKS = """
import os, pathlib, sys, time
from evaluation.running import scheduler
work = pathlib.Path(sys.argv[1])
scheduler(work, "")[1].start()
if os.fork() == 0:  # it is to become a supervisor
    while not (work / "go").exists(): time.sleep(0.01)
    os._exit(0)
os.kill(os.getpid(), 9)
"""


def test_a_server_waits_for_what_a_killed_one_was_about_to_start(tmp_path: Path) -> None:
    """Until a child runs its own program it has the lock of its parent."""
    work_dir = tmp_path / "work"
    command = [sys.executable, "-c", KILLED_WHILE_IT_FORKS, str(work_dir)]
    assert subprocess.run(command, env=child_environment(), check=False).returncode == -9
    store, server = scheduler(work_dir, "done(acc=1)")
    job = submit(store, whole_model(tmp_path / "model"), 1)
    later = threading.Timer(0.3, (work_dir / "go").touch)
    later.start()
    server.start()
    assert (work_dir / "go").exists()
    wait_for(store, job.id, Status.COMPLETED)
    server.stop(end=True)


def test_a_server_under_a_terminal_is_not_followed_by_its_evaluators(tmp_path: Path) -> None:
    model, work_dir = whole_model(tmp_path / "model"), tmp_path / "work"
    store = Store(work_dir / "jobs.sqlite")
    for step in range(2):
        submit(store, model, step)
    with killed_after(work_dir, WAITS, "began-*", tmp_path):
        for job in store.running():
            assert job.process is not None
            assert os.getsid(job.process.pid) == job.process.pid
            assert kill_group(job.process, grace_s=5)
