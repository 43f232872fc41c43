"""The server's pins, with a real database and no server."""

import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from evaluation.running import job_of, script_profile, whole_model
from evaluation.runs import save_again
from unshard.errors import UsageError
from unshard.evaluate.jobs import Job, Request
from unshard.evaluate.pins.pin import Quota, list_pins, pin_checkpoint, unpin
from unshard.evaluate.server import service as service_module
from unshard.evaluate.server.pinning import Pins
from unshard.evaluate.server.roots import check_links
from unshard.evaluate.server.serve import make_service
from unshard.evaluate.server.server_yaml import ServerConfig
from unshard.evaluate.server.service import Service
from unshard.evaluate.server.store.store import Store

ANY = Quota()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in range(4):
        whole_model(tmp_path / "root" / "run" / f"checkpoint-{step}")
    return tmp_path / "root" / "run"


def service_in(run: Path, quota: Quota = ANY, name: str = "work") -> Service:
    config = ServerConfig(
        roots=(run.parent,),
        work_directory=run.parents[1] / name,
        pin_quota=quota,
        profiles={"script": script_profile(gpus=0)},
    )
    return make_service(config)


@pytest.fixture
def service(run: Path) -> Service:
    return service_in(run)


def submit(service: Service, run: Path, step: int, pin: str | None = None) -> Job:
    asked = Request(str(run / f"checkpoint-{step}"), "script", ("task",), step, "run")
    return service.submit(asked, pin)[0]


def steps(run: Path) -> list[int | None]:
    return [pin.step for pin in list_pins(run)]


def test_pins_that_no_job_needs_are_removed(run: Path, service: Service) -> None:
    pins = service.pins
    needed = submit(service, run, 0)
    pins.ensure_pin(run / "checkpoint-1", 1, run)  # and killed before it was submitted
    pin_checkpoint(run / "checkpoint-2", quota=Quota())  # a client's
    others = Pins(Store(run.parent / "other"), pins.roots, pins.quota)
    others.ensure_pin(run / "checkpoint-3", 3, run)
    pins.remove_unneeded()
    assert steps(run) == [0, 2, 3]
    assert needed.pin is not None
    service.store.cancel(needed.id)
    pins.remove_unneeded(needed.pin)
    assert steps(run) == [2, 3]


def test_a_pin_that_cannot_be_removed_harms_no_other(
    run: Path, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_names: str, **_folders: int) -> None:
        raise PermissionError

    service.pins.ensure_pin(run / "checkpoint-1", 1, run)
    monkeypatch.setattr(os, "rename", refused)
    service.pins.remove_unneeded()
    assert steps(run) == [1]


