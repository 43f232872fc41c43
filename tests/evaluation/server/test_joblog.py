"""What the server's log says of jobs: a line for every step on a job's way."""

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from evaluation.running import request, scheduler, script_profile, wait_for, whole_model
from evaluation.runs import checkpoint
from evaluation.servers import Live, live
from unshard.evaluate.jobs import Job, Status
from unshard.evaluate.logs import LOG_MARK, one_line
from unshard.evaluate.server.endings import Cause, Expired, Failed, Lost, Outcome, Postponed
from unshard.evaluate.server.evaluators.work import Scores
from unshard.evaluate.server.joblog import log_outcome
from waiting import wait_until

NAME = "unshard.evaluate.server.joblog"


def said(caplog: pytest.LogCaptureFixture, job: Job) -> list[str]:
    """Return what was logged of a job, without its beginning, which is always the same."""
    start = f"job {job.id[:8]} run/1: "
    lines = [one.getMessage() for one in caplog.records if one.name == NAME]
    assert all("\n" not in line for line in lines)
    return [line.removeprefix(start) for line in lines if line.startswith(start)]


def test_a_failure_and_the_retry_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, NAME)
    script = "print('a secret of the evaluator'); step == '1' and sys.exit(3)"
    store, server = scheduler(tmp_path, script, profile=script_profile(retries=1))
    job, _ = store.submit(request(whole_model(tmp_path / "model")), pin=None)
    server.start()
    wait_for(store, job.id, Status.FAILED)
    server.stop(end=True)
    assert said(caplog, job) == [
        "started: attempt 1, script on GPU 0",
        "retried: attempt 1 failed: no metrics; found: exit code 3",
        "started: attempt 2, script on GPU 0",
        "failed: attempt 2: no metrics; found: exit code 3",
    ]


@pytest.mark.parametrize(
    ("outcome", "status", "line"),
    [
        (Scores({"a/b": 0.25}, {}), Status.COMPLETED, "evaluated: a/b = 0.25"),
        (Scores(dict.fromkeys("abcde", 1.0), {}), Status.COMPLETED,
         "evaluated: a = 1, b = 1, c = 1, 2 more"),
        (Failed("bad", may_retry=True), Status.QUEUED, "retried: attempt 2 failed: bad"),
        (Failed("bad", may_retry=True), Status.FAILED, "failed: attempt 2: the error"),
        (Postponed("disk full"), Status.QUEUED, "postponed: attempt 2: disk full"),
        (Postponed("signal 9", Cause.KILLED), Status.QUEUED, "postponed: attempt 2: signal 9"),
        (Lost("stopped"), Status.QUEUED, "queued again: attempt 2: stopped"),
        (Expired("gone"), Status.EXPIRED, "expired: attempt 2: the error"),
        (Lost("stopped"), Status.SUPERSEDED, "superseded: the processes of attempt 2 have ended"),
        (Scores({}, {}), Status.CANCELLED, "cancelled: the processes of attempt 2 have ended"),
    ],
)  # fmt: skip
def test_how_an_attempt_ended(
    outcome: Outcome, status: Status, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, NAME)
    job = Job("ab" * 8, request(Path("/model")), Status.RUNNING, 0.0, attempts=2)
    log_outcome(job, outcome, replace(job, status=status, error="the error"))
    assert said(caplog, job) == [line]
    about = vars(caplog.records[-1])["about"]  # the fields of a log of JSON
    kind = type(outcome)
    assert about["outcome"] == ("completed" if kind is Scores else kind.__name__.lower())


def test_one_line_of_what_others_wrote() -> None:
    assert one_line("a\n  expected: b\r\n\tc \n") == "a; expected: b; c"
    assert one_line("red \x1b[31m\x07 \u202e") == "red \\x1b[31m\\x07 \\u202e"
    assert one_line(f"failed\n{LOG_MARK}\nforged") == "failed"
    assert len(one_line("x" * 10_000)) == 503
    assert one_line("") == ""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.mark.slow
def test_a_server_tells_the_way_of_each_job(server: Live) -> None:
    place = checkpoint(server.root / "my-run", 5)
    job = server.ended(server.submit(place))
    server.submit(place)
    failed = server.ended(server.submit(place, "fails"), "failed")
    refused = {"checkpoint": str(place), "profile": "nobody", "tasks": ["a"], "run": "r", "step": 1}
    forged = {**refused, "profile": "script", "tasks": ["../x\njob 1: evaluated"], "run": ""}
    for body in (refused, forged, {**refused, "weights": "bogus"}):
        assert server.call("POST", "/api/v1/jobs", json=body).status_code == 400
    assert server.call("POST", "/evaluate", json={"model": "m", "tasks": ["t"]}).is_client_error
    lines = [
        re.sub(r"^[\d-]+ [\d:,]+ \S+ ", "", one) for one in server.log.read_text().splitlines()
    ]

    def of(job_id: object) -> list[str]:
        start = f"job {str(job_id)[:8]} my-run/5: "
        return [line.removeprefix(start) for line in lines if line.startswith(start)]

    size = job["metrics"]["score/size"]  # type: ignore[index]  # numbers
    assert of(job["id"]) == [
        f"accepted: script: score of {place}",
        "merged",
        "started: attempt 1, script on GPU 0",
        f"evaluated: score/acc = 0.05, score/acc,strict = 0.5, score/size = {size:.6g}",
        "submitted again: it is completed",
    ]
    assert [one.partition(":")[0] for one in of(failed["id"])] == [
        "accepted", "merged", "started", "failed",
    ]  # fmt: skip
    assert "nothing was measured" not in of(failed["id"])[-1]
    told = [line for line in lines if line.startswith("refused")]
    assert told[0].startswith("refused r/1 (nobody: a): unknown profile 'nobody'")
    assert told[1].startswith("refused my-run/checkpoint-5 (script: ../x; job 1: evaluated): ")
    assert told[2].startswith("refused: POST /api/v1/jobs: weights: ")
    assert told[3].startswith("refused - (m: t): model_args: no checkpoint")


@pytest.mark.slow
def test_a_log_of_json_has_the_fields_of_the_job(tmp_path: Path) -> None:
    with live(tmp_path, log_format="json") as server:
        model = whole_model(server.root / "run" / "checkpoint-5")
        job = server.ended(server.submit(model, "score", step=5))
        wait_until(lambda: "evaluated: " in server.told(), "the line of its end")
        lines = [json.loads(line) for line in server.told().splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    (ended,) = [line for line in lines if line.get("outcome")]
    about = {key: ended[key] for key in ("job", "run", "step", "profile", "attempt", "outcome")}
    assert about == {
        "job": job["id"],
        "run": "run",
        "step": 5,
        "profile": "script",
        "attempt": 1,
        "outcome": "completed",
    }
