"""What is known of evaluators before a job runs, and what only its failure tells."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from evaluation.running import wait_for, whole_model
from unshard.errors import UsageError
from unshard.evaluate.jobs import Request, Status
from unshard.evaluate.server.evaluators import installed
from unshard.evaluate.server.evaluators.command import CommandProfile
from unshard.evaluate.server.evaluators.installed import (
    UnknownTasks,
    UnknownTasksError,
    tell_missing,
    why_missing,
)
from unshard.evaluate.server.evaluators.lm_eval import LmEvalProfile
from unshard.evaluate.server.evaluators.lmms_eval import LmmsEvalProfile
from unshard.evaluate.server.evaluators.work import Profile
from unshard.evaluate.server.serve import make_service
from unshard.evaluate.server.server_yaml import ServerConfig
from unshard.evaluate.server.service import Service


def script(path: Path, *lines: str) -> str:
    path.write_text("\n".join(["#!/bin/sh", *lines]))
    path.chmod(0o755)
    return str(path)


def test_a_module_is_looked_for_and_not_imported(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    (packages / "lm_eval").mkdir(parents=True)
    (packages / "lm_eval" / "__init__.py").write_text("raise RuntimeError('imported')")
    bare = tmp_path / "python"  # has no packages: it is not its environment's python
    bare.symlink_to(Path(sys.base_prefix) / "bin" / "python3")
    there = {"PYTHONPATH": str(packages)}
    profile = LmEvalProfile(interpreter=str(bare), environment=there)
    assert why_missing(profile, tmp_path) is None
    missing = why_missing(LmmsEvalProfile(interpreter=str(bare)), tmp_path)
    assert missing is not None
    assert f"lmms_eval is not installed for {bare}" in missing
    assert f'{bare} -m pip install "lmms_eval"' in missing


def test_what_cannot_be_run_is_reported_with_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "_TIMEOUT_S", 0.2)
    broken = script(tmp_path / "broken", "echo first >&2", "echo no libpython >&2", "exit 127")
    slow = script(tmp_path / "slow", "exec sleep 600")
    profiles: dict[str, Profile] = {
        "gone": LmEvalProfile(interpreter=str(tmp_path / "none")),
        "broken": LmEvalProfile(interpreter=broken),
        "slow": LmmsEvalProfile(interpreter=slow),
        "own": CommandProfile(command=("no-such-program", "{tasks}")),
        "good": CommandProfile(command=("sh", "{tasks}")),
    }
    with caplog.at_level(logging.WARNING):
        tell_missing(profiles, tmp_path)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(":")[0] for line in lines] == [f"profile {one}" for one in profiles][:4]
    assert "none cannot be run: No such file or directory; change `interpreter`" in lines[0]
    assert "ended with code 127: no libpython" in lines[1]
    assert "jobs may not run" in lines[2]
    assert "did not answer within 0.2 s; if it is not merely slow, run it by hand" in lines[2]
    assert [number for number, line in enumerate(lines) if "jobs cannot run" in line] == [0, 1, 3]
    assert "no-such-program is not found; install it, or change `command`" in lines[3]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """A server whose lm-eval says what lm_eval 0.4.13 says of a task that it does not know."""
    line = 'case "$*" in *run*) echo "ValueError: Tasks not found: nope, other"; exit 1;; esac'
    python = script(tmp_path / "python", line)
    profile = LmEvalProfile(interpreter=python, retries=3)
    config = ServerConfig(
        roots=(tmp_path,), work_directory=tmp_path / "work", profiles={"lm": profile}
    )
    made = make_service(config)
    made.scheduler.start()
    yield made
    made.scheduler.stop(end=True)
    made.store.close()


def test_an_unknown_task_is_not_retried_and_refused_from_then_on(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = whole_model(tmp_path / "run" / "checkpoint-1")
    asked = Request(str(model), "lm", ("nope", "hellaswag"), step=1, run="run")
    job, _ = service.submit(asked, None)
    failed = wait_for(service.store, job.id, Status.FAILED)
    assert (failed.attempts, failed.failures) == (1, 1)
    assert str(failed.error).startswith("lm-eval does not know the task nope\n")
    assert "lm_eval ls tasks" in str(failed.error)
    with pytest.raises(UsageError, match="does not know the task nope") as caught:
        service.submit(Request(str(model), "lm", ("a", "nope"), step=1, run="run"), None)
    assert "lm_eval ls tasks" in caught.value.hint
    other, is_new = service.submit(Request(str(model), "lm", ("other",), step=1, run="run"), None)
    assert is_new  # no client had asked for it when the evaluator named it
    wait_for(service.store, other.id, Status.FAILED)
    monkeypatch.setattr(installed, "_REMEMBERED_S", 0.0)
    again, _ = service.submit(asked, None)
    assert again.id == job.id


def test_so_many_unknown_tasks_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "_MOST", 2)
    known = UnknownTasks()
    for task in "abc":
        known.add("lm", UnknownTasksError("lm-eval", [task], hint="see"))
    known.check("lm", ["a"])
    known.check("another", ["b", "c"])
    with pytest.raises(UsageError, match="the task b, c"):
        known.check("lm", ["a", "b", "c"])
