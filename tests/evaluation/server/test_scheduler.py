import errno
import json
import logging
import os
import shutil
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluation.running import (
    DEADLINE_S,
    ScriptProfile,
    all_final,
    hanging_worker,
    is_running,
    job_of,
    largest_file,
    leave_staging,
    request,
    scheduler,
    script_profile,
    wait_for,
    wait_until,
    whole_model,
)
from ranks import save_ranks, some_tensors
from unshard.errors import UsageError
from unshard.evaluate.jobs import Filters, Job, Phase, Status
from unshard.evaluate.pins.files import read_stamps
from unshard.evaluate.pins.pin import Quota
from unshard.evaluate.process import Process
from unshard.evaluate.server.attempts import attempt as attempts
from unshard.evaluate.server.attempts.attempt import Attempt, AttemptRunner, Halt, Limits
from unshard.evaluate.server.attempts.merging import Merger, PassingError
from unshard.evaluate.server.endings import Absent, Cause, Failed, Left, Outcome, Postponed
from unshard.evaluate.server.evaluators.work import EvalInput, Scores
from unshard.evaluate.server.pinning import Pins
from unshard.evaluate.server.processes.supervise import LOG_NAME, Exit, write_exit
from unshard.evaluate.server.processes.table import boot_id, is_alive
from unshard.evaluate.server.queue import outcomes
from unshard.evaluate.server.queue import scheduler as scheduling
from unshard.evaluate.server.queue.scheduler import Scheduler
from unshard.evaluate.server.store.store import Store
from unshard.evaluate.server.warm.engines import Engines

pytestmark = pytest.mark.slow

SCORED = "done(acc=0.5)"
SLEEPS = "(output / 'pid').write_text(str(os.getpid())); time.sleep(600)"
SEEN = """
begin = time.monotonic()
time.sleep(0.3)
gpus = os.environ["CUDA_VISIBLE_DEVICES"]
(output / "seen.json").write_text(json.dumps([gpus, begin, time.monotonic()]))
done(acc=0.5)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return whole_model(tmp_path / "model")


def no_pins(store: Store) -> Pins:
    return Pins(store, (), Quota())


def no_engines(directory: Path) -> Engines:
    return Engines(directory / "engines", 0, lambda: False)


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the jobs whose pins are let go of."""
    found: list[str] = []
    monkeypatch.setattr(Pins, "release", lambda _pins, job: found.append(job.id))
    return found


def submit(store: Store, server: Scheduler, model: Path, step: int = 1, **more: object) -> Job:
    job, _ = store.submit(request(model, step, **more), pin=None)
    server.wake()
    return job


def output_of(server: Scheduler, store: Store, job_id: str) -> Path:
    return server.directory_of(job_of(store, job_id)) / "output"


def pid_of(server: Scheduler, store: Store, job_id: str, name: str = "pid") -> int:
    def there() -> bool:
        path = output_of(server, store, job_id) / name
        return path.exists() and path.read_text() != ""

    wait_until(there, name)
    return int((output_of(server, store, job_id) / name).read_text())


def overlap(one: tuple[str, float, float], other: tuple[str, float, float]) -> bool:
    return one[1] < other[2] and other[1] < one[2]


def seen_by(server: Scheduler, store: Store) -> list[tuple[str, float, float]]:
    files = [output_of(server, store, job.id) / "seen.json" for job in store.jobs(Filters())]
    return [tuple(json.loads(file.read_text())) for file in files]


def test_eight_jobs_share_four_gpus_and_no_gpu_is_shared(tmp_path: Path, model: Path) -> None:
    # Each of the first four waits for the others, so four do run at once.
    meet = f"""
import pathlib
place = pathlib.Path({str(tmp_path)!r}) / "met"
place.mkdir(exist_ok=True)
(place / step).touch()
while len(list(place.iterdir())) < 4: time.sleep(0.01)
"""
    store, server = scheduler(tmp_path / "work", meet + SEEN, gpus="4,5,6,7")
    for step in range(8):
        submit(store, server, model, step)
    server.start()
    wait_until(lambda: all_final(store), "eight jobs")
    server.stop(end=True)
    assert store.counts()[Status.COMPLETED] == 8
    seen = seen_by(server, store)
    assert {gpus for gpus, _, _ in seen} == {"4", "5", "6", "7"}
    assert not any(
        one[0] == other[0] and overlap(one, other) for one, other in combinations(seen, 2)
    )


