"""Checkpoints are evaluated while training goes on, whatever becomes of server and trainer."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from damage import in_time
from evaluation.running import largest_file
from evaluation.runs import lmms_checkpoint, rotate_like_lmms_engine, save_again
from evaluation.servers import Fields, Stub, free_port, scores, serving
from unshard.evaluate.client.v1 import EvalClient
from unshard.evaluate.pins.pin import Quota, list_pins, pin_checkpoint
from unshard.evaluate.sinks.base import JsonlSink
from unshard.evaluate.trainer import courier as courier_module
from unshard.evaluate.trainer import recorder
from unshard.evaluate.trainer import submitter as submitter_module
from unshard.evaluate.trainer.config import EvalConfig
from unshard.evaluate.trainer.courier import Courier
from unshard.evaluate.trainer.recorder import Recording
from unshard.evaluate.trainer.spool import Spool
from unshard.evaluate.trainer.submitter import Submitter, is_first_rank
from waiting import LIMIT_S
from waiting import wait_until as until


def config_for(url: str, **more: object) -> EvalConfig:
    fields = {"server_url": url, "profile": "p", "tasks": ["t"], "poll_interval": 0.02}
    return EvalConfig.from_dict({**fields, **more})


def ignore(recording: Recording) -> None:
    del recording


@pytest.fixture
def server() -> Iterator[Stub]:
    with serving(Stub(finishes=scores)) as stub:
        yield stub


def test_a_checkpoint_is_submitted_and_its_result_comes_back(tmp_path: Path, server: Stub) -> None:
    run = tmp_path / "myrun"
    submitter = Submitter(config_for(server.url, batch_size=4, seed=0, model_args={"a": "b"}), run)
    checkpoint = lmms_checkpoint(run, 10)
    assert submitter.submit(checkpoint, 10)
    assert submitter.close(LIMIT_S)
    assert submitter.completed() == [(10, {"unshard_eval/t/acc": 0.1})]
    (body,) = server.submissions
    assert body["checkpoint"] == str(checkpoint)
    assert Path(str(body["pin"])).parts[-4:-2] == ("_unshard", "pins")
    assert (body["step"], body["run"], body["weights"]) == (10, "myrun", "model")
    assert (body["batch_size"], body["seed"], body["model_args"]) == (4, 0, {"a": "b"})
    line = (run / "_unshard" / "results.jsonl").read_text()
    assert '"step": 10' in line
    assert list_pins(run) == []
    assert not list((run / "_unshard" / "spool").rglob("*.json"))


def test_the_pinned_bytes_are_there_until_the_job_is_final(tmp_path: Path, server: Stub) -> None:
    server.finishes = lambda body: None  # noqa: ARG005
    submitter = Submitter(config_for(server.url), tmp_path)
    submitter.submit(lmms_checkpoint(tmp_path, 10), 10)
    lmms_checkpoint(tmp_path, 20)
    rotate_like_lmms_engine(tmp_path, 1)
    until(lambda: server.jobs)
    assert Path(str(server.submissions[0]["pin"]), "config.json").is_file()
    assert len(list_pins(tmp_path)) == 1
    server.finish("job1", **{"t/acc": 0.5})
    until(lambda: not list_pins(tmp_path))
    submitter.close(LIMIT_S)
    assert submitter.completed() == [(10, {"unshard_eval/t/acc": 0.5})]


def test_nothing_is_lost_while_the_server_is_away(tmp_path: Path) -> None:
    port = free_port()
    submitter = Submitter(config_for(f"http://127.0.0.1:{port}"), tmp_path)
    for step in (1, 2, 3):
        submitter.submit(lmms_checkpoint(tmp_path, step), step)
        rotate_like_lmms_engine(tmp_path, 1)
    time.sleep(0.1)
    assert [step for _, step in submitter.pending()] == [1, 2, 3]
    with serving(Stub(finishes=scores), port) as stub:
        submitter.close(LIMIT_S)
        assert [body["step"] for body in stub.submissions] == [1, 2, 3]
    assert [step for step, _ in submitter.completed()] == [1, 2, 3]


def test_the_server_may_go_away_between_submission_and_result(tmp_path: Path) -> None:
    with serving(Stub()) as first:
        submitter = Submitter(config_for(first.url), tmp_path)
        submitter.submit(lmms_checkpoint(tmp_path, 1), 1)
        until(lambda: first.jobs)
        until(lambda: Spool(tmp_path).pending())
    time.sleep(0.1)
    first.finish("job1", **{"t/acc": 1.0})
    with serving(first, first.port):
        submitter.close(LIMIT_S)
    assert submitter.completed() == [(1, {"unshard_eval/t/acc": 1.0})]


def test_a_restarted_trainer_gets_what_came_meanwhile(tmp_path: Path, server: Stub) -> None:
    server.finishes = lambda body: None  # noqa: ARG005
    first = Submitter(config_for(server.url), tmp_path)
    first.submit(lmms_checkpoint(tmp_path, 1), 1)
    until(lambda: server.jobs)
    first.close(0.0)
    assert first.completed() == []
    server.finish("job1", **{"t/acc": 0.7})
    second = Submitter(config_for(server.url), tmp_path)
    second.close(LIMIT_S)
    assert second.completed() == [(1, {"unshard_eval/t/acc": 0.7})]
    assert len(server.submissions) == 1


def test_a_killed_trainers_submissions_are_sent_by_the_next(tmp_path: Path) -> None:
    """Killed while the server was away, right after `submit` returned."""
    port = free_port()
    checkpoint = lmms_checkpoint(tmp_path, 5)
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from unshard.evaluate.trainer.config import EvalConfig\n"
        "from unshard.evaluate.trainer.submitter import Submitter\n"
        "given = {'server_url': sys.argv[1], 'profile': 'p', 'tasks': ['t']}\n"
        "submitter = Submitter(EvalConfig.from_dict(given), Path(sys.argv[2]))\n"
        "submitter.submit(sys.argv[3], 5)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    url = f"http://127.0.0.1:{port}"
    done = subprocess.run(
        [sys.executable, "-c", code, url, str(tmp_path), str(checkpoint)], check=False
    )
    assert done.returncode == -signal.SIGKILL
    shutil.rmtree(checkpoint)
    with serving(Stub(finishes=scores), port) as stub:
        submitter = Submitter(config_for(url), tmp_path)
        submitter.close(LIMIT_S)
        assert [body["step"] for body in stub.submissions] == [5]
    assert submitter.completed() == [(5, {"unshard_eval/t/acc": 0.05})]


def test_a_result_that_came_and_was_not_recorded_is_recorded_by_the_next(
    tmp_path: Path, server: Stub
) -> None:
    spool = Spool(tmp_path)
    request = {"weights": "ema"}
    job = spool.accept(spool.add({"step": 3, "request": request}), "old")
    spool.arrive(job, {"metrics": {"t/acc": 0.3}})
    spool.remove(job)
    submitter = Submitter(config_for(server.url), tmp_path)
    submitter.close(LIMIT_S)
    assert submitter.completed() == [(3, {"unshard_eval/ema/t/acc": 0.3})]
    assert spool.arrived() == []


def test_a_job_that_the_server_forgot_is_submitted_again(tmp_path: Path, server: Stub) -> None:
    server.finishes = lambda body: None  # noqa: ARG005
    submitter = Submitter(config_for(server.url), tmp_path)
    submitter.submit(lmms_checkpoint(tmp_path, 1), 1)
    until(lambda: server.jobs)
    server.finishes = scores
    server.jobs.clear()
    submitter.close(LIMIT_S)
    assert submitter.completed() == [(1, {"unshard_eval/t/acc": 0.01})]
    assert list_pins(tmp_path) == []


def test_a_refused_submission_is_set_aside_and_the_others_go_on(
    tmp_path: Path, server: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    server.refuses = (400, "no such profile")
    submitter = Submitter(config_for(server.url), tmp_path)
    submitter.submit(lmms_checkpoint(tmp_path, 1), 1)
    until(lambda: "no such profile" in caplog.text)
    server.refuses = None
    submitter.submit(lmms_checkpoint(tmp_path, 2), 2)
    submitter.close(LIMIT_S)
    assert [step for step, _ in submitter.completed()] == [2]
    (refused,) = (tmp_path / "_unshard" / "spool" / "refused").iterdir()
    assert "no such profile" in refused.read_text()
    assert [pin.step for pin in list_pins(tmp_path)] == [1]


def test_what_was_refused_is_sent_again_by_the_next_processes(tmp_path: Path, server: Stub) -> None:
    server.refuses = (400, "no such profile")
    for count in (1, 2, 3):
        one = Submitter(config_for(server.url), tmp_path)
        if count == 1:
            one.submit(lmms_checkpoint(tmp_path, 1), 1)
            shutil.rmtree(tmp_path / "checkpoint-1")
        until(lambda: server.paths.count("POST /api/v1/jobs") >= count)  # noqa: B023
        until(lambda: Spool(tmp_path).refused())
        one.close(0.0)
        assert [pin.step for pin in list_pins(tmp_path)] == [1]
    server.refuses = None
    last = Submitter(config_for(server.url), tmp_path)
    last.close(LIMIT_S)
    assert [step for step, _ in last.completed()] == [1]
    assert (Spool(tmp_path).refused(), list_pins(tmp_path)) == ([], [])


def test_the_first_process_on_a_run_sends_for_all_and_the_second_takes_over(
    tmp_path: Path, server: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    first = Submitter(config_for(server.url), tmp_path)
    first.submit(lmms_checkpoint(tmp_path, 1), 1)
    until(lambda: server.submissions)
    second = Submitter(config_for(server.url), tmp_path)
    until(lambda: "this one only spools" in caplog.text)
    second.submit(lmms_checkpoint(tmp_path, 2), 2)
    until(lambda: len(server.submissions) == 2)
    first.close(LIMIT_S)
    assert [step for step, _ in first.completed()] == [1, 2]
    second.submit(lmms_checkpoint(tmp_path, 3), 3)
    until(lambda: len(server.submissions) == 3)
    second.close(LIMIT_S)
    assert [step for step, _ in second.completed()] == [3]
    assert len((tmp_path / "_unshard" / "results.jsonl").read_text().splitlines()) == 3


def test_pins_that_no_job_names_are_removed(tmp_path: Path, server: Stub) -> None:
    """Of a process that was killed, long ago; of the server, new, and named ones stay."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    run, made = tmp_path / "link", {}
    server.finishes = lambda body: None  # noqa: ARG005
    for step, age in ((1, 7200), (2, 7200), (3, 0), (4, 7200)):
        own = "server" if step == 2 else ""
        made[step] = pin_checkpoint(lmms_checkpoint(run, step), quota=Quota(), owner=own, step=step)
        record = made[step].directory / "pin.json"
        fields = json.loads(record.read_text())
        record.write_text(json.dumps({**fields, "created": fields["created"] - age}))
    Spool(run).add({"step": 4, "pins": [str(made[4].path)], "request": {"checkpoint": "/c"}})
    submitter = Submitter(config_for(server.url), run)
    until(lambda: len(list_pins(run)) < 4)
    submitter.close(0.0)
    assert {pin.step for pin in list_pins(run)} == {2, 3, 4}


