"""Databases of earlier versions: `tests/data/eval_databases` has them as SQL.

Servers of those versions wrote them, and were killed with a job running and others queued.
"""

import os
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from evaluation.servers import SCORE, Live, started
from unshard.errors import UsageError
from unshard.evaluate.jobs import Filters, Status
from unshard.evaluate.pins.pin import Quota, pin_checkpoint
from unshard.evaluate.server.queue.work_lock import locked
from unshard.evaluate.server.serve import make_service
from unshard.evaluate.server.server_yaml import ServerConfig
from unshard.evaluate.server.store import schema
from unshard.evaluate.server.store.schema import LATEST, migrate
from unshard.evaluate.server.store.store import Store
from waiting import wait_until

DUMPS = Path(__file__).parents[2] / "data" / "eval_databases"
NAMES = sorted(path.stem for path in DUMPS.glob("*.sql"))
KEPT = ("jobs", "attempts", "results", "events")
PLACED = frozenset({"run", "key", "alike", "request"})  # what names the run, as of version 5

Rows = list[dict[str, object]]


def restore(name: str, directory: Path) -> Path:
    """Make the database of a dump below a directory; return its path."""
    path = directory / "work" / "jobs.sqlite"
    path.parent.mkdir()
    text = (DUMPS / f"{name}.sql").read_text()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(text.replace("{DIRECTORY}", str(directory)))
    return path


def rows_of(path: Path, table: str) -> Rows:
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute(f"SELECT * FROM {table} ORDER BY rowid")]  # noqa: S608


def version_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])


def columns_of(path: Path) -> set[tuple[str, str]]:
    """Return the columns of all tables, and the indexes."""
    with closing(sqlite3.connect(path)) as connection:
        columns = connection.execute(
            "SELECT tables.name, columns.name FROM sqlite_master AS tables"
            " JOIN pragma_table_info(tables.name) AS columns WHERE tables.type = 'table'"
        ).fetchall()
        indexes = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'index'")
        return {*columns, *indexes}


@pytest.fixture(params=NAMES)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return restore(request.param, tmp_path)


def test_everything_in_a_database_of_an_earlier_version_is_kept(old: Path, tmp_path: Path) -> None:
    before = {table: rows_of(old, table) for table in KEPT}
    assert before["results"]
    Store(old).close()
    assert version_of(old) == LATEST
    for table in KEPT:
        after = rows_of(old, table)
        for was, now in zip(before[table], after, strict=True):
            left = PLACED if table == "jobs" else frozenset[str]()
            assert {(key, one) for key, one in was.items() if key not in left} <= now.items()
    Store(tmp_path / "new.sqlite").close()
    missing = columns_of(tmp_path / "new.sqlite") - columns_of(old)
    assert missing == set()


def test_the_copy_of_before_is_the_database_of_before(old: Path) -> None:
    with closing(sqlite3.connect(old)) as connection:
        before = list(connection.iterdump())
    Store(old).close()
    (copy,) = set(old.parent.iterdir()) - {old}
    with closing(sqlite3.connect(copy)) as connection:
        assert list(connection.iterdump()) == before
    assert copy.name == f"jobs-v{version_of(copy)}.sqlite"
    Store(old).close()
    assert set(old.parent.iterdir()) == {copy, old}


@pytest.mark.parametrize("old", ["version_1", "version_1_first"], indirect=True)
def test_the_store_reads_what_was_written_then(old: Path) -> None:
    was_first = "stderr" not in rows_of(old, "results")[0]
    with closing(Store(old)) as store:
        jobs = {job.request.step: job for job in store.newest(Filters(status=Status.COMPLETED))}
        assert {step: job.metrics for step, job in jobs.items()} == {
            100: {"score/acc": 1.0, "score/size": 12.0},
            200: {"errors/acc": 2.0, "errors/size": 12.0},
        }
        stderr = None if was_first else 0.0125  # the first version did not keep it
        errors = {result.metric: result.stderr for result in store.results(Filters(step=200))}
        assert errors == {"acc": stderr, "size": None}
        for job in store.newest(Filters()):
            assert job in store.alike(job.request)
        (running,) = store.running()
        assert (running.request.step, running.status) == (400, Status.RUNNING)


def restore_checkpoints(path: Path) -> None:
    """Make the checkpoints and pins of the jobs of a database that have not ended."""
    with closing(Store(path)) as store:
        waiting = [job for job in store.newest(Filters()) if not job.status.is_final]
        owner = str(store.identity)
    for job in waiting:
        checkpoint = Path(job.request.checkpoint)
        checkpoint.mkdir(parents=True)
        save_file({"weight": np.zeros(3, np.float32)}, checkpoint / "model.safetensors")
        (checkpoint / "config.json").write_text("{}")
        for name, (size, time_ns) in job.request.stamps.items():
            assert (checkpoint / name).stat().st_size == size
            os.utime(checkpoint / name, ns=(time_ns, time_ns))
        assert job.pin is not None
        made = pin_checkpoint(checkpoint, quota=Quota(), owner=owner, step=job.request.step)
        made.directory.rename(Path(job.pin).parent)


