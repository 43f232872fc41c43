"""What the server's configuration lacks is waited for: no job fails for it, and no pin goes."""

import errno
import gc
import sqlite3
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evaluation.running import (
    job_of,
    request,
    scheduler,
    script_profile,
    wait_for,
    wait_until,
    whole_model,
)
from unshard.evaluate.jobs import Filters, Job, Request, Status
from unshard.evaluate.pins.files import read_stamps
from unshard.evaluate.pins.pin import Quota
from unshard.evaluate.server.attempts.attempt import Limits
from unshard.evaluate.server.endings import Absent, Failed, Postponed, judge
from unshard.evaluate.server.evaluators.command import CommandProfile
from unshard.evaluate.server.evaluators.lm_eval import LmEvalProfile
from unshard.evaluate.server.evaluators.lmms_eval import LmmsEvalProfile
from unshard.evaluate.server.evaluators.work import EvalInput, Profile
from unshard.evaluate.server.gpus import Slots
from unshard.evaluate.server.pinning import Pins
from unshard.evaluate.server.processes.supervise import Exit
from unshard.evaluate.server.queue import allotment
from unshard.evaluate.server.queue.scheduler import Scheduler, SchedulerSettings
from unshard.evaluate.server.store.store import Store

DONE = "done(acc=1)"
LOOKS_S = 0.5  # a server looks at its queue many times meanwhile


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return whole_model(tmp_path / "run" / "checkpoint-1")


def server_of(
    work_dir: Path, profiles: Mapping[str, Profile], gpus: str = "0"
) -> tuple[Store, Scheduler, Pins]:
    """Return a server of these profiles."""
    store = Store(work_dir / "jobs.sqlite")
    pins = Pins(store, (work_dir.parent,), Quota())
    settings = SchedulerSettings(work_dir, Limits(grace_s=0.5, poll_s=0.02), backoff_s=0.05)
    slots = Slots(filter(None, gpus.split(",")))
    return store, Scheduler(store, slots, profiles, pins, settings), pins


def submit(store: Store, pins: Pins, asked: Request) -> Job:
    path = Path(asked.checkpoint)
    asked = replace(asked, stamps=read_stamps(path))
    return store.submit(asked, pin=pins.ensure_pin(path, asked.step, path.parent))[0]


def is_kept(store: Store, job: Job) -> bool:
    now = job_of(store, job.id)
    return now.status is Status.QUEUED and now.pin == job.pin and Path(str(now.pin)).exists()


def wrote() -> CommandProfile:
    """A command that any Python can run."""
    program = 'import sys; open(sys.argv[1], "w").write("{\\"task/acc\\": 2}")'
    text = program.replace("{", "{{").replace("}", "}}")
    command = (sys.executable, "-c", text, "{output}/results.json")
    return CommandProfile(command=command, gpus=0, retries=0)


@pytest.mark.parametrize(
    ("asked", "gpus", "reason"),
    [
        ({"profile": "renamed"}, "0", "unknown profile 'renamed'"),
        ({"profile": "script:qwen"}, "0", "its model cannot be chosen"),
        ({"num_gpus": 2}, "0", "needs 2 GPUs"),
        ({"num_gpus": 2}, "", "needs 2 GPUs"),
        ({"tasks": ("other",)}, "0", "other"),
        ({"model_args": {"dtype": "bfloat16"}}, "0", "takes no model_args"),
    ],
    ids=["renamed", "kind", "one GPU fewer", "no GPU", "tasks", "arguments"],
)
def test_what_the_configuration_lacks_is_waited_for_and_holds_up_nobody(
    tmp_path: Path,
    checkpoint: Path,
    asked: dict[str, object],
    gpus: str,
    reason: str,
) -> None:
    profile = script_profile(DONE, allowed_tasks=("task",))
    store, server, pins = server_of(tmp_path / "work", {"script": profile}, gpus)
    values = {name: asked[name] for name in ("profile", "tasks") if name in asked}
    more = {name: asked[name] for name in asked if name not in values}
    waits = submit(store, pins, replace(request(checkpoint, 1, **more), **values))  # type: ignore[arg-type]
    behind = submit(store, pins, request(checkpoint, 2))
    server.start()
    wait_for(store, behind.id, Status.COMPLETED)
    time.sleep(LOOKS_S)
    assert is_kept(store, waits)
    assert job_of(store, waits.id).attempts == 0
    assert reason in str(server.waits_for(job_of(store, waits.id)))
    assert server.waits_for(job_of(store, behind.id)) is None
    server.stop(end=True)
    fitting = {"script": script_profile(DONE), "renamed": script_profile(DONE)}
    if "model_args" in asked or str(asked.get("profile")).endswith("qwen"):
        assert server.cancel(waits.id)  # on purpose: then its pin goes
        assert not Path(str(waits.pin)).exists()
        return
    _, mended, _ = server_of(tmp_path / "work", fitting, "0,1")
    mended.start()
    assert wait_for(store, waits.id, Status.COMPLETED).metrics == {"task/acc": 1}
    mended.stop(end=True)
    assert not Path(str(waits.pin)).exists()


