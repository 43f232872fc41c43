"""`unshard eval doctor`: what is wrong is found before the server is started."""

import importlib.util
import json
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from evaluation.running import whole_model
from evaluation.servers import Fields, Live, unshard
from unshard.evaluate.jobs import Filters, Request
from unshard.evaluate.server.store.store import Store

pytestmark = pytest.mark.slow


@pytest.fixture
def server(tmp_path: Path) -> Live:
    """A server that is configured, and not started."""
    server = Live(tmp_path)
    server.configure()
    config = yaml.safe_load((tmp_path / "server.yaml").read_text())
    del config["profiles"]["lmms-eval"]
    config["gpus"] = 0
    config["profiles"]["script"]["gpus"] = 0
    save(server, config)
    return server


def load(server: Live) -> Fields:
    found: Fields = yaml.safe_load((server.directory / "server.yaml").read_text())
    return found


def save(server: Live, config: Fields) -> None:
    (server.directory / "server.yaml").write_text(yaml.safe_dump(config))


def examined(server: Live, *options: object, code: int = 0) -> dict[str, Fields]:
    """Return what is found, by its subject."""
    config = server.directory / "server.yaml"
    done = unshard("eval", "doctor", "--config", config, "--json", *options, check=False)
    assert done.returncode == code, f"{done.stdout}{done.stderr}"
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert any(not one["is_fine"] for one in found) == bool(code)
    return {one["subject"]: one for one in found}


def wrong(found: dict[str, Fields]) -> dict[str, str]:
    return {name: str(one["text"]) for name, one in found.items() if not one["is_fine"]}


def test_a_server_that_can_start_is_fine_and_nothing_is_written(server: Live) -> None:
    before = sorted(server.directory.rglob("*"))
    found = examined(server)
    assert list(found) == [
        f"configuration {server.directory / 'server.yaml'}",
        "access 127.0.0.1:0",
        f"work directory {server.work}",
        f"root {server.root}",
        "GPUs none",
        "profile script (command)",
    ]
    assert found["profile script (command)"]["text"] == sys.executable
    assert sorted(server.directory.rglob("*")) == before
    config = server.directory / "server.yaml"
    printed = unshard("eval", "doctor", "--config", config).stdout.splitlines()
    assert len(printed) == 6
    assert all(line.startswith("ok    ") for line in printed)


def test_each_thing_that_is_wrong_is_told_with_what_to_do(server: Live, tmp_path: Path) -> None:
    config = load(server)
    broken = tmp_path / "broken"  # an lm_eval that is there, and cannot be imported
    broken.mkdir()
    (broken / "lm_eval.py").write_text("raise ImportError('libcudart.so.12 is not there')")
    lm_eval = {"kind": "lm-eval", "gpus": 0, "environment": {"PYTHONPATH": str(broken)}}
    config["profiles"] = {"lm-eval": lm_eval}
    shut = tmp_path / "file"
    shut.write_text("")
    config |= {"roots": [str(tmp_path / "none")], "gpus": [97], "work_directory": str(shut)}
    config["on_result"] = {"command": [str(tmp_path / "rule")]}
    save(server, config)
    found = wrong(examined(server, "--host", "0.0.0.0", code=1))  # noqa: S104
    subjects = ("access", "work", "root", "GPUs", "rule", "profile")
    texts = dict(zip(subjects, found.values(), strict=True))
    assert "--token-file" in texts["access"]
    assert "choose another by --work-dir" in texts["work"]
    assert texts["root"] == "no such directory; correct `roots` or --root"
    assert "no GPU 97" in texts["GPUs"]
    assert "rule is not found; install it" in texts["rule"]
    assert "libcudart.so.12 is not there" in texts["profile"]


def test_a_configuration_that_cannot_be_read_is_all_that_is_told(server: Live) -> None:
    save(server, load(server) | {"root": "x"})
    (text,) = wrong(found := examined(server, code=1)).values()
    assert "did you mean 'roots'?" in text
    assert len(found) == 1