def test_a_pin_that_is_not_ours_is_named_and_never_removed(
    run: Path, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    made = service.pins.ensure_pin(run / "checkpoint-1", 1, run)
    assert made is not None
    whole = Path(made).parent
    copied, broken = (whole.with_name(name) for name in ("copied", "broken"))
    shutil.copytree(whole, copied)
    broken.mkdir()
    (broken / "pin.json").write_text("[" * 100_000)
    service.pins.remove_unneeded()
    assert {path.name for path in whole.parent.iterdir()} == {"copied", "broken"}
    assert str(broken) in caplog.text


def test_what_a_killed_server_left_of_pins_is_removed_at_the_start(
    run: Path, service: Service
) -> None:
    owner = str(service.store.identity)
    for name in ("0123", "4567-89ab"):  # being made, being removed
        pin = pin_checkpoint(run / "checkpoint-1", quota=Quota(None, None), owner=owner)
        pin.directory.rename(pin.directory.with_name(f"{name}.partial"))
    service.pins.remove_unneeded()
    assert list((run / "_unshard" / "pins").iterdir()) == []


@pytest.mark.parametrize("is_submitted", [False, True])
def test_what_a_killed_server_left_in_a_run_far_below_the_roots_is_removed_at_the_start(
    run: Path,
    service: Service,
    is_submitted: bool,  # noqa: FBT001
) -> None:
    deep = run.parent / "a" / "b" / "c" / "run"
    checkpoint = whole_model(deep / "checkpoint-1")
    if is_submitted:
        assert service.store.cancel(submit(service, deep, 1).id)  # and killed before it let go
    else:
        service.pins.ensure_pin(checkpoint, 1, deep)  # and killed before it was submitted
    service.store.close()
    after = service_in(run)
    assert [pin.checkpoint for pin in list_pins(deep)] == [checkpoint]
    after.pins.remove_unneeded()
    assert steps(deep) == []


def test_a_job_submitted_again_while_its_attempt_ends_leaves_no_pin(
    run: Path, service: Service
) -> None:
    submit(service, run, 0)
    job = service.store.claim(time.time())
    assert job is not None
    assert service.store.cancel(job.id)
    again = submit(service, run, 0)
    service.store.release(job.id)
    assert service.store.cancel(again.id)
    service.pins.remove_unneeded(again.pin)
    assert steps(run) == []


def test_the_quota_spares_pins_of_running_jobs(run: Path) -> None:
    service = service_in(run, Quota(2, None))
    submit(service, run, 0)
    assert service.store.claim(time.time()) is not None
    for step in (1, 2):
        submit(service, run, step)
    assert steps(run) == [0, 2]


def test_a_job_that_fails_while_it_is_submitted_again_gets_a_pin(
    run: Path, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit(service, run, 0)
    service.store.claim(time.time())
    real = service.store.submit

    def after_the_end(request: Request, *, pin: str | None) -> tuple[Job, bool]:
        service.store.fail(job.id, "just now", None)
        return real(request, pin=pin)

    monkeypatch.setattr(service.store, "submit", after_the_end)
    again = submit(service, run, 0)
    assert again.pin is not None
    assert Path(again.pin).exists()


def test_a_pin_that_its_client_replaces_is_taken(run: Path, service: Service) -> None:
    first, second = (pin_checkpoint(run / "checkpoint-0", quota=Quota()) for _ in "12")
    job = submit(service, run, 0, str(first.path))
    unpin(first)
    assert submit(service, run, 0, str(second.path)).pin == str(second.path)
    shutil.rmtree(run / "checkpoint-0")
    assert submit(service, run, 0, str(second.path)).id == job.id
    assert job_of(service.store, job.id).pin == str(second.path)


def status(service: Service, job: Job) -> str:
    return job_of(service.store, job.id).status


def test_a_step_that_is_saved_again_supersedes_what_waits(run: Path, service: Service) -> None:
    first = pin_checkpoint(run / "checkpoint-0", quota=Quota())
    older = submit(service, run, 0, str(first.path))
    save_again(run / "checkpoint-0")
    second = pin_checkpoint(run / "checkpoint-0", quota=Quota())
    newer = submit(service, run, 0, str(second.path))
    assert newer.id != older.id
    assert (status(service, older), status(service, newer)) == ("superseded", "queued")
    assert newer.id in str(job_of(service.store, older.id).error)


@pytest.mark.parametrize("is_running", [False, True])
def test_two_submissions_after_a_step_was_saved_again_are_one_job_with_the_newer_pin(
    run: Path,
    service: Service,
    is_running: bool,  # noqa: FBT001
) -> None:
    first = pin_checkpoint(run / "checkpoint-0", quota=Quota())
    save_again(run / "checkpoint-0")
    second = pin_checkpoint(run / "checkpoint-0", quota=Quota())
    older = submit(service, run, 0, str(first.path))
    if is_running:
        assert service.store.claim(time.time()) is not None
    newer = submit(service, run, 0, str(second.path))
    assert (newer.id, newer.pin) == (older.id, str(second.path))
    now = job_of(service.store, older.id)
    assert (now.pin, service.pins.list_changed(now)) == (str(second.path), [])


def test_a_failure_of_a_step_that_is_saved_again_is_superseded(run: Path, service: Service) -> None:
    older = submit(service, run, 0)
    service.store.claim(time.time())
    save_again(run / "checkpoint-0")
    service.store.fail(older.id, "rewritten", None)
    service.pins.remove_unneeded(older.pin)
    submit(service, run, 0)
    assert status(service, older) == "superseded"


def test_what_was_not_rewritten_is_not_superseded(run: Path, service: Service) -> None:
    """Two runs of one name; and a training begun anew, whose older step is kept by its pin."""
    older = submit(service, run, 0)
    other = whole_model(run.parent / "other" / "run" / "checkpoint-0")
    os.utime(other / "model.safetensors", (1, 1))
    service.submit(Request(str(other), "script", ("task",), 0, "run"), None)
    shutil.rmtree(run / "checkpoint-0")
    whole_model(run / "checkpoint-0")
    assert submit(service, run, 0).id != older.id
    assert status(service, older) == "queued"


def test_a_checkpoint_that_is_gone_does_not_get_the_result_of_another_run_of_that_name(
    run: Path, service: Service
) -> None:
    job = submit(service, run, 0)
    service.store.claim(time.time())
    service.store.complete(job.id, {"task/acc": 1.0}, None)
    other = run.parent / "other" / "run"
    other.mkdir(parents=True)
    assert submit(service, other, 0).id != job.id
    shutil.rmtree(run / "checkpoint-0")
    assert submit(service, run, 0).id == job.id


def test_the_pin_of_a_client_keeps_nothing_for_other_jobs(run: Path, service: Service) -> None:
    pin = pin_checkpoint(run / "checkpoint-0", quota=Quota())
    submit(service, run, 0, str(pin.path))
    other = Request(str(run / "checkpoint-0"), "script", ("other",), 0, "run")
    job = service.submit(other, None)[0]
    unpin(pin)  # the client's own job has ended
    assert job.pin is not None
    assert Path(job.pin).exists()
    assert service.submit(replace(other, tasks=("third",)), None)[0].pin == job.pin


def test_a_job_that_is_submitted_again_leaves_its_files_alone(run: Path, service: Service) -> None:
    """A pin that is made and removed changes their ctime, which a merge takes for a write."""
    pin = pin_checkpoint(run / "checkpoint-0", quota=Quota())
    job = submit(service, run, 0, str(pin.path))
    before = {one: one.stat().st_ctime_ns for one in (run / "checkpoint-0").iterdir()}
    assert submit(service, run, 0) == job
    assert {one: one.stat().st_ctime_ns for one in (run / "checkpoint-0").iterdir()} == before
    unpin(pin)
    again = submit(service, run, 0)
    assert again.id == job.id
    assert again.pin not in (None, str(pin.path))


def test_a_completed_job_gets_no_further_pin(run: Path, service: Service) -> None:
    job = submit(service, run, 0)
    service.store.claim(time.time())
    service.store.complete(job.id, {"task/acc": 1.0}, None)
    service.pins.remove_unneeded()
    assert submit(service, run, 0).id == job.id
    assert steps(run) == []


def test_a_checkpoint_is_checked_without_the_lock_and_instead_of_a_pin_that_went(
    run: Path, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = pin_checkpoint(run / "checkpoint-0", quota=Quota())
    config = run / "checkpoint-0" / "config.json"
    config.unlink()
    config.symlink_to(run.parents[1] / "config.json")  # outside the roots
    config.resolve().write_text("{}")
    free = list[bool]()

    def checked(checkpoint: Path, above: Path, roots: Sequence[Path]) -> None:
        with ThreadPoolExecutor(1) as other:
            free.append(other.submit(is_free, service.pins).result())
        check_links(checkpoint, above, roots)
        unpin(pin)

    monkeypatch.setattr(service_module, "check_links", checked)
    with pytest.raises(UsageError, match="leads out of the directories"):
        submit(service, run, 0, str(pin.path))
    assert free == [True, False]
    assert steps(run) == []


def is_free(pins: Pins) -> bool:
    if not pins.lock.acquire(blocking=False):
        return False
    pins.lock.release()
    return True