def test_a_thousand_that_wait_do_not_hide_the_one_behind_them(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allotment, "_LOOKED_AT", 3)
    profile = script_profile(DONE, allowed_tasks=("task",))
    store, server, pins = server_of(tmp_path / "work", {"script": profile})
    for step in range(4):
        submit(store, pins, replace(request(checkpoint, step), profile="gone"))
        submit(store, pins, request(checkpoint, step, num_gpus=8))
        submit(store, pins, replace(request(checkpoint, step), tasks=("other",)))
    behind = submit(store, pins, request(checkpoint, 9))
    server.start()
    wait_for(store, behind.id, Status.COMPLETED)
    server.stop(end=True)
    assert store.counts()[Status.QUEUED] == 12
    assert len(pins.list_all()) == 1


def test_many_that_do_not_fit_are_found_in_one_look(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, server, pins = server_of(
        tmp_path / "work", {"script": script_profile(DONE, allowed_tasks=("task",))}
    )
    for step in range(30):
        submit(store, pins, replace(request(checkpoint, step), tasks=("other",)))
    behind = submit(store, pins, request(checkpoint, 99))
    looks, real = list[float](), server._allotment.pass_over_unfit

    def pass_over_unfit() -> None:
        looks.append(time.time())
        real()

    monkeypatch.setattr(server._allotment, "pass_over_unfit", pass_over_unfit)
    server.start()
    wait_for(store, behind.id, Status.COMPLETED)
    server.stop(end=True)
    assert len(looks) == 1


def test_a_reason_keeps_nothing_open_in_the_database(tmp_path: Path, checkpoint: Path) -> None:
    """An error that its own frames refer to kept a list of jobs half read, with its snapshot."""
    work = tmp_path / "work"
    store, server, pins = server_of(work, {"script": script_profile(DONE, allowed_tasks=("task",))})
    for step in range(3):
        submit(store, pins, replace(request(checkpoint, step), tasks=("other",)))

    def look() -> str | None:
        return next(server.waits_for(job) for job in store.newest(Filters()))

    gc.collect()
    gc.disable()
    try:
        assert "other" in str(look())
        with closing(sqlite3.connect(work / "jobs.sqlite", isolation_level=None)) as other:
            other.execute("DELETE FROM jobs WHERE 0")
            busy, _, _ = other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    finally:
        gc.enable()
    assert busy == 0


def test_a_profile_that_is_held_makes_no_job_unfit(tmp_path: Path, checkpoint: Path) -> None:
    store, server, pins = server_of(tmp_path / "work", {"script": script_profile(DONE)})
    job = submit(store, pins, request(checkpoint))
    server._allotment.hold("script", "gone")
    assert server.waits_for(job) == "the server's configuration: gone"
    server._allotment.pass_over_unfit()  # as if it was chosen just before
    server._allotment._held.clear()
    choice = server._allotment.choose(time.time())
    assert choice is not None
    assert choice.job.job_id == job.id


@pytest.mark.parametrize("how", ["moved", "empty"])
def test_a_root_that_is_not_mounted_is_waited_for(tmp_path: Path, how: str) -> None:
    root = tmp_path / "root"
    path = whole_model(root / "run" / "checkpoint-1")
    store, server = scheduler(tmp_path / "work", DONE)
    pins = server._runner.pins = Pins(store, (root,), Quota())
    job = submit(store, pins, request(path))
    root.rename(tmp_path / "away")
    if how == "empty":
        root.mkdir()
    server.start()
    wait_until(lambda: job_of(store, job.id).attempts > 0, "an attempt")
    wait_until(lambda: job_of(store, job.id).status is Status.QUEUED, "its end")
    assert "is it mounted?" in str(job_of(store, job.id).error)
    if how == "empty":
        root.rmdir()
    (tmp_path / "away").rename(root)
    wait_for(store, job.id, Status.COMPLETED)
    server.stop(end=True)


@pytest.mark.parametrize("lacks", ["profile", "GPU", "kind"])
def test_a_running_job_waits_for_the_configuration_too(
    tmp_path: Path, checkpoint: Path, lacks: str
) -> None:
    place = tmp_path / "went"
    script = f"""
if not pathlib.Path({str(place)!r}).exists(): time.sleep(600)
done(acc=1)
"""
    work = tmp_path / "work"
    store, server = scheduler(work, script, gpus="0,1")
    pins = Pins(store, (tmp_path,), Quota())
    job = submit(store, pins, request(checkpoint, 1, num_gpus=2))
    server.start()
    wait_until(lambda: job_of(store, job.id).process is not None, "its process")
    server.stop(end=False)
    other = LmEvalProfile(allowed_model_args=()) if lacks == "kind" else script_profile(DONE)
    lacking = {"renamed" if lacks == "profile" else "script": other}
    gpus = "0" if lacks == "GPU" else "0,1"
    _, second, _ = server_of(work, lacking, gpus)
    place.touch()
    if lacks == "kind":  # its results are not those of another kind of evaluator
        second._profiles = lacking
    second.drain()
    second.start()
    wait_until(lambda: not store.running(), "the end of its processes")
    assert is_kept(store, job)
    if lacks != "kind":
        assert second.waits_for(job_of(store, job.id))
    second.stop(end=True)
    _, third = scheduler(work, script, gpus="0,1")
    third.start()
    assert wait_for(store, job.id, Status.COMPLETED).metrics == {"task/acc": 1}
    third.stop(end=True)


@pytest.mark.parametrize("how", ["no program", "not executable", "its Python is gone"])
def test_a_program_that_is_gone_is_waited_for(tmp_path: Path, checkpoint: Path, how: str) -> None:
    program = tmp_path / "evaluate"
    if how != "no program":
        program.write_text("#!/nowhere/bin/python\n")
    if how == "its Python is gone":
        program.chmod(0o755)
    good = wrote()
    profiles = {"command": good.model_copy(update={"command": (str(program), *good.command[1:])})}
    profiles["script"] = script_profile(DONE, gpus=0)
    store, server, pins = server_of(tmp_path / "work", profiles, "")
    first, second = (
        submit(store, pins, replace(request(checkpoint, step), profile="command"))
        for step in (1, 2)
    )
    behind = submit(store, pins, request(checkpoint, 3))
    server.start()
    wait_for(store, behind.id, Status.COMPLETED)
    time.sleep(LOOKS_S)
    assert is_kept(store, first)
    assert is_kept(store, second)
    assert job_of(store, first.id).attempts == 1  # not again and again
    assert job_of(store, second.id).attempts == 0
    for job in (first, second):
        assert "cannot be started" in str(server.waits_for(job_of(store, job.id)))
    server.stop(end=True)
    program.unlink(missing_ok=True)
    program.symlink_to(sys.executable)
    _, mended, _ = server_of(tmp_path / "work", profiles, "")
    mended.start()
    for job in (first, second):
        assert wait_for(store, job.id, Status.COMPLETED).metrics == {"task/acc": 2}
    mended.stop(end=True)


@pytest.mark.parametrize("how", ["script", "found by env"])
def test_what_a_command_runs_is_waited_for(tmp_path: Path, checkpoint: Path, how: str) -> None:
    script = tmp_path / "evaluate"
    start = (sys.executable,) if how == "script" else ("/usr/bin/env",)
    good = wrote()
    command = (*start, str(script), *good.command[2:])
    profiles = {"command": good.model_copy(update={"command": command})}
    store, server, pins = server_of(tmp_path / "work", profiles, "")
    job = submit(store, pins, replace(request(checkpoint), profile="command"))
    server.start()
    wait_until(lambda: server.waits_for(job_of(store, job.id)) is not None, "the reason")
    assert is_kept(store, job)
    assert str(script) in str(server.waits_for(job_of(store, job.id)))
    server.stop(end=True)
    script.write_text(f"#!{sys.executable}\nimport sys; exec(sys.argv.pop(1))\n")
    script.chmod(0o755)
    _, mended, _ = server_of(tmp_path / "work", profiles, "")
    mended.start()
    wait_for(store, job.id, Status.COMPLETED)
    mended.stop(end=True)


def test_a_program_that_the_request_names_holds_no_other_job(
    tmp_path: Path, checkpoint: Path
) -> None:
    good = wrote()
    command = (str(tmp_path / "evaluate-{step}"), *good.command[1:])
    profiles = {"command": good.model_copy(update={"command": command})}
    (tmp_path / "evaluate-2").symlink_to(sys.executable)
    store, server, pins = server_of(tmp_path / "work", profiles, "")
    first, second = (
        submit(store, pins, replace(request(checkpoint, step), profile="command"))
        for step in (1, 2)
    )
    server.start()
    wait_for(store, second.id, Status.COMPLETED)
    wait_until(lambda: job_of(store, first.id).attempts > 0, "an attempt")
    wait_until(lambda: is_kept(store, first), "its end")
    assert "cannot be started" in str(job_of(store, first.id).error)
    server.stop(end=True)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ETXTBSY, Postponed),
        (errno.ESTALE, Postponed),
        (errno.EIO, Postponed),
        (errno.ENOMEM, Postponed),
        (errno.ENOENT, Absent),
        (errno.E2BIG, Failed),
    ],
)
def test_only_what_no_time_mends_fails_at_once(
    tmp_path: Path, checkpoint: Path, number: int, kind: type
) -> None:
    profile = script_profile(DONE)
    work = EvalInput(checkpoint, tmp_path / "output", tmp_path, request(checkpoint), profile)
    ended = Exit("not started", 0, "why", 0.0, number)
    assert isinstance(judge(work, ended), kind)