def test_a_full_disk_costs_evaluations_and_nothing_else(
    tmp_path: Path, server: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    submitter = Submitter(config_for(server.url), tmp_path)
    first, second = (lmms_checkpoint(tmp_path, step) for step in (1, 2))
    with largest_file(0):
        assert not submitter.submit(first, 1)
    assert submitter.submit(second, 2)
    assert "step 1 is not evaluated" in caplog.text
    submitter.close(20)
    assert [step for step, _ in submitter.completed()] == [2]
    assert not any((tmp_path / "_unshard" / "pins").iterdir())


def test_what_cannot_be_spooled_leaves_no_pin(tmp_path: Path, server: Stub) -> None:
    (tmp_path / "_unshard").mkdir()
    (tmp_path / "_unshard" / "spool").write_text("in the way")
    submitter = Submitter(config_for(server.url), tmp_path)
    assert not submitter.submit(lmms_checkpoint(tmp_path, 1), 1)
    assert list_pins(tmp_path) == []
    submitter.close(0.0)


def test_a_wrong_token_loses_nothing(tmp_path: Path, server: Stub) -> None:
    server.refuses = (401, "who are you?")
    submitter = Submitter(config_for(server.url), tmp_path)
    submitter.submit(lmms_checkpoint(tmp_path, 1), 1)
    until(lambda: len(server.paths) > 1 or server.paths)
    server.refuses = None
    submitter.close(LIMIT_S)
    assert [step for step, _ in submitter.completed()] == [1]


def test_a_token_that_is_corrected_is_read_again(tmp_path: Path, server: Stub) -> None:
    (tmp_path / "token").write_text("mistyped")
    server.token = "correct"  # noqa: S105
    config = config_for(server.url, token_file=str(tmp_path / "token"))
    submitter = Submitter(config, tmp_path)
    submitter.submit(lmms_checkpoint(tmp_path, 1), 1)
    until(lambda: server.headers)
    (tmp_path / "token").write_text("correct")
    submitter.close(LIMIT_S)
    assert [step for step, _ in submitter.completed()] == [1]
    assert "mistyped" in server.headers[0]["authorization"]


def test_what_was_submitted_last_is_sent_though_results_are_not_waited_for(
    tmp_path: Path, server: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submitter_module, "_GRACE", LIMIT_S)
    for step in range(1, 6):
        submitter = Submitter(config_for(server.url, poll_interval=60), tmp_path)
        submitter.submit(lmms_checkpoint(tmp_path, step), step)
        submitter.close(0.0)
        assert [body["step"] for body in server.submissions] == list(range(1, step + 1))


def test_a_thread_that_is_left_behind_lets_the_next_training_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    config = config_for(f"http://127.0.0.1:{port}")
    with (
        monkeypatch.context() as patch,  # the next has longer: its server is only slow
        socket.create_server(("127.0.0.1", port)) as hanging,  # takes connections, and no more
    ):
        patch.setattr(submitter_module, "_GRACE", 0.05)
        patch.setattr(courier_module, "_TIMEOUT", 0.5)
        first = Submitter(config, tmp_path)
        first.submit(lmms_checkpoint(tmp_path, 1), 1)
        with hanging.accept()[0]:
            first.close(0.0)
    with serving(Stub(finishes=scores), port) as stub:
        second = Submitter(config, tmp_path)
        second.submit(lmms_checkpoint(tmp_path, 2), 2)
        until(lambda: len(stub.submissions) == 2)
        second.close(LIMIT_S)


def test_what_is_in_the_way_for_a_while_only_delays(tmp_path: Path, server: Stub) -> None:
    (tmp_path / "_unshard" / "results.jsonl").mkdir(parents=True)
    submitter = Submitter(config_for(server.url), tmp_path)
    submitter.submit(lmms_checkpoint(tmp_path, 1), 1)
    time.sleep(0.1)
    assert server.submissions == []
    (tmp_path / "_unshard" / "results.jsonl").rmdir()
    submitter.close(LIMIT_S)
    assert [step for step, _ in submitter.completed()] == [1]


def test_whatever_fails_on_one_submission_the_others_are_sent_and_it_waits(
    tmp_path: Path, server: Stub
) -> None:
    spool = Spool(tmp_path)
    for step in (1, 2):
        spool.add({"step": step, "request": {"checkpoint": "/c", "step": step, "tasks": ["t"]}})
    bad = spool.add({"step": 3, "request": {"checkpoint": "/c", "limit": float("inf")}})
    courier = Courier(config_for(server.url), spool, ignore)
    assert courier.send() == 1.0
    assert courier.send() == 2.0
    assert [body["step"] for body in server.submissions] == [1, 2]
    assert spool.waiting() == [bad]
    courier.close()


def test_a_server_that_fails_is_sent_one_submission_at_a_time(tmp_path: Path, server: Stub) -> None:
    """And none is held back by one that the server always fails on."""

    def finish(body: Fields) -> Fields:
        if body["step"] == 1:
            raise RuntimeError("the server's mistake")
        return scores(body)

    spool = Spool(tmp_path)
    for step in (1, 2, 3):
        spool.add({"step": step, "request": {"checkpoint": "/c", "step": step, "tasks": ["t"]}})
    courier = Courier(config_for(server.url), spool, ignore)
    server.refuses = (500, "the database is locked")
    assert [courier.send(), courier.send()] == [1.0, 2.0]
    assert server.paths == ["POST /api/v1/jobs"] * 2
    server.refuses, server.finishes = None, finish
    assert courier.send() == 4.0
    assert [body["step"] for body in server.submissions] == [3, 1]
    assert courier.send() == 8.0
    server.finishes = scores
    assert courier.send() == 0.0
    assert sorted(entry.step for entry in spool.pending()) == [1, 2, 3]
    courier.close()


def test_a_job_is_pending_until_its_result_has_been_taken(tmp_path: Path, server: Stub) -> None:
    """So whatever is no longer pending is among the completed, without a lock."""
    spool, seen = Spool(tmp_path), list[list[str]]()
    spool.accept(spool.add({"step": 3}), "known")
    server.jobs["known"] = {"id": "known", "status": "completed", "metrics": {"t/acc": 0.5}}
    courier = Courier(
        config_for(server.url), spool, lambda _: seen.append([one.name for one in spool.pending()])
    )
    courier.poll()
    courier.close()
    assert (seen, spool.pending()) == ([["known"]], [])


def test_how_often_is_polled_does_not_matter_to_a_server_that_takes_nothing(
    tmp_path: Path, server: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left alone for a while, until training ends: then it is tried at every poll."""
    monkeypatch.setattr(courier_module, "_FIRST_WAIT", 1000.0)
    monkeypatch.setattr(courier_module, "_LONGEST_WAIT", 1000.0)
    spool = Spool(tmp_path)
    spool.accept(spool.add({"step": 3}), "known")
    server.jobs["known"] = {"id": "known", "status": "queued", "request": None}
    server.refuses = (503, "later")

    def polled(times: int) -> None:
        count = server.paths.count("GET /api/v1/jobs/known") + times
        until(lambda: server.paths.count("GET /api/v1/jobs/known") >= count)

    submitter = Submitter(config_for(server.url), tmp_path)
    for step in (1, 2):
        submitter.submit(lmms_checkpoint(tmp_path, step), step)
        until(lambda: "POST /api/v1/jobs" in server.paths)
        polled(5)
    assert server.paths.count("POST /api/v1/jobs") == 1
    server.refuses = None
    server.finish("known", **{"t/acc": 0.5})
    submitter.close(60)
    assert sorted(step for step, _ in submitter.completed()) == [1, 2, 3]


def test_what_is_superseded_while_the_client_connects_is_not_sent(
    tmp_path: Path, server: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool, results = Spool(tmp_path), list[Recording]()
    fields: Fields = {"step": 1, "request": {"checkpoint": "/c", "step": 1, "tasks": ["t"]}}

    def connect(url: str, timeout: float, token: str | None) -> EvalClient:
        spool.supersede(spool.add(fields))
        return EvalClient(url, timeout=timeout, token=token)

    spool.add(fields)
    server.finishes = scores
    monkeypatch.setattr("unshard.evaluate.trainer.courier.EvalClient", connect)
    courier = Courier(config_for(server.url), spool, results.append)
    for _ in range(2):
        courier.send()
        courier.poll()
    courier.close()
    assert len(results) == 1


def test_what_is_superseded_while_it_is_refused_is_not_set_aside(
    tmp_path: Path, server: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool, post = Spool(tmp_path), EvalClient.submit_body
    fields: Fields = {"step": 1, "request": {"checkpoint": "/c", "step": 1, "tasks": ["t"]}}

    def interrupted(client: EvalClient, body: Fields) -> Fields:
        spool.supersede(spool.add(fields))
        return post(client, body)

    spool.add(fields)
    server.refuses = (400, "no such profile")
    courier = Courier(config_for(server.url), spool, ignore)
    with monkeypatch.context() as patched:
        patched.setattr(EvalClient, "submit_body", interrupted)
        courier.send()
    assert (len(spool.waiting()), spool.refused()) == (1, [])
    courier.close()


def test_what_was_refused_is_given_up_by_removing_its_file(tmp_path: Path, server: Stub) -> None:
    server.refuses = (400, "no such profile")
    first = Submitter(config_for(server.url), tmp_path)
    first.submit(lmms_checkpoint(tmp_path, 1), 1)
    until(lambda: Spool(tmp_path).refused())
    first.close(0.0)
    (file,) = (tmp_path / "_unshard" / "spool" / "refused").iterdir()
    file.unlink()
    server.refuses = None
    second = Submitter(config_for(server.url), tmp_path)
    second.submit(lmms_checkpoint(tmp_path, 2), 2)
    assert second.close(LIMIT_S)
    assert [body["step"] for body in server.submissions] == [2]


def test_what_was_refused_is_sent_again_now_and_then(
    tmp_path: Path, server: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(courier_module, "_RETRY_REFUSED", 0.05)
    server.refuses = (400, "no such profile")
    submitter = Submitter(config_for(server.url), tmp_path)
    submitter.submit(lmms_checkpoint(tmp_path, 1), 1)
    until(lambda: Spool(tmp_path).refused())
    server.refuses = None
    until(lambda: server.submissions)
    assert submitter.close(LIMIT_S)
    assert [step for step, _ in submitter.completed()] == [1]


def test_a_job_that_the_server_forgets_again_and_again_is_set_aside(
    tmp_path: Path, server: Stub
) -> None:
    """Three times at most: such a server loses its database each time."""
    spool = Spool(tmp_path)
    spool.add({"step": 1, "request": {"checkpoint": "/c", "step": 1, "tasks": ["t"]}})
    courier = Courier(config_for(server.url), spool, ignore)
    for _ in range(6):
        courier.send()
        server.jobs.clear()
        courier.poll()
    courier.close()
    assert len(server.submissions) == 4
    (refused,) = spool.refused()
    assert "has lost this job 4 times" in str(refused.fields["error"])


def test_a_job_is_not_submitted_again_and_again_where_that_cannot_be_written_down(
    tmp_path: Path, server: Stub
) -> None:
    spool = Spool(tmp_path)
    spool.add({"step": 1, "request": {"checkpoint": "/c", "step": 1, "tasks": ["t"]}})
    (tmp_path / "_unshard" / "spool" / "jobs").write_text("in the way")
    courier = Courier(config_for(server.url), spool, ignore)
    assert [courier.send(), courier.send()] == [1.0, 2.0]
    courier.close()


def test_results_come_while_nothing_can_be_sent(
    tmp_path: Path, server: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(courier: Courier) -> float:
        raise RuntimeError(courier)

    spool = Spool(tmp_path)
    spool.accept(spool.add({"step": 3}), "job1")
    server.jobs["job1"] = {"id": "job1", "status": "completed", "metrics": {"t/acc": 0.5}}
    monkeypatch.setattr(Courier, "send", fail)
    submitter = Submitter(config_for(server.url), tmp_path)
    submitter.close(LIMIT_S)
    assert submitter.completed() == [(3, {"unshard_eval/t/acc": 0.5})]


def test_failed_jobs_end_and_are_reported(
    tmp_path: Path, server: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    server.finishes = lambda body: {"status": "failed", "error": "no memory"}  # noqa: ARG005
    submitter = Submitter(config_for(server.url), tmp_path)
    submitter.submit(lmms_checkpoint(tmp_path, 1), 1)
    assert [submitter.close(LIMIT_S), submitter.close(LIMIT_S)] == [False, False]
    assert (submitter.completed(), submitter.pending(), list_pins(tmp_path)) == ([], [], [])
    assert "no memory" in caplog.text


def test_the_end_of_a_training_says_what_has_no_result(
    tmp_path: Path, server: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    server.finishes = lambda body: {"status": "expired", "error": "gone"}  # noqa: ARG005
    submitter = Submitter(config_for(server.url), tmp_path)
    for step in (1, 2):
        submitter.submit(lmms_checkpoint(tmp_path, step), step)
    until(lambda: len(submitter._courier.failures) == 2)
    server.finishes = scores
    del server.jobs["job2"]
    submitter.submit(tmp_path / "checkpoint-2", 2)
    submitter.close(LIMIT_S)
    said = [one.message for one in caplog.records if one.message.startswith("no result")]
    assert said == ["no result: step 1: job job1 expired: gone"]


def test_the_end_of_a_training_names_what_was_refused_and_what_is_not_final(
    tmp_path: Path, server: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    server.refuses = (400, "no such profile")
    submitter = Submitter(config_for(server.url), tmp_path)
    submitter.submit(lmms_checkpoint(tmp_path, 1), 1)
    until(lambda: Spool(tmp_path).refused())
    server.refuses, server.finishes = None, lambda body: None  # noqa: ARG005
    for step in (2, 3):
        submitter.submit(lmms_checkpoint(tmp_path, step), step)
    until(lambda: len(Spool(tmp_path).pending()) == 2)
    assert not submitter.close(0.1)
    refused, later = [one.message for one in caplog.records if one.message.startswith("no result")]
    assert refused.startswith("no result: step 1: refused: ")
    assert "no such profile" in refused
    assert later.startswith("no result yet: steps 2, 3; the next trainer on ")
    for job in ("job1", "job2"):
        server.finish(job, **{"t/acc": 0.5})
    server.finishes = scores
    assert Submitter(config_for(server.url), tmp_path).close(LIMIT_S)
    assert list_pins(tmp_path) == []


def test_a_step_that_is_saved_again_while_the_server_is_away_is_submitted_once(
    tmp_path: Path,
) -> None:
    """lmms-engine saves its last step twice, into the same files."""
    port = free_port()
    config = config_for(f"http://127.0.0.1:{port}", weights=["model", "ema"])
    submitter = Submitter(config, tmp_path)
    checkpoint = lmms_checkpoint(tmp_path, 1000, ema=True)
    for _ in range(2):
        assert submitter.submit(checkpoint, 1000)
        last = list_pins(tmp_path)[-1]
        save_again(checkpoint)
    submitter.submit(checkpoint, 1000)
    assert [pin.changed() for pin in list_pins(tmp_path)] == [[]]
    assert last.name not in {pin.name for pin in list_pins(tmp_path)}
    with serving(Stub(finishes=scores), port) as stub:
        submitter.close(LIMIT_S)
    assert sorted(str(body["weights"]) for body in stub.submissions) == ["ema", "model"]
    assert len(submitter.completed()) == 2
    assert list_pins(tmp_path) == []


def test_both_sets_of_weights_share_one_pin(tmp_path: Path, server: Stub) -> None:
    submitter = Submitter(config_for(server.url, weights=["model", "ema"]), tmp_path)
    submitter.submit(lmms_checkpoint(tmp_path, 10, ema=True), 10)
    submitter.close(LIMIT_S)
    assert len({str(body["pin"]) for body in server.submissions}) == 1
    names = sorted(name for _, metrics in submitter.completed() for name in metrics)
    assert names == ["unshard_eval/ema/t/acc", "unshard_eval/t/acc"]
    assert list_pins(tmp_path) == []


def test_a_text_is_one_set_of_weights_and_an_empty_path_is_nothing(
    tmp_path: Path, server: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = lmms_checkpoint(tmp_path, 10)
    monkeypatch.chdir(checkpoint)
    submitter = Submitter(config_for(server.url), tmp_path)
    assert not submitter.submit("", 5)
    assert submitter.submit(checkpoint, 10, "ema")
    submitter.close(LIMIT_S)
    assert [(one["step"], one["weights"]) for one in server.submissions] == [(10, "ema")]


def test_the_server_is_given_its_own_paths_through_links_too(tmp_path: Path, server: Stub) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    run = tmp_path / "link" / "lr=0.1,bs=8."
    mapped = config_for(server.url, path_map={str(tmp_path / "link"): "/there"})
    submitter = Submitter(mapped, run)
    submitter.submit(lmms_checkpoint(run, 10), 10)
    submitter.close(LIMIT_S)
    (body,) = server.submissions
    assert body["checkpoint"] == "/there/lr=0.1,bs=8./checkpoint-10"
    assert str(body["pin"]).startswith("/there/lr=0.1,bs=8./_unshard/pins/")
    assert body["run"] == "lr=0.1_bs=8"


def test_the_server_is_given_its_own_paths(tmp_path: Path, server: Stub) -> None:
    mapped = config_for(server.url, path_map={str(tmp_path): "/there"})
    submitter = Submitter(mapped, tmp_path)
    submitter.submit(lmms_checkpoint(tmp_path, 10), 10)
    submitter.close(LIMIT_S)
    (body,) = server.submissions
    assert body["checkpoint"] == "/there/checkpoint-10"
    assert str(body["pin"]).startswith("/there/_unshard/pins/")
    assert list_pins(tmp_path) == []


def test_what_cannot_be_pinned_is_submitted_as_it_lies(tmp_path: Path, server: Stub) -> None:
    unpinned = config_for(server.url, quota={"count": 0, "bytes": None})
    submitter = Submitter(unpinned, tmp_path)
    checkpoint = lmms_checkpoint(tmp_path, 10)
    submitter.submit(checkpoint, 10)
    submitter.close(LIMIT_S)
    (body,) = server.submissions
    assert (body["checkpoint"], "pin" in body) == (str(checkpoint), False)


def test_a_checkpoint_that_is_gone_is_not_submitted(
    tmp_path: Path, server: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    submitter = Submitter(config_for(server.url), tmp_path)
    assert not submitter.submit(tmp_path / "checkpoint-1", 1)
    submitter.close(5)
    assert server.submissions == []
    assert "cannot be evaluated any more" in caplog.text


def test_only_the_first_rank_acts(
    tmp_path: Path, server: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert not is_first_rank()
    submitter = Submitter(config_for(server.url), tmp_path)
    assert not submitter.submit(lmms_checkpoint(tmp_path, 1), 1)
    submitter.tick()
    submitter.close(5)
    assert (submitter.completed(), submitter.pending()) == ([], [])
    assert not (tmp_path / "_unshard").exists()
    monkeypatch.setenv("RANK", "0")
    assert is_first_rank()


def test_no_network_is_used_in_the_trainers_thread(
    tmp_path: Path, server: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers: list[str] = []
    connect = socket.socket.connect

    def noting(self: socket.socket, address: tuple[str, int]) -> None:
        callers.append(threading.current_thread().name)
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", noting)
    submitter = Submitter(config_for(server.url), tmp_path)
    submitter.submit(lmms_checkpoint(tmp_path, 1), 1)
    until((tmp_path / "_unshard" / "results.jsonl").exists)
    submitter.tick()
    submitter.completed()
    submitter.close(LIMIT_S)
    assert set(callers) == {"unshard-evaluation"}


def test_a_directory_that_cannot_be_written_does_not_hurt_the_trainer(
    tmp_path: Path, server: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = lmms_checkpoint(tmp_path, 1)
    (tmp_path / "_unshard").write_text("in the way")
    submitter = Submitter(config_for(server.url), tmp_path)
    assert not submitter.submit(checkpoint, 1)
    submitter.tick()
    submitter.close(1)
    assert submitter.completed() == []
    assert caplog.text


def test_closing_is_bounded_while_the_server_is_away(tmp_path: Path) -> None:
    submitter = Submitter(config_for(f"http://127.0.0.1:{free_port()}"), tmp_path)
    submitter.submit(lmms_checkpoint(tmp_path, 1), 1)
    with in_time():
        submitter.close(0.2)
    assert [step for _, step in submitter.pending()] == [1]
    submitter.close(0.2)


class Broken(JsonlSink):
    """A tracker that is away for the first two results."""

    failures = 2

    def log(self, step: int | None, metrics: object, job_id: str) -> None:
        del metrics
        if self.failures:
            self.failures -= 1
            raise ConnectionError("tracker is away")
        super().log(step, {}, job_id)


def test_a_tracker_that_is_away_gets_its_results_later(
    tmp_path: Path, server: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_FIRST_WAIT", 0.01)
    sink = Broken(tmp_path / "broken.jsonl")
    submitter = Submitter(config_for(server.url), tmp_path, sinks=[sink])
    submitter.submit(lmms_checkpoint(tmp_path, 1), 1)
    until((tmp_path / "broken.jsonl").exists)
    submitter.close(LIMIT_S)
    assert Spool(tmp_path).arrived() == []
    assert len((tmp_path / "_unshard" / "results.jsonl").read_text().splitlines()) == 1
    assert os.listdir(tmp_path / "_unshard" / "exports")  # noqa: PTH208


class Stuck(JsonlSink):
    """A tracker that does not answer before the test is over."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_over = threading.Event()
        self.threads: set[str] = set()

    def log(self, step: int | None, metrics: object, job_id: str) -> None:
        del step, metrics, job_id
        self.threads.add(threading.current_thread().name)
        self.is_over.wait(LIMIT_S)
        raise ConnectionError("tracker is away")


def test_a_stuck_tracker_holds_up_neither_the_file_nor_the_end_of_training(
    tmp_path: Path, server: Stub
) -> None:
    sink = Stuck(tmp_path / "stuck.jsonl")
    submitter = Submitter(config_for(server.url), tmp_path, sinks=[sink])
    for step in (1, 2, 3):
        submitter.submit(lmms_checkpoint(tmp_path, step), step)
    lines = tmp_path / "_unshard" / "results.jsonl"
    until(lambda: lines.exists() and len(lines.read_text().splitlines()) == 3)
    until(lambda: not submitter.pending())
    submitter.close(0.0)
    assert not sink.is_over.is_set()
    assert sink.threads == {"unshard-trackers"}
    assert [entry.step for entry in Spool(tmp_path).arrived()] == [1, 2, 3]
    sink.is_over.set()