def test_a_job_sees_the_gpu_that_it_has_by_its_id(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    store, server = scheduler(tmp_path / "work", SEEN, gpus="MIG-8f3a")
    server.start()
    job = submit(store, server, model)
    wait_until(lambda: all_final(store), "the job is completed")
    server.stop(end=True)
    seen = json.loads((server.directory_of(job_of(store, job.id)) / "output/seen.json").read_text())
    assert seen[0] == "MIG-8f3a"
    assert "on GPU MIG-8f3a" in caplog.text


def test_a_job_gets_as_many_gpus_as_it_asks_for(tmp_path: Path, model: Path) -> None:
    store, server = scheduler(tmp_path / "work", SEEN, gpus="0,1,2")
    for step, count in enumerate((2, 2, 1)):
        submit(store, server, model, step, num_gpus=count)
    too_many = submit(store, server, model, 3, num_gpus=4)
    server.start()
    wait_until(lambda: store.counts()[Status.COMPLETED] == 3, "the jobs")
    assert "needs 4 GPUs" in str(server.waits_for(job_of(store, too_many.id)))
    server.stop(end=True)
    files = (tmp_path / "work" / "jobs").glob("*/*/output/seen.json")
    seen = [tuple(json.loads(file.read_text())) for file in files]
    assert sorted(len(gpus.split(",")) for gpus, _, _ in seen) == [1, 2, 2]
    for one, other in combinations(seen, 2):
        assert not (set(one[0].split(",")) & set(other[0].split(",")) and overlap(one, other))


def test_a_sharded_checkpoint_is_merged_evaluated_and_removed(
    tmp_path: Path, released: list[str]
) -> None:
    checkpoint = save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    script = "done(size=sum(f.stat().st_size for f in model.glob('*.safetensors')))"
    store, server = scheduler(tmp_path / "work", script)
    job = submit(store, server, checkpoint)
    server.start()
    done = wait_for(store, job.id, Status.COMPLETED)
    server.stop(end=True)
    assert done.metrics["task/size"] > 0
    assert done.results is not None
    assert json.loads(Path(done.results).read_text()) == done.metrics
    assert list((tmp_path / "work" / "merged").iterdir()) == []
    phases = [event.phase for event in store.events(0)]
    assert phases == [None, Phase.MERGING, Phase.EVALUATING, None]
    assert released == [job.id]


def test_only_the_best_merged_model_stays(tmp_path: Path) -> None:
    checkpoint = save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    profile = script_profile(keep="best", best_metric="task/acc")
    script = "done(acc={'0': 1.0, '1': 0.9, '2': 0.5}[step])"
    store, server = scheduler(tmp_path / "work", script, profile=profile)
    jobs = [submit(store, server, checkpoint, step) for step in (1, 2)]
    submit(store, server, whole_model(tmp_path / "base"), 0)  # it is not merged
    server.start()
    wait_until(lambda: all_final(store), "three jobs")
    server.stop(end=True)
    kept = [path.name for path in (tmp_path / "work" / "merged").iterdir()]
    assert kept == [jobs[0].id]
    link = tmp_path / "work" / "best" / "run" / "script"
    assert link.resolve() == tmp_path / "work" / "merged" / jobs[0].id


TREE = """
import signal, subprocess
def child(name, setup):
    code = f"import os, signal, time; {setup}; open({str(output / name)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    subprocess.Popen([sys.executable, "-I", "-S", "-c", code])
child("stubborn", "signal.signal(15, signal.SIG_IGN)")
child("apart", "os.setsid()")
child("orphan", "os.fork() and os._exit(0); os.setsid(); signal.signal(15, signal.SIG_IGN)")
(output / "pid").write_text(str(os.getpid()))
time.sleep(600)
"""  # noqa: E501


def test_cancelling_a_running_job_ends_its_whole_tree(tmp_path: Path, model: Path) -> None:
    store, server = scheduler(tmp_path / "work", TREE)
    job = submit(store, server, model)
    server.start()
    names = ("pid", "stubborn", "apart", "orphan")
    pids = [pid_of(server, store, job.id, name) for name in names]
    assert all(is_running(pid) for pid in pids)
    assert server.cancel(job.id)
    wait_until(lambda: store.running() == [], "the end of the tree")
    assert not any(is_running(pid) for pid in pids)
    assert job_of(store, job.id).status is Status.CANCELLED
    assert not server.cancel(job.id)
    server.stop(end=True)


def test_a_queued_job_is_cancelled_and_one_submitted_again_waits_for_its_end(
    tmp_path: Path, model: Path, released: list[str]
) -> None:
    store, server = scheduler(tmp_path / "work", SLEEPS)
    first, second = submit(store, server, model, 1), submit(store, server, model, 2)
    server.start()
    pid = pid_of(server, store, first.id)
    assert server.cancel(second.id)
    assert released == [second.id]
    assert server.cancel(first.id)
    submit(store, server, model, 1)
    wait_until(lambda: job_of(store, first.id).attempts == 2, "the second attempt")
    assert not is_running(pid)
    assert is_running(pid_of(server, store, first.id))
    server.stop(end=True)
    assert job_of(store, first.id).status is Status.QUEUED


def test_an_evaluator_that_is_stopped_from_outside_is_run_again(
    tmp_path: Path, model: Path
) -> None:
    """systemd and scancel send SIGTERM to the server and the supervisors at once."""
    script = f"if output.parent.name == '2': sys.exit(done(acc=1))\n{SLEEPS}"
    store, server = scheduler(tmp_path / "work", script)
    job = submit(store, server, model)
    server.start()
    pid_of(server, store, job.id)
    process = job_of(store, job.id).process
    assert process is not None
    os.kill(process.pid, signal.SIGTERM)
    done = wait_for(store, job.id, Status.COMPLETED)
    server.stop(end=True)
    assert (done.attempts, done.failures) == (2, 0)


@pytest.mark.parametrize(
    "end",
    [
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "sys.exit(128 + signal.SIGKILL)",  # a shell that it was started by
        "os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)",  # the supervisor
    ],
)
def test_an_evaluator_that_is_killed_from_outside_has_not_failed(
    tmp_path: Path, model: Path, end: str
) -> None:
    script = f"import signal\nif output.parent.name == '2': sys.exit(done(acc=1))\n{end}"
    store, server = scheduler(tmp_path / "work", script, profile=script_profile(retries=0))
    job = submit(store, server, model)
    server.start()
    done = wait_for(store, job.id, Status.COMPLETED)
    server.stop(end=True)
    assert (done.attempts, done.failures) == (2, 0)


def test_an_evaluator_that_is_killed_every_time_fails_in_the_end(
    tmp_path: Path, model: Path
) -> None:
    """As one does that takes all memory, whatever `retries` says."""
    script = "print('a lot of memory', flush=True); os.kill(os.getpid(), 9)"
    store, server = scheduler(tmp_path / "work", script, profile=script_profile(retries=9))
    job = submit(store, server, model)
    server.start()
    failed = wait_for(store, job.id, Status.FAILED)
    server.stop(end=True)
    assert failed.attempts == 3
    assert "exit code -9" in str(failed.error)
    assert "a lot of memory" in str(failed.error)
    assert "3 times in a row" in str(failed.error)


def test_an_evaluator_that_ends_its_own_supervisor_fails_in_the_end(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a shell script with `trap 'kill 0' EXIT` does, which signals its whole group."""
    monkeypatch.setitem(outcomes._MOST_IN_A_ROW, Cause.HINDERED, 2)
    script = "import signal; done(acc=1); os.killpg(0, signal.SIGTERM); time.sleep(600)"
    store, server = scheduler(tmp_path / "work", script, backoff_s=0.0)
    job = submit(store, server, model)
    server.start()
    failed = wait_for(store, job.id, Status.FAILED)
    server.stop(end=True)
    assert failed.attempts == 3
    assert "stopped by a signal to its supervisor" in str(failed.error)
    assert "3 times in a row" in str(failed.error)


def test_a_timeout_is_a_failure(tmp_path: Path, model: Path) -> None:
    for timeout_s in (2, 20, 200):  # the worker that looks for shards has the same timeout
        profile = script_profile(timeout=timeout_s)
        store, server = scheduler(tmp_path / f"work-{timeout_s}", SLEEPS, profile=profile)
        job = submit(store, server, model)
        server.start()
        failed = wait_for(store, job.id, Status.FAILED)
        server.stop(end=True)
        if "the merge took more" not in str(failed.error):
            break
    assert f"timed out after {timeout_s} s" in str(failed.error)
    began = [path.read_text() for path in output_of(server, store, job.id).glob("pid")]
    assert not any(is_running(int(pid)) for pid in began if pid)  # it may not even have begun


def test_a_merge_that_hangs_fails_after_its_retries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    monkeypatch.setattr(sys, "executable", str(hanging_worker(tmp_path)))
    profile = script_profile(timeout=0.1, retries=1)
    store, server = scheduler(tmp_path / "work", SCORED, profile=profile)
    job = submit(store, server, checkpoint)
    server.start()
    failed = wait_for(store, job.id, Status.FAILED)
    server.stop(end=True)
    assert (failed.attempts, failed.failures) == (2, 2)
    assert "the merge took more than 0.1 s" in str(failed.error)


def test_a_crash_is_retried_and_shows_the_end_of_the_log(tmp_path: Path, model: Path) -> None:
    script = "print('about to crash', flush=True); os.abort()"
    store, server = scheduler(tmp_path / "work", script, profile=script_profile(retries=2))
    job = submit(store, server, model)
    server.start()
    failed = wait_for(store, job.id, Status.FAILED)
    server.stop(end=True)
    assert (failed.attempts, failed.failures) == (3, 3)
    assert "exit code -6" in str(failed.error)
    assert "about to crash" in str(failed.error)
    began = began_at(tmp_path / "work" / "jobs.sqlite")
    assert began[1] - began[0] >= 0.05
    assert began[2] - began[1] >= 0.1


def began_at(path: Path) -> list[float]:
    connection = sqlite3.connect(path)
    rows = connection.execute("SELECT began_at FROM attempts ORDER BY number").fetchall()
    connection.close()
    return [row[0] for row in rows]


def test_a_second_attempt_may_succeed_and_starts_with_an_empty_output(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "assert not list(output.iterdir())\n"
        "done(acc=1)\n"
        "if output.parent.name == '1': sys.exit(1)\n"
    )
    store, server = scheduler(tmp_path / "work", script, profile=script_profile(retries=1))
    job, complete = submit(store, server, model), store.complete
    left: list[str] = []

    def completed(
        job_id: str,
        metrics: Mapping[str, float],
        results: Path | None,
        errors: Mapping[str, float],
        directions: Mapping[str, bool],
    ) -> bool:
        attempts = server.directory_of(job_of(store, job_id)).parent
        left.extend(path.name for path in attempts.iterdir())  # to a server that follows
        return complete(job_id, metrics, results, errors, directions)

    monkeypatch.setattr(store, "complete", completed)
    server.start()
    done = wait_for(store, job.id, Status.COMPLETED)
    server.stop(end=True)
    assert (done.attempts, done.failures, done.error) == (2, 1, None)
    assert done.metrics == {"task/acc": 1}
    assert left == ["2"]


def test_a_checkpoint_that_is_gone_is_expired(tmp_path: Path) -> None:
    profile = script_profile(retries=5)
    store, server = scheduler(tmp_path / "work", SCORED, profile=profile)
    job = submit(store, server, tmp_path / "nothing")
    server.start()
    gone = wait_for(store, job.id, Status.EXPIRED)
    server.stop(end=True)
    assert "does not exist" in str(gone.error)
    assert gone.attempts == 1


def test_a_job_whose_error_is_not_text_gives_its_gpu_back(tmp_path: Path, model: Path) -> None:
    """The name of a file may have bytes that are not UTF-8, which SQLite does not take."""
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "model-\udcff.safetensors").write_bytes(b"no safetensors")
    store, server = scheduler(tmp_path / "work", SCORED)
    bad, good = (submit(store, server, place, step) for step, place in enumerate((odd, model)))
    server.start()
    wait_until(lambda: all_final(store), "both ends")
    server.stop(end=True)
    failed = job_of(store, bad.id)
    assert (failed.status, "\\udcff" in str(failed.error)) == (Status.FAILED, True)
    assert job_of(store, good.id).status is Status.COMPLETED


def failing_once(done: Callable[..., object], error: Exception) -> Callable[..., object]:
    """Return what raises an error when it is called first, and then is what it was."""
    errors = [error]

    def called(*arguments: object) -> object:
        if errors:
            raise errors.pop()
        return done(*arguments)

    return called


def test_what_cannot_be_recorded_is_a_failure(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, server = scheduler(tmp_path / "work", SCORED)
    monkeypatch.setattr(store, "complete", failing_once(store.complete, TypeError("no number")))
    bad, good = submit(store, server, model, 1), submit(store, server, model, 2)
    server.start()
    wait_until(lambda: all_final(store), "both ends")
    server.stop(end=True)
    failed = job_of(store, bad.id)
    assert (failed.status, failed.error) == (Status.FAILED, "TypeError('no number')")
    assert job_of(store, good.id).status is Status.COMPLETED


def test_a_database_that_does_not_answer_is_waited_for(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "_AGAIN_S", 0)
    full = sqlite3.OperationalError("database or disk is full")
    script = "sys.exit('bad') if step == '1' else done(acc=0.5)"
    store, server = scheduler(tmp_path / "work", script, profile=script_profile(retries=0))
    for name in ("fail", "complete", "due"):
        monkeypatch.setattr(store, name, failing_once(getattr(store, name), full))
    bad, good = submit(store, server, model, 1), submit(store, server, model, 2)
    server.start()
    wait_until(lambda: all_final(store), "both ends")
    server.stop(end=True)
    assert "bad" in str(job_of(store, bad.id).error)
    assert job_of(store, good.id).status is Status.COMPLETED


@pytest.mark.parametrize("step", ["record_process", "record_phase"])
def test_a_database_that_does_not_take_an_attempt_is_not_a_failure_of_the_job(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    store, server = scheduler(tmp_path / "work", SCORED, profile=script_profile(retries=0))
    full = sqlite3.OperationalError("database or disk is full")
    monkeypatch.setattr(store, step, failing_once(getattr(store, step), full))
    job = submit(store, server, model)
    server.start()
    done = wait_for(store, job.id, Status.COMPLETED)
    server.stop(end=True)
    assert (done.attempts, done.failures) == (2, 0)


def test_a_job_that_is_cancelled_when_its_evaluator_has_ended_leaves_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    store, server = scheduler(tmp_path / "work", SCORED)
    real = store.complete

    def late(
        job_id: str,
        metrics: Mapping[str, float],
        results: Path | None,
        errors: Mapping[str, float],
        directions: Mapping[str, bool],
    ) -> bool:
        server.cancel(job_id)
        return real(job_id, metrics, results, errors, directions)

    monkeypatch.setattr(store, "complete", late)
    job = submit(store, server, checkpoint)
    server.start()
    wait_for(store, job.id, Status.CANCELLED)
    server.stop(end=True)
    assert list((tmp_path / "work" / "merged").iterdir()) == []


def test_a_bad_checkpoint_is_not_retried(tmp_path: Path) -> None:
    checkpoint = save_ranks(tmp_path / "ckpt", some_tensors(), 2)
    (checkpoint / "model_world_size_2_rank_1.pt").unlink()
    profile = script_profile(retries=5)
    store, server = scheduler(tmp_path / "work", SCORED, profile=profile)
    job = submit(store, server, checkpoint)
    server.start()
    failed = wait_for(store, job.id, Status.FAILED)
    server.stop(end=True)
    assert failed.attempts == 1


def test_a_merge_without_space_is_tried_again_and_has_not_failed(tmp_path: Path) -> None:
    checkpoint = save_ranks(tmp_path / "ckpt", {"big": torch.zeros(1_000_000)}, 2)
    store, server = scheduler(tmp_path / "work", SCORED)
    job = submit(store, server, checkpoint)
    with largest_file(3_000_000):
        server.start()
        wait_until(lambda: job_of(store, job.id).error is not None, "a merge that fails")
    assert "cannot be written" in str(job_of(store, job.id).error)
    done = wait_for(store, job.id, Status.COMPLETED)
    server.stop(end=True)
    assert (done.attempts > 1, done.failures) == (True, 0)


def test_an_evaluator_that_finds_no_space_is_run_again_and_has_not_failed(
    tmp_path: Path, model: Path
) -> None:
    script = "(output / 'samples').write_bytes(bytes(4_000_000)); done(acc=1)"
    profile = script_profile(retries=0)
    store, server = scheduler(tmp_path / "work", script, profile=profile)
    job = submit(store, server, model)
    with largest_file(3_000_000):
        server.start()
        wait_until(lambda: job_of(store, job.id).error is not None, "an evaluation that fails")
    error = str(job_of(store, job.id).error)
    assert "cannot be written" in error
    assert "File too large" in error
    done = wait_for(store, job.id, Status.COMPLETED)
    server.stop(end=True)
    assert (done.attempts > 1, done.failures) == (True, 0)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        *((one, Postponed) for one in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)),
        (errno.ENOSPC, Postponed),
        (errno.E2BIG, Failed),  # of this job's arguments
        *((one, Absent) for one in (errno.ENOENT, errno.EACCES, errno.ENOEXEC)),
    ],
)
def test_an_evaluator_that_cannot_be_started_now_has_not_failed(
    tmp_path: Path, model: Path, number: int, kind: type[Outcome]
) -> None:
    store = Store(tmp_path / "jobs.sqlite")
    merger = Merger(tmp_path / "merged", at_once=1)
    job, _ = store.submit(request(model), pin=None)
    attempt = Attempt(job, script_profile(SCORED), (), tmp_path)
    (tmp_path / LOG_NAME).touch()
    done = Exit("not started", 127, os.strerror(number), 0.0, number)
    write_exit(tmp_path, done, lambda: False)
    runner = AttemptRunner(
        store, merger, no_pins(store), no_engines(tmp_path), Limits(), lambda _: None
    )
    process = Process(2**22 - 5, 1, boot_id(), (), str(tmp_path))
    outcome = runner.resume(attempt, process)
    assert isinstance(outcome, kind)
    assert os.strerror(number) in str(outcome)


def test_a_job_is_left_to_the_next_server_where_all_were_told_to_end(
    tmp_path: Path, model: Path
) -> None:
    """`systemctl kill` reaches the supervisor first: a failure would be seen before the halt."""
    store = Store(tmp_path / "jobs.sqlite")
    job_id = store.submit(request(model), pin=None)[0].id
    job = store.claim(time.time())
    assert job is not None

    def halt(_job_id: str) -> Halt | None:
        process = job_of(store, job_id).process
        if process is None:  # it is still looking at the checkpoint
            return None
        if not is_alive(process):
            return Halt.LEAVE
        os.killpg(process.pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(process), "its end")
        return None

    merger = Merger(tmp_path / "merged", at_once=1)
    runner = AttemptRunner(store, merger, no_pins(store), no_engines(tmp_path), Limits(), halt)
    attempt = Attempt(job, script_profile("time.sleep(600)"), (), tmp_path / "attempt")
    assert isinstance(runner.run(attempt), Left)


def test_a_merge_that_can_never_be_written_fails_in_the_end(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> Path:
        raise PassingError("no space")

    monkeypatch.setattr(Merger, "prepare", full)
    store, server = scheduler(tmp_path / "work", SCORED, backoff_s=0.0)
    job = submit(store, server, model)
    server.start()
    failed = wait_for(store, job.id, Status.FAILED)
    assert (failed.attempts, failed.failures) == (21, 1)
    assert "no space" in str(failed.error)
    submit(store, server, model)
    failed = wait_for(store, job.id, Status.FAILED)
    server.stop(end=True)
    assert (failed.attempts, failed.failures) == (42, 1)


def test_a_job_for_which_there_is_no_thread_is_queued_again(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, server = scheduler(tmp_path / "work", SCORED)
    spawn = failing_once(server._spawn, RuntimeError("can't start new thread"))
    server.start()
    monkeypatch.setattr(server, "_spawn", spawn)
    job = submit(store, server, model)
    done = wait_for(store, job.id, Status.COMPLETED)
    server.stop(end=True)
    assert (done.attempts, done.failures) == (2, 0)


def test_a_job_that_begins_while_the_server_stops_is_waited_for(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, server = scheduler(tmp_path / "work", SLEEPS)
    claim, claimed = store.claim, threading.Event()

    def slowly(now: float, job_id: str | None, gpus: tuple[str, ...]) -> Job | None:
        job = claim(now, job_id, gpus)
        claimed.set()
        wait_until(lambda: server._halt is not None, "the stop")
        return job

    monkeypatch.setattr(store, "claim", slowly)
    job = submit(store, server, model)
    server.start()
    assert claimed.wait(DEADLINE_S)
    server.stop(end=True)
    assert not server._threads
    assert (job_of(store, job.id).status, store.running()) == (Status.QUEUED, [])


def test_processes_that_cannot_be_ended_hold_up_neither_a_stop_nor_a_start(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, released: list[str]
) -> None:
    store, server = scheduler(tmp_path / "work", SLEEPS)
    job = submit(store, server, model)
    server.start()
    pid = pid_of(server, store, job.id)
    with monkeypatch.context() as patch:
        patch.setattr(attempts, "kill_group", lambda _process, grace_s: grace_s < 0)
        assert server.cancel(job.id)
        server.stop(end=False)
        released.clear()
        store, server = scheduler(tmp_path / "work", SLEEPS, gpus="1")
        server.start()
        assert [one.id for one in store.running()] == [job.id]
        assert is_running(pid)
    wait_until(lambda: released == [job.id], "the end")
    assert not is_running(pid)
    assert store.running() == []
    server.stop(end=True)


@pytest.fixture
def hung() -> Iterator[threading.Event]:
    """What a disk that does not answer waits for; it answers when the test has ended."""
    event = threading.Event()
    yield event
    event.set()


def test_a_job_whose_checkpoint_cannot_be_looked_at_is_cancelled_and_gives_its_gpu_back(
    tmp_path: Path, model: Path, hung: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = threading.Event()

    def changed(_pins: Pins, job: Job) -> list[str]:
        if job.request.step == 1:
            looks.set()
            hung.wait(DEADLINE_S)
        return []

    monkeypatch.setattr(Pins, "list_changed", changed)
    store, server = scheduler(tmp_path / "work", SCORED)
    first = submit(store, server, model, 1)
    server.start()
    assert looks.wait(DEADLINE_S)
    second = submit(store, server, model, 2)
    assert server.cancel(first.id)
    wait_for(store, second.id, Status.COMPLETED)
    server.stop(end=True)
    assert job_of(store, first.id).status is Status.CANCELLED


def test_a_look_at_a_checkpoint_that_hangs_is_bounded_by_the_timeout(
    tmp_path: Path, model: Path, hung: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the same after the evaluation, and for a server that adopts the evaluator."""
    store = Store(tmp_path / "jobs.sqlite")
    merger = Merger(tmp_path / "merged", at_once=1)
    job, _ = store.submit(request(model), pin=None)
    attempt = Attempt(job, script_profile(SCORED, timeout=0.1), (), tmp_path)
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "metrics.json").write_text('{"task/acc": 1}')
    (tmp_path / LOG_NAME).touch()
    write_exit(tmp_path, Exit("exited", 0, "", 0.0), lambda: False)

    def changed(_pins: Pins, _job: Job) -> list[str]:
        hung.wait(DEADLINE_S)
        return []

    monkeypatch.setattr(Pins, "list_changed", changed)
    runner = AttemptRunner(
        store, merger, no_pins(store), no_engines(tmp_path), Limits(), lambda _: None
    )
    outcome = runner.resume(attempt, Process(2**22 - 5, 1, boot_id(), (), str(tmp_path)))
    assert isinstance(outcome, Failed)
    assert outcome.may_retry
    assert "a look at the checkpoint took more than 0.1 s" in outcome.error


class Hangs(ScriptProfile):
    """Reads results from a disk that does not answer."""

    begun: threading.Event
    hung: threading.Event

    def read_scores(self, work: EvalInput, returncode: int) -> Scores:
        self.begun.set()
        self.hung.wait(DEADLINE_S)
        return super().read_scores(work, returncode)


def test_a_thread_that_hangs_does_not_hold_up_a_stop(
    tmp_path: Path,
    model: Path,
    hung: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun = threading.Event()
    monkeypatch.setattr(scheduling, "_STOP_S", 0.0)
    profile = Hangs(begun=begun, hung=hung, gpus=1)
    store, server = scheduler(tmp_path / "work", SCORED, profile=profile)
    job = submit(store, server, model)
    server.start()
    assert begun.wait(DEADLINE_S)
    server.stop(end=False)
    assert not hung.is_set()
    assert f"job {job.id} does not end; it is left to the next server" in caplog.text
    assert [one.id for one in store.running()] == [job.id]


def test_a_checkpoint_that_was_rewritten_is_a_failure(tmp_path: Path, model: Path) -> None:
    store, server = scheduler(tmp_path / "work", SCORED)
    stamps = read_stamps(model)
    (model / "model.safetensors").write_bytes(b"another")
    job = submit(store, server, model, stamps=stamps)
    server.start()
    failed = wait_for(store, job.id, Status.FAILED)
    server.stop(end=True)
    assert "rewritten" in str(failed.error)
    assert "model.safetensors" in str(failed.error)


def test_a_job_that_gets_a_newer_pin_while_it_runs_is_run_again(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(_pins: Pins, job: Job) -> list[str]:
        if job.pin == "/old":
            store.repin(job.id, "/new")  # what the service does when the step is submitted again
        return ["model.safetensors"] if job.pin == "/old" else []

    profile = script_profile(retries=0)
    monkeypatch.setattr(Pins, "list_changed", changed)
    store, server = scheduler(tmp_path / "work", SCORED, profile=profile)
    job, _ = store.submit(request(model), pin="/old")
    server.start()
    done = wait_for(store, job.id, Status.COMPLETED)
    server.stop(end=True)
    assert (done.pin, done.attempts, done.failures) == ("/new", 2, 0)


@pytest.mark.parametrize(("before", "expected"), [(1, Status.COMPLETED), (2, Status.FAILED)])
def test_results_that_ended_two_servers_are_not_read_by_a_third(
    tmp_path: Path, model: Path, before: int, expected: Status
) -> None:
    script = f"pathlib.Path('reading').write_bytes(b'x' * {before}); done(acc=1)"
    store, server = scheduler(tmp_path / "work", script, profile=script_profile(retries=5))
    job = submit(store, server, model)
    server.start()
    done = wait_for(store, job.id, expected)
    server.stop(end=True)
    assert done.attempts == 1
    assert ("killed 2 times while it read" in str(done.error)) == (before == 2)
    assert not (server.directory_of(done) / "reading").exists()


class ReadsTogether(ScriptProfile):
    """Reads results when those of two jobs are there, and notes how many are read at once."""

    jobs: Path
    noted: Any  # a list, which pydantic would copy
    both: threading.Barrier

    def read_scores(self, work: EvalInput, returncode: int) -> Scores:
        wait_until(lambda: len(list(self.jobs.glob("*/1/exit.json"))) == 2, "two results")
        with suppress(threading.BrokenBarrierError):
            self.both.wait(0.5)
        self.noted.append(len(list(self.jobs.glob("*/1/reading"))))
        return super().read_scores(work, returncode)


def test_results_are_read_one_after_the_other(tmp_path: Path, model: Path) -> None:
    """They may take many times their size in memory; a job that waits has ended no server."""
    noted: list[int] = []
    jobs, both = tmp_path / "work" / "jobs", threading.Barrier(2)
    profile = ReadsTogether(jobs=jobs, noted=noted, both=both, gpus=1)
    store, server = scheduler(tmp_path / "work", SCORED, gpus="0,1", profile=profile)
    for step in range(2):
        submit(store, server, model, step)
    server.start()
    wait_until(lambda: all_final(store), "two jobs")
    server.stop(end=True)
    assert store.counts()[Status.COMPLETED] == 2
    assert noted == [1, 1]


def test_an_unforeseen_mistake_fails_its_job_only_and_an_unknown_profile_none(
    tmp_path: Path, model: Path
) -> None:
    script = "(output / 'metrics.json').write_text('[1' if step == '1' else '{\"task/acc\": 1}')"
    store, server = scheduler(tmp_path / "work", script)
    unknown, _ = store.submit(replace(request(model), profile="other"), pin=None)
    odd, good = submit(store, server, model, 1), submit(store, server, model, 2)
    server.start()
    assert "unexpected error" in str(wait_for(store, odd.id, Status.FAILED).error)
    wait_for(store, good.id, Status.COMPLETED)
    assert "unknown" in str(server.waits_for(job_of(store, unknown.id)))
    server.stop(end=True)


def test_a_directory_has_one_server(tmp_path: Path) -> None:
    _, server = scheduler(tmp_path / "work", SCORED)
    server.start()
    _, other = scheduler(tmp_path / "work", SCORED)
    with pytest.raises(UsageError, match="another server"):
        other.start()
    server.stop(end=False)
    other.start()
    other.stop(end=False)


def test_stopping_leaves_evaluators_to_the_next_server_or_ends_them(
    tmp_path: Path, model: Path
) -> None:
    go = tmp_path / "go"
    script = f"""
(output / "pid").write_text(str(os.getpid()))
while not os.path.exists({str(go)!r}): time.sleep(0.01)
done(acc=1)
"""
    store, server = scheduler(tmp_path / "work", script)
    job = submit(store, server, model)
    server.start()
    pid = pid_of(server, store, job.id)
    server.stop(end=False)
    assert is_running(pid)
    assert job_of(store, job.id).status is Status.RUNNING
    store, server = scheduler(tmp_path / "work", script)
    server.start()
    server.stop(end=True)
    assert not is_running(pid)
    assert job_of(store, job.id).status is Status.QUEUED
    go.touch()
    store, server = scheduler(tmp_path / "work", script)
    server.start()
    done = wait_for(store, job.id, Status.COMPLETED)
    server.stop(end=True)
    assert (done.attempts, done.failures) == (2, 0)


def test_what_is_in_the_directory_of_merged_models_without_a_reason_is_removed(
    tmp_path: Path, model: Path
) -> None:
    merged = tmp_path / "work" / "merged"
    shutil.copytree(model, merged / "left-over")
    leave_staging(merged)
    _, server = scheduler(tmp_path / "work", SCORED)
    server.start()
    server.stop(end=True)
    assert list(merged.iterdir()) == []
