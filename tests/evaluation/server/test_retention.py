"""What ended jobs leave goes after some days; results, and what is not ours, never."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from evaluation.running import job_of, request, scheduler, wait_for, whole_model
from evaluation.runs import checkpoint
from evaluation.servers import Live, cli, free_port
from unshard.evaluate.jobs import Filters, Job, Status
from unshard.evaluate.process import Process
from unshard.evaluate.server.queue import job_files
from unshard.evaluate.server.queue.job_files import Retention
from unshard.evaluate.server.store.store import Store
from unshard.evaluate.trainer.config import EvalConfig
from unshard.evaluate.trainer.spool import Spool
from unshard.evaluate.trainer.watcher import Watching
from unshard.write.dirfd import remove
from waiting import LIMIT_S
from waiting import wait_until as until

pytestmark = pytest.mark.slow

DAY = 24 * 3600.0
METRICS = {"task/acc": 0.1 + 0.2, "task/size": 3.0}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return tmp_path / "work"


@pytest.fixture
def store(work: Path) -> Store:
    return Store(work / "jobs.sqlite")


def grow_older(work: Path, days: float = 31.0) -> None:
    """Let everything in a database have happened some days ago."""
    with closing(sqlite3.connect(work / "jobs.sqlite")) as connection, connection:
        connection.execute(
            "UPDATE jobs SET created_at = created_at - :t, queued_at = queued_at - :t,"
            " completed_at = completed_at - :t",
            {"t": days * DAY},
        )


def ended(store: Store, work: Path, step: int, status: Status) -> Job:
    """Make a job that ended like this, with the directory of its attempt."""
    job, _ = store.submit(request(Path("ckpt"), step), pin=None)
    assert store.claim(time.time(), job.id) is not None
    directory = work / "jobs" / job.id / "1"
    directory.mkdir(parents=True)
    (directory / "log.txt").write_text("log")
    match status:
        case Status.COMPLETED:
            store.complete(job.id, METRICS, directory / "results.json")
        case Status.FAILED:
            store.fail(job.id, "why", None)
        case Status.EXPIRED:
            store.expire(job.id, "why")
        case Status.CANCELLED:
            store.cancel(job.id)
            store.release(job.id)
        case _:
            store.supersede(job.id, "other")
            store.release(job.id)
    return job_of(store, job.id)


def sweep(store: Store, work: Path, keep_days: float | None = 30) -> int:
    return Retention(store, work, keep_days).sweep(lambda: False)


def left(work: Path) -> set[str]:
    return {path.name for path in (work / "jobs").iterdir()}


def test_results_stay_with_the_job_that_they_belong_to(store: Store, work: Path) -> None:
    job = ended(store, work, 5, Status.COMPLETED)
    grow_older(work)
    before, results = job_of(store, job.id), list(store.results(Filters()))
    assert [result.value for result in results] == list(METRICS.values())
    assert sweep(store, work) == 1
    assert left(work) == set()
    assert list(store.results(Filters())) == results
    after = job_of(store, job.id)
    assert (after.metrics, after.status, after.request) == (
        METRICS,
        Status.COMPLETED,
        before.request,
    )
    assert (after.results, after.attempts, after.completed_at) == (None, 1, before.completed_at)
    again, is_new = store.submit(request(Path("ckpt"), 5), pin=None)
    assert (again, is_new) == (after, False)
    assert sweep(store, work) == 0


def test_of_jobs_without_a_result_only_the_directories_are_removed(
    store: Store, work: Path
) -> None:
    """Else a client that asks whether it submitted one before would submit it again."""
    unsuccessful = [status for status in Status if status.is_final][1:]
    assert len(unsuccessful) == 4
    old = [ended(store, work, step, status) for step, status in enumerate(unsuccessful)]
    grow_older(work, 20)
    young = [ended(store, work, step + 10, status) for step, status in enumerate(unsuccessful)]
    grow_older(work, 11)
    before = store.jobs(Filters())
    assert sweep(store, work, keep_days=None) == 0
    assert sweep(store, work) == len(old)
    assert left(work) == {job.id for job in young}
    assert store.jobs(Filters()) == before
    assert sweep(store, work) == 0


def test_a_job_that_is_submitted_again_never_has_the_directory_that_is_being_removed(
    store: Store, work: Path
) -> None:
    job = ended(store, work, 5, Status.FAILED)
    grow_older(work)
    store.leftovers.forget([job.id], time.time())  # marked: its directory is about to be removed
    again, is_new = store.submit(job.request, pin=None)
    assert (again.status, is_new, again.id != job.id) == (Status.QUEUED, False, True)
    assert store.claim(time.time()) is not None
    (work / "jobs" / again.id / "2").mkdir(parents=True)
    assert sweep(store, work) == 1
    assert left(work) == {again.id}
    store.fail(again.id, "why", None)
    same, _ = store.submit(job.request, pin=None)
    assert same.id == again.id


def test_what_has_not_ended_stays_however_old_it_is(store: Store, work: Path) -> None:
    queued, _ = store.submit(request(Path("ckpt"), 1), pin=None)
    running, _ = store.submit(request(Path("ckpt"), 2), pin=None)
    stopping, _ = store.submit(request(Path("ckpt"), 3), pin=None)
    for job in (running, stopping):
        assert store.claim(time.time(), job.id) is not None
        store.record_process(job.id, Process(1, 1, "boot", (), "x"))
        (work / "jobs" / job.id / "1").mkdir(parents=True)
    store.cancel(stopping.id)  # its processes still run
    grow_older(work)
    assert sweep(store, work) == 0
    assert left(work) == {running.id, stopping.id}
    assert [job.id for job in store.running()] == [running.id, stopping.id]
    assert job_of(store, queued.id).status is Status.QUEUED


def test_a_job_that_begins_anew_meanwhile_stays(store: Store, work: Path) -> None:
    job = ended(store, work, 5, Status.FAILED)
    grow_older(work)
    before = time.time() - DAY
    old = store.leftovers.list_ended(before)
    store.submit(job.request, pin=None)
    store.leftovers.forget(old, before)
    assert (old, store.leftovers.list_forgotten()) == ([job.id], [])
    assert job_of(store, job.id).status is Status.QUEUED


def test_only_directories_of_known_jobs_are_removed_and_no_link_is_followed(
    store: Store, work: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = [ended(store, work, step, Status.FAILED) for step in range(3)]
    grow_older(work)
    elsewhere = tmp_path / "elsewhere"
    (work / "jobs" / jobs[0].id).rename(elsewhere)
    (work / "jobs" / jobs[0].id).symlink_to(elsewhere)
    (work / "jobs" / jobs[1].id / "1" / "link").symlink_to(elsewhere)
    (work / "jobs" / "0123456789abcdef").mkdir()
    sweep(store, work)
    assert left(work) == {"0123456789abcdef", jobs[0].id}
    assert (elsewhere / "1" / "log.txt").read_text() == "log"
    assert f"{jobs[0].id}: not a directory; left alone" in caplog.text
    assert store.leftovers.list_forgotten() == []


def test_what_a_killed_server_left_marked_is_removed_by_the_next(store: Store, work: Path) -> None:
    job = ended(store, work, 5, Status.FAILED)
    grow_older(work)
    store.leftovers.forget([job.id], time.time())
    store.close()
    again = Store(work / "jobs.sqlite")
    assert (again.leftovers.list_forgotten(), left(work)) == ([job.id], {job.id})
    assert Retention(again, work, 30).sweep(lambda: True) == 0
    assert sweep(again, work) == 1
    assert (again.leftovers.list_forgotten(), left(work)) == ([], set())


def test_what_cannot_be_removed_is_tried_again_and_holds_up_nothing(
    store: Store, work: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = [ended(store, work, step, Status.FAILED) for step in range(2)]
    grow_older(work)

    def fails(name: str, *, within: int) -> None:
        if name == jobs[0].id:
            raise PermissionError(13, "not permitted", name)
        remove(name, within=within)

    with monkeypatch.context() as patch:
        patch.setattr(job_files, "remove", fails)
        assert sweep(store, work) == 1
    assert jobs[0].id in caplog.text
    assert left(work) == {jobs[0].id}
    assert sweep(store, work) == 1
    assert left(work) == set()


def test_a_database_of_an_earlier_version_gets_what_it_lacks(store: Store, work: Path) -> None:
    job = ended(store, work, 5, Status.FAILED)
    store.close()
    with closing(sqlite3.connect(work / "jobs.sqlite")) as connection, connection:
        connection.execute("PRAGMA user_version = 1")
        for what in ("VIEW run_calls", "TABLE run_names", "TABLE runs", "TABLE forgotten"):
            connection.execute(f"DROP {what}")
        for index in ("jobs_by_key", "jobs_in_turn"):
            connection.execute(f"DROP INDEX {index}")
        for column in ("again", "settings", "hidden", "was_hidden", "facts", "script", "record"):
            connection.execute(f"ALTER TABLE jobs DROP COLUMN {column}")
        connection.execute("ALTER TABLE results DROP COLUMN higher_is_better")
    grow_older(work)
    assert sweep(Store(work / "jobs.sqlite"), work) == 1
    assert not (work / "jobs" / job.id).exists()


def test_the_scheduler_does_it_at_its_start_and_then_once_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_files, "_EVERY_S", 0.05)
    store, server = scheduler(tmp_path, "done(acc=0.5)", keep_days=30)
    server.start()
    first, _ = store.submit(request(whole_model(tmp_path / "model")), pin=None)
    server.wake()
    wait_for(store, first.id, Status.COMPLETED)
    assert server.directory_of(first).parent.exists()
    grow_older(tmp_path)
    until(lambda: not server.directory_of(first).parent.exists(), "the end of its directory")
    server.stop(end=True)
    assert job_of(store, first.id).metrics == {"task/acc": 0.5}


def failed_jobs(server: Live) -> list[dict[str, object]]:
    found = server.v1("GET", "/jobs?status=failed")["jobs"]
    assert isinstance(found, list)
    return found


def watched_once(server: Live, run: Path) -> list[int]:
    """Watch a run as cron does; return the steps that were submitted."""
    given = {
        "server_url": server.url,
        "profile": "script",
        "tasks": ["fails"],
        "poll_interval": 0.05,
    }
    with Watching(run, EvalConfig.from_dict(given)) as watching:
        assert watching.look() == []
        steps = [step for step, _ in watching.look()]
        assert watching.wait_until_sent(LIMIT_S)
    return steps


def test_a_server_answers_for_old_jobs(tmp_path: Path) -> None:
    server = Live(tmp_path)
    server.configure(port=free_port())  # the same after its restart
    server.start()
    run = server.root / "run"
    place = checkpoint(run, 5)
    done = server.ended(server.submit(place))
    assert watched_once(server, run) == [5]
    until(lambda: failed_jobs(server), "a failed job")
    (failed,) = failed_jobs(server)
    while Spool(run).pending():  # the watch's own files know the job
        assert watched_once(server, run) == []
    server.stop()
    grow_older(server.work)
    server.start()
    try:
        until(lambda: list((server.work / "jobs").iterdir()) == [], "an empty directory")
        assert server.job(done)["metrics"] == done["metrics"]
        found = server.v1("GET", "/results")["results"]
        assert isinstance(found, list)
        assert {one["job_id"] for one in found} == {done["id"]}
        body = {"checkpoint": str(place), "profile": "script", "tasks": ["score"]}
        again = server.call("POST", "/api/v1/jobs", json=body)
        assert (again.status_code, again.json()["metrics"]) == (200, done["metrics"])
        theirs = server.call("GET", f"/jobs/{done['id']}").json()["result"]
        assert (theirs["metrics"], theirs["checkpoint-5"]["results"]) == (done["metrics"], None)
        logs = cli(server.url, "logs", str(done["id"]))
        assert (logs.returncode, logs.stdout) == (2, "")
        assert "its log has been removed; the server keeps logs for 30 days" in logs.stderr
        assert watched_once(server, run) == []
        old = server.job(failed)
        assert (old["status"], old["metrics"]) == ("failed", {})
        assert "nothing was measured" in cli(server.url, "status", str(failed["id"])).stdout
        logs = cli(server.url, "logs", str(failed["id"]))
        assert "its log has been removed; the server keeps logs for 30 days" in logs.stderr
        assert server.submit(place, "fails")["id"] != failed["id"]
    finally:
        server.stop()


def test_the_oldest_directories_go_first_and_those_of_failed_jobs_last(
    store: Store, work: Path
) -> None:
    statuses = (Status.FAILED, Status.COMPLETED, Status.CANCELLED, Status.COMPLETED)
    jobs = [ended(store, work, step, status) for step, status in enumerate(statuses, 1)]
    for job in jobs:
        (work / "jobs" / job.id / "samples").write_bytes(bytes(100_000))
    running, _ = store.submit(request(Path("ckpt"), 9), pin=None)
    assert store.claim(time.time(), running.id) is not None
    (work / "jobs" / running.id).mkdir()
    (work / "jobs" / running.id / "samples").write_bytes(bytes(1_000_000))
    before = list(store.results(Filters()))
    assert before

    def sweep_to(size: int) -> set[str]:
        Retention(store, work, None, size / 1e9).sweep(lambda: False)
        return left(work) - {running.id}

    assert sweep_to(1_000_000) == {job.id for job in jobs}
    assert sweep_to(350_000) == {jobs[0].id, jobs[2].id, jobs[3].id}
    assert sweep_to(150_000) == {jobs[0].id}
    assert sweep_to(0) == set()
    assert (work / "jobs" / running.id).exists()
    assert list(store.results(Filters())) == before
    assert [job.id for job in store.running()] == [running.id]
