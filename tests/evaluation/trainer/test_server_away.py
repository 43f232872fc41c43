"""A server that is away at any moment of a training whose last step is saved twice in place."""

import json
import threading
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from evaluation.runs import checkpoint
from evaluation.servers import Live, free_port, live
from ranks import save_ranks, some_tensors
from unshard import merge
from unshard.evaluate.client.lmms import Answer
from unshard.evaluate.client.v1 import EvalClient, ServerAwayError
from unshard.evaluate.pins.pin import list_pins
from unshard.evaluate.trainer import courier
from unshard.evaluate.trainer.config import EvalConfig
from unshard.evaluate.trainer.spool import Spool
from unshard.evaluate.trainer.submitter import Submitter
from waiting import LIMIT_S
from waiting import wait_until as until

pytestmark = pytest.mark.slow

LAST = 2
CHECKSUM = """
import json, os, sys, time, zlib
model, output, control, *_ = sys.argv[1:]
while not os.path.exists(os.path.join(control, "go")):
    time.sleep(0.02)
with open(os.path.join(model, "model.safetensors"), "rb") as file:
    found = zlib.crc32(file.read())
with open(os.path.join(output, "results.json"), "w") as file:
    json.dump({"t": {"checksum": found}}, file)
"""

Post = Callable[[EvalClient, Mapping[str, object]], Answer]


# Trainings save in several threads, but torch has one process group at a time.
SAVING = threading.Lock()


class Training:
    """A run and what its trainer does."""

    def __init__(self, root: Path, name: str, url: str) -> None:
        self.run = root / name
        given = {"server_url": url, "profile": "script", "tasks": ["t"], "poll_interval": 0.05}
        self.config = EvalConfig.from_dict(given)
        self.submitter = Submitter(self.config, self.run)

    def save(self, step: int) -> None:
        """Save a step and submit it; the last step again is written into the same files."""
        place = self.run / f"checkpoint-{step}"
        with SAVING:
            if place.exists():
                save_ranks(place / "pytorch_model_fsdp_0", some_tensors(step + 100), 2)
            else:
                checkpoint(self.run, step)
        assert self.submitter.submit(place, step)

    def is_sent(self) -> bool:
        spool = Spool(self.run)
        return bool(spool.pending()) and not spool.waiting()

    def goes_on(self) -> None:
        """Begin the next training on the same run."""
        self.submitter = Submitter(self.config, self.run)

    def check(self, running: Live, *steps: int) -> None:
        """Check that each step has one result, the last one that of its newer save."""
        assert self.submitter.close(LIMIT_S), self.run.name
        with running.client() as client:
            jobs = client.jobs(run=self.run.name)
        assert {job["status"] for job in jobs} <= {"completed", "superseded"}, jobs
        done = sorted(int(str(job["step"])) for job in jobs if job["status"] == "completed")
        assert done == list(steps), jobs
        lines = (self.run / "_unshard" / "results.jsonl").read_text().splitlines()
        found = {one["step"]: one["metrics"] for one in map(json.loads, lines)}
        assert (len(lines), sorted(found)) == (len(steps), list(steps))
        assert found[LAST]["unshard_eval/t/checksum"] == self._checksum()
        assert list_pins(self.run) == []
        assert not list((self.run / "_unshard" / "spool").rglob("*.json"))

    def _checksum(self) -> int:
        output = self.run.with_name(f"{self.run.name}-merged")
        merge(self.run / f"checkpoint-{LAST}", output, config="none")
        return zlib.crc32((output / "model.safetensors").read_bytes())


def checksums(place: Path, port: int) -> AbstractContextManager[Live]:
    """Return a server of the directory of runs that measures a model when it may go on."""
    roots = [str(place / "runs")]
    return live(place / "server", script=CHECKSUM, roots=roots, port=port)


def test_a_server_that_is_away_at_any_moment_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(courier, "_LONGEST_WAIT", 1.0)  # a minute is long for a test
    (tmp_path / "runs").mkdir()
    port = free_port()
    names = ("before", "during", "after", "end", "longer")
    before, during, after, end, longer = (
        Training(tmp_path / "runs", name, f"http://127.0.0.1:{port}") for name in names
    )
    before.save(1)
    for training in (end, longer):
        training.save(LAST)
        training.save(LAST)
    assert not longer.submitter.close(0.1)
    assert "no result yet: step 2; the next trainer on" in caplog.text
    with checksums(tmp_path, port):
        for training in (before, after):
            training.save(LAST)
            training.save(LAST)
        during.save(LAST)
        until(
            lambda: all(one.is_sent() for one in (before, during, after, end)),
            "the end of what was submitted",
        )
    during.save(LAST)
    waiting = threading.Thread(target=end.submitter.close, args=(LIMIT_S,))
    waiting.start()
    with checksums(tmp_path, port) as running:
        until(during.is_sent, "the end of what was submitted")
        running.go()  # what was evaluated of its older save ends before
        waiting.join()
        before.check(running, 1, LAST)
        for training in (during, after, end):
            training.check(running, LAST)
        longer.goes_on()
        longer.check(running, LAST)


def test_a_step_that_is_saved_again_while_it_is_being_submitted_has_one_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the request comes to the server; before its answer is there; the answer is lost."""
    (tmp_path / "runs").mkdir()
    port = free_port()
    trainings = {
        name: Training(tmp_path / "runs", name, f"http://127.0.0.1:{port}")
        for name in ("asked", "answered", "lost")
    }
    post, asked = EvalClient.submit_body, set[str]()

    def interrupted(client: EvalClient, body: Mapping[str, object]) -> Answer:
        name = str(body["run"])
        is_first = name not in asked
        asked.add(name)
        if is_first and name == "asked":
            trainings[name].save(LAST)
        answer = post(client, body)
        if is_first and name != "asked":
            trainings[name].save(LAST)
        if is_first and name == "lost":
            raise ServerAwayError("the connection broke")
        return answer

    monkeypatch.setattr(EvalClient, "submit_body", interrupted)
    with checksums(tmp_path, port) as running:
        for training in trainings.values():
            training.save(LAST)
        until(
            lambda: all(one.is_sent() for one in trainings.values()),
            "the end of what was submitted",
        )
        running.go()
        for training in trainings.values():
            training.check(running, LAST)