def test_a_trial_evaluates_with_the_profile_and_leaves_nothing(server: Live) -> None:
    model = whole_model(server.root / "run" / "checkpoint-5")
    before = sorted(server.directory.rglob("*"))
    tried = ("--checkpoint", model, "--try")
    found = examined(server, *tried, "script=score")
    assert "score" in str(found["trial of script"]["text"])
    failed = wrong(examined(server, *tried, "script=fails", "--try", "other=x", code=1))
    assert "its log ends:" in failed["trial of script"]
    assert failed["trial of other"].startswith("there is no such profile")
    shutil.rmtree(server.root / "run" / "_unshard", ignore_errors=True)
    assert sorted(server.directory.rglob("*")) == before


def test_a_trial_of_a_checkpoint_elsewhere_is_refused_as_a_server_does(
    server: Live, tmp_path: Path
) -> None:
    model = whole_model(tmp_path / "elsewhere")
    tried = ("--checkpoint", model, "--try", "script=score")
    found = wrong(examined(server, *tried, code=1))
    assert "not under" in found["trial of script"] or "root" in found["trial of script"]


@pytest.mark.parametrize("given", [("--try", "script=x"), ("--checkpoint", "x")])
def test_a_trial_needs_both_options(server: Live, given: tuple[str, ...]) -> None:
    config = server.directory / "server.yaml"
    done = unshard("eval", "doctor", "--config", config, *given, check=False)
    assert done.returncode == 2
    assert "given together" in done.stderr


def test_jobs_that_would_wait_for_the_configuration_are_told(server: Live) -> None:
    model = whole_model(server.root / "run" / "checkpoint-5")
    store = Store(server.work / "jobs.sqlite")
    asked = {"script": 1, "renamed": 2, "script:qwen": 3}
    for profile, step in asked.items():
        store.submit(Request(str(model), profile, ("score",), step, "run"), pin=None)
    assert list(wrong(examined(server, code=1))) == ["jobs that wait"]
    text = wrong(examined(server, code=1))["jobs that wait"]
    assert "1 job of profile renamed: unknown profile 'renamed'" in text
    assert "1 job of profile script:qwen: " in text
    assert "eval cancel --profile renamed; unshard eval cancel --profile script:qwen" in text
    with store.connection as connection:
        connection.execute("UPDATE jobs SET request = '[1]' WHERE profile = 'script:qwen'")
        connection.execute("UPDATE jobs SET status = 'running' WHERE profile = 'renamed'")
    text = wrong(examined(server, code=1))["jobs that wait"]
    assert "1 job of profile renamed" in text
    assert "1 job of a request that cannot be read" in text
    with store.connection as connection:
        connection.execute("DELETE FROM jobs WHERE profile = 'script:qwen'")
        connection.execute("UPDATE jobs SET status = 'queued'")
    for job in store.jobs(Filters()):
        if job.request.profile != "script":
            store.cancel(job.id)
    store.close()
    assert examined(server)["jobs that wait"]["text"] == "1 job, which can begin"


def test_one_of_the_harnesses_is_enough_if_no_profile_is_configured(server: Live) -> None:
    """A new user has installed lm-eval alone, and configured nothing."""
    config = load(server)
    del config["profiles"]
    save(server, config)
    there = [importlib.util.find_spec(name) is not None for name in ("lm_eval", "lmms_eval")]
    found = examined(server, code=0 if any(there) else 1)
    assert ("is not installed" in str(found["profile lmms-eval (lmms-eval)"]["text"])) != there[1]
    assert found["profile command (command)"]["is_fine"]


def test_a_database_of_a_later_version_is_told(server: Live) -> None:
    server.work.mkdir(exist_ok=True)
    with closing(sqlite3.connect(server.work / "jobs.sqlite")) as connection:
        connection.execute("PRAGMA user_version = 99")
    (text,) = wrong(examined(server, code=1)).values()
    assert "made by a later version of unshard" in text
