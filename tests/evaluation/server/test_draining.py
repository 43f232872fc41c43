"""A server that is drained begins no more jobs, and ends when none runs."""

import signal
import subprocess
from pathlib import Path

import pytest

from evaluation.running import whole_model
from evaluation.servers import Live, cli, live
from waiting import LIMIT_S, wait_until

pytestmark = pytest.mark.slow


def is_draining(server: Live) -> bool:
    return server.call("GET", "/health").json()["draining"] is True


def test_a_drained_server_ends_when_its_jobs_have_and_loses_none(tmp_path: Path) -> None:
    with live(tmp_path, gpus=1) as server:
        model = whole_model(server.root / "run" / "checkpoint-1")
        running = server.submit(model, "waits", step=1)
        server.began(1)
        before = server.submit(model, "before", step=1)
        assert not is_draining(server)
        done = cli(server.url, "drain")
        assert done.returncode == 0, done.stderr
        assert done.stdout == "draining: 1 running, 1 queued for the next server\n"
        assert is_draining(server)
        assert "The server is draining" in server.call("GET", "/").text
        after = server.submit(model, "after", step=1)  # accepted, and kept
        server.go()
        assert server.process is not None
        assert server.process.wait(LIMIT_S) == 0
        assert "drained: no job runs" in server.told()
        server.start()
        assert server.job(running)["status"] == "completed"
        for job in (before, after):
            assert server.ended(job)["attempts"] == 1


def test_a_signal_drains_and_a_second_one_stops_at_once(tmp_path: Path) -> None:
    with live(tmp_path, gpus=1) as server:
        model = whole_model(server.root / "run" / "checkpoint-1")
        running = server.submit(model, "waits", step=1)
        server.began(1)
        waiting = server.submit(model, "score", step=1)
        process = server.process
        assert isinstance(process, subprocess.Popen)
        process.send_signal(signal.SIGUSR1)
        wait_until(lambda: is_draining(server), "the drain")
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
        server.start()  # the evaluator has gone on
        assert server.job(running)["attempts"] == 1
        assert not is_draining(server)
        server.go()
        assert server.ended(running)["attempts"] == 1
        server.ended(waiting)


def test_a_server_that_is_killed_while_it_drains_loses_no_job(tmp_path: Path) -> None:
    """The drain was that server's own: the next one adopts what runs, and begins what waits."""
    with live(tmp_path, gpus=1) as server:
        model = whole_model(server.root / "run" / "checkpoint-1")
        running = server.submit(model, "waits", step=1)
        server.began(1)
        before = server.submit(model, "before", step=1)
        assert cli(server.url, "drain").returncode == 0
        after = server.submit(model, "after", step=1)
        server.kill()
        server.start()
        assert not is_draining(server)
        assert [server.job(job)["status"] for job in (before, after)] == ["queued"] * 2
        found = server.job(running)
        assert (found["status"], found["attempts"]) == ("running", 1)
        server.go()
        for job in (running, before, after):
            assert server.ended(job)["attempts"] == 1