@pytest.mark.parametrize("old", ["version_4"], indirect=True)
def test_runs_of_one_name_become_the_directories_that_they_were(old: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    with closing(Store(old)) as store:
        labels = {run.label: run.directory for run in store.runs.all()}
        assert labels == {
            "output": str(root / "a/output"),
            "other": str(root / "b/output"),  # the name that was submitted last
            "exp": str(root / "c/x"),
            "hand": "",
            "alone": str(root / "models/alone"),
        }
        steps = {
            label: sorted(str(job.request.step) for job in store.newest(Filters(run=label)))
            for label in labels
        }
        assert steps == {
            "output": ["0", "100", "200", "200", "300"],
            "other": ["100", "200", "300", "300"],
            "exp": ["5"],
            "hand": ["7"],
            "alone": ["None"],
        }
        found = list(store.results(Filters(run="output", step=200)))
        assert {one.value: one.arguments for one in found} == {0.2: {}, 0.7: {"limit": 20}}
        assert len({one.settings for one in found}) == 2
        for job in store.newest(Filters()):
            assert job in store.alike(job.request)
            assert store.status_of(job.request) is not None


@pytest.mark.slow
@pytest.mark.parametrize("old", ["version_1", "version_1_first"], indirect=True)
def test_a_server_runs_the_jobs_of_an_earlier_version(old: Path, tmp_path: Path) -> None:
    before = {job["id"]: job["status"] for job in rows_of(old, "jobs")}
    copy = tmp_path / "copy.sqlite"
    copy.write_bytes(old.read_bytes())
    restore_checkpoints(copy)  # with a copy, because the server is to bring the database up to date
    server = Live(tmp_path)
    server.configure(SCORE)
    with started(server):
        for job_id, status in before.items():
            if status == Status.RUNNING:  # its process is gone: it is tried again after a while
                wait_until(lambda: server.job({"id": job_id})["status"] == "queued")  # noqa: B023
            else:
                expected = "completed" if status == Status.QUEUED else str(status)
                server.ended({"id": job_id}, expected)
        with server.client() as client:
            found = {(one["step"], one["metric"]): one["value"] for one in client.results()}
        assert found[100, "acc"] == 1.0
        assert found[500, "acc"] == 0.5
    assert version_of(old) == LATEST


def test_a_database_of_a_later_version_is_refused_and_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE jobs (later TEXT)")
        connection.execute(f"PRAGMA user_version = {LATEST + 1}")
    before = path.read_bytes()
    with pytest.raises(UsageError, match=f"version {LATEST + 1}"):
        Store(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_connections_that_open_an_old_database_at_once_migrate_it_once(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied, version = list[int](), version_of(old)
    barrier = threading.Barrier(4)

    def counted(_connection: sqlite3.Connection) -> None:
        applied.append(1)

    def opens(_number: int) -> None:
        with closing(sqlite3.connect(old, timeout=30, isolation_level=None)) as connection:
            barrier.wait()
            migrate(connection, old)

    monkeypatch.setattr(schema, "_MIGRATIONS", (*schema._MIGRATIONS, counted))
    monkeypatch.setattr(schema, "LATEST", LATEST + 1)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(opens, range(4)))
    assert applied == [1]
    assert version_of(old) == LATEST + 1
    (copy,) = old.parent.glob("jobs-v*.sqlite")
    assert version_of(copy) == version


def test_a_migration_that_fails_leaves_everything_as_it_was(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, jobs, results = version_of(old), rows_of(old, "jobs"), rows_of(old, "results")

    def fails(connection: sqlite3.Connection) -> None:
        connection.execute("DELETE FROM results")
        connection.execute("ALTER TABLE jobs ADD COLUMN later TEXT")
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(schema, "_MIGRATIONS", (*schema._MIGRATIONS, fails))
        patch.setattr(schema, "LATEST", LATEST + 1)
        with pytest.raises(UsageError, match="cannot be opened") as error:
            Store(old)
    assert "disk is full" in error.value.found
    assert version_of(old) == version
    assert (rows_of(old, "jobs"), rows_of(old, "results")) == (jobs, results)
    assert results
    Store(old).close()


def test_without_room_for_the_copy_nothing_is_changed(old: Path) -> None:
    before = old.read_bytes()
    copy = old.with_name(f"jobs-v{version_of(old)}.sqlite")
    copy.mkdir()  # what is in the way of the copy
    with pytest.raises(UsageError, match="cannot be copied"):
        Store(old)
    assert old.read_bytes() == before
    assert set(old.parent.iterdir()) == {copy, old}


def test_the_database_of_a_server_that_runs_is_not_migrated(old: Path, tmp_path: Path) -> None:
    before = old.read_bytes()
    config = ServerConfig(roots=(tmp_path,), work_directory=old.parent)
    with locked(old.parent), pytest.raises(UsageError, match="another server is using it"):
        make_service(config)
    assert old.read_bytes() == before
    service = make_service(config)
    service.store.close()
    assert version_of(old) == LATEST


def test_the_dumps_have_jobs_in_every_state() -> None:
    text = (DUMPS / "version_1.sql").read_text()
    missing = [status for status in Status if f"'{status}'" not in text]
    assert missing == []
    assert 'INSERT INTO "forgotten"' in text
    assert ",0.0125)" in text