@pytest.mark.parametrize("lacks", ["config", "engine"])
def test_what_a_profile_no_longer_has_is_waited_for(
    tmp_path: Path, checkpoint: Path, lacks: str
) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    profile: Profile = script_profile(DONE).model_copy(update={"config": config})
    asked = request(checkpoint)
    if lacks == "engine":
        several: dict[str, Any] = {"data_parallel_size": 2}
        allowed = tuple(several)
        direct = {"weights": "direct", "model": "vllm", "allowed_model_args": allowed}
        profile = LmEvalProfile.model_validate(direct)
        asked = request(checkpoint, model_args=several)
    profiles = {"script": profile}
    store, server, pins = server_of(tmp_path / "work", profiles)
    job = submit(store, pins, asked)
    config.unlink()
    server.start()
    wait_until(lambda: server.waits_for(job_of(store, job.id)) is not None, "the reason")
    time.sleep(LOOKS_S)
    assert is_kept(store, job)
    assert job_of(store, job.id).attempts == 0
    server.stop(end=True)


def test_a_program_that_is_installed_meanwhile_is_found_without_a_restart(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allotment, "_HELD_S", 0.2)
    good, program = wrote(), tmp_path / "evaluate"
    profile = good.model_copy(update={"command": (str(program), *good.command[1:])})
    store, server, pins = server_of(tmp_path / "work", {"command": profile}, "")
    job = submit(store, pins, replace(request(checkpoint), profile="command"))
    server.start()
    wait_until(lambda: job_of(store, job.id).attempts > 1, "another attempt")
    assert not job_of(store, job.id).status.is_final
    program.symlink_to(sys.executable)
    wait_for(store, job.id, Status.COMPLETED)
    server.stop(end=True)


@pytest.mark.parametrize("kind", [LmEvalProfile, LmmsEvalProfile])
@pytest.mark.parametrize("how", ["no module", "no Python"])
def test_an_evaluator_that_is_not_installed_any_more_is_waited_for(
    tmp_path: Path, checkpoint: Path, kind: type[LmEvalProfile | LmmsEvalProfile], how: str
) -> None:
    python = tmp_path / "python"
    if how == "no module":
        python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')  # no site-packages
        python.chmod(0o755)
    profile = kind(interpreter=str(python), gpus=0, retries=0)
    store, server, pins = server_of(tmp_path / "work", {"harness": profile}, "")
    job = submit(store, pins, replace(request(checkpoint), profile="harness"))
    server.start()
    wait_until(lambda: server.waits_for(job_of(store, job.id)) is not None, "the reason")
    time.sleep(LOOKS_S)
    assert is_kept(store, job)
    expected = "is not installed for" if how == "no module" else "cannot be started"
    assert expected in str(server.waits_for(job_of(store, job.id)))
    assert job_of(store, job.id).attempts == 1
    server.stop(end=True)
