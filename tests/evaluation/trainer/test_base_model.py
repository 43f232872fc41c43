"""The base model is evaluated once for a run, as step 0, however it is named."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from evaluation.running import whole_model
from evaluation.servers import Live, cli, live
from unshard.errors import UsageError
from unshard.evaluate.trainer.base_model import find_base
from unshard.evaluate.trainer.config import EvalConfig
from unshard.evaluate.trainer.submitter import Submitter
from waiting import LIMIT_S

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture
def base(server: Live) -> Path:
    return whole_model(server.root / "models" / "their-base")


def steps_of(server: Live, run: str) -> list[tuple[int, str]]:
    """Return step and checkpoint of a run's jobs, when all have ended."""
    with server.client() as client:
        jobs = [server.ended(job) for job in client.jobs(run=run)]
    return sorted((int(str(job["step"])), str(job["checkpoint"])) for job in jobs)


def test_submit_has_the_base_evaluated_once_as_step_0_of_the_run(server: Live, base: Path) -> None:
    run = server.root / "first"
    asked = ["--tasks", "score", "--profile", "script", "--base", str(base), "--wait"]
    ids = set[str]()
    for step in (10, 20):
        checkpoint = whole_model(run / f"checkpoint-{step}")
        done = cli(server.url, "submit", str(checkpoint), *asked, "--json")
        assert done.returncode == 0, done.stderr
        own, of_base = json.loads(done.stdout)["jobs"]
        assert (own["step"], of_base["step"]) == (step, 0)
        assert (of_base["run"], of_base["weights"], of_base["status"]) == (
            *("first", "model"),
            "completed",
        )
        ids.add(of_base["id"])
    assert len(ids) == 1
    assert steps_of(server, "first") == [
        (0, str(base)),
        *((step, str(run / f"checkpoint-{step}")) for step in (10, 20)),
    ]
    # Nothing is written next to the base: no trainer removes it, so it needs no pin.
    assert [path.name for path in base.parent.iterdir()] == ["their-base"]


def test_a_trainer_gets_the_result_of_its_base_once(server: Live, base: Path) -> None:
    run = server.root / "second"
    given = {"server_url": server.url, "profile": "script", "tasks": ["score"], "base": str(base)}
    config = EvalConfig.from_dict({**given, "poll_interval": 0.05, "weights": ["model"]})
    for step in (10, 20):
        submitter = Submitter(config, run, acts=True)
        assert not submitter.submit(whole_model(run / "checkpoint-0"), 0)  # the base is step 0
        assert submitter.submit(whole_model(run / f"checkpoint-{step}"), step)
        assert submitter.close(LIMIT_S)
    lines = (run / "_unshard" / "results.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["step"] for line in lines) == [0, 10, 20]
    assert [step for step, _ in steps_of(server, "second")] == [0, 10, 20]


def test_watch_submits_the_base_with_the_run(server: Live, base: Path) -> None:
    run = server.root / "third"
    for step in (0, 10):
        whole_model(run / f"checkpoint-{step}")
    asked = ["--tasks", "score", "--profile", "script", "--base", str(base), "--once"]
    done = cli(server.url, "watch", str(run), *asked, "--interval", "0.05")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()[:2]) == [
        "step 0: submitted (model)",
        "step 10: submitted (model)",
    ]
    assert steps_of(server, "third") == [(0, str(base)), (10, str(run / "checkpoint-10"))]


def test_no_base_is_submitted_if_nothing_is_to_be_evaluated(server: Live, base: Path) -> None:
    given = {"server_url": server.url, "profile": "script", "tasks": ["score"], "base": str(base)}
    config = EvalConfig.from_dict({**given, "eval_strategy": "no"})
    submitter = Submitter(config, server.root / "none", acts=True)
    assert submitter.close(LIMIT_S)
    assert submitter.completed() == []


def test_a_base_outside_the_roots_is_refused_and_the_trainer_is_told(
    server: Live, tmp_path: Path
) -> None:
    base = whole_model(tmp_path / "elsewhere")
    run = server.root / "fourth"
    asked = ["--tasks", "score", "--profile", "script", "--base", str(base), "--once"]
    done = cli(server.url, "watch", str(whole_model(run / "checkpoint-1").parent), *asked)
    assert done.returncode == 1
    assert "step 0: refused (model)" in done.stderr
    assert "add its directory to the server's `roots`" in done.stderr


def test_a_model_of_the_hub_is_found_where_it_was_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    commit = "0" * 40
    place = tmp_path / "models--Their--model"
    snapshot = whole_model(place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    assert find_base("Their/model") == str(snapshot)
    (snapshot / "model.safetensors").unlink()
    for wrong in ("Their/model", "Their/other", "a/b/c", "..", "an id"):
        if wrong != "..":
            with pytest.raises(UsageError, match="found neither here nor"):
                find_base(wrong)
    assert find_base(".") == str(tmp_path)
    assert find_base("/on/the/server") == "/on/the/server"
    assert find_base("s3://bucket/model") == "s3://bucket/model"
