"""The trainer of lmms-engine 0.1.4, whose last step is saved twice into the same files.

Three trainings: the server is away for good; it is away until the training is over; it is there
from the first save on. Each has `max_steps` at a multiple of `save_steps`.
"""

import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from math import isclose
from pathlib import Path

import mlflow
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trackio import sqlite_storage, utils

from evaluation.lmms_training import Order, begins, truth_of
from evaluation.running import child_environment
from evaluation.servers import Live, free_port, started
from evaluation.wandb_file import history
from unshard.evaluate.client.v1 import EvalClient
from unshard.evaluate.pins.pin import list_pins
from unshard.evaluate.sinks.export import Destination, Tracker, export_all
from unshard.evaluate.trainer.config import EvalConfig
from unshard.evaluate.trainer.spool import Spool
from unshard.evaluate.trainer.submitter import Submitter
from waiting import LIMIT_S
from waiting import wait_until as until

pytest.importorskip("lmms_engine", reason="pip install --no-deps lmms_engine")
pytestmark = pytest.mark.xdist_group("lmms-trainer")  # one training for all

STEPS, LAST = (2, 4), 4
NAME = "unshard_eval/values/rms"
LOGGED = "eval/values_rms"  # as lmms-engine calls it


@dataclass(frozen=True)
class Trained:
    """What the trainings left."""

    root: Path
    url: str

    def run(self, name: str) -> Path:
        return self.root / "runs" / name

    def truth(self, name: str) -> float:
        return float(json.loads(truth_of(self.run(name)).read_text()))

    def log(self, name: str, rank: int = 0) -> str:
        """Return what the training of this name printed; "": all of them."""
        text = (self.root / f"training-{rank}.log").read_text()
        return text.partition(begins(name))[2].partition(begins(""))[0] if name else text

    def jobs(self, name: str) -> list[dict[str, object]]:
        with EvalClient(self.url, timeout=LIMIT_S) as client:
            return client.jobs(run=name)

    def is_last(self, name: str, value: float) -> bool:
        return isclose(value, self.truth(name), rel_tol=1e-6)


def _order(trained: Trained, name: str, flush_timeout: float, report_to: str = "none") -> Path:
    evaluation: dict[str, object] = {
        "server_url": trained.url,
        "poll_interval": 0.1,
        "model": "command",
        "tasks": ["values"],
        "flush_timeout": flush_timeout,
    }
    file = trained.root / f"{name}.json"
    file.write_text(Order(str(trained.run(name)), evaluation, report_to, LAST).as_json())
    return file


def _train(
    trained: Trained, *orders: Path, rank: int = 0, world: int = 1
) -> "subprocess.Popen[bytes]":
    trackers = {"WANDB_MODE": "offline", "WANDB_DIR": str(trained.root), "WANDB_SILENT": "true"}
    place = {"RANK": str(rank), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    # transformers wants an address, which nobody connects to: the processes meet by a file.
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"} if world > 1 else {}
    with (trained.root / f"training-{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "evaluation.lmms_training", *map(str, orders)],
            env=child_environment() | trackers | place,
            cwd=trained.root,
            stdout=log,
            stderr=log,
        )


def test_two_ranks_train_to_their_end(tmp_path: Path) -> None:
    """Only rank 0 has a backend; no server is needed."""
    place = Trained(tmp_path, f"http://127.0.0.1:{free_port()}")
    place.run("").mkdir()
    order = _order(place, "two", 0.1)
    ranks = [_train(place, order, rank=rank, world=2) for rank in range(2)]
    try:
        codes = [one.wait(LIMIT_S) for one in ranks]
    finally:
        for one in ranks:
            one.kill()
    assert codes == [0, 0], place.log("") + place.log("", rank=1)
    assert (place.run("two") / f"checkpoint-{LAST}").is_dir()
    assert [entry.step for entry in Spool(place.run("two")).waiting()] == list(STEPS)


def _serve(trained: Trained) -> AbstractContextManager[Live]:
    options = [f"--root={trained.root / 'runs'}", "--gpus=0", "--work-dir=work"]
    return started(Live(trained.root), *options, f"--port={trained.url.rpartition(':')[2]}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """Train, with a server that comes when the second training is over and waits."""
    place = Trained(tmp_path_factory.mktemp("lmms"), f"http://127.0.0.1:{free_port()}")
    place.run("").mkdir()
    with ExitStack() as stack:

        def kept(process: "subprocess.Popen[bytes]") -> "subprocess.Popen[bytes]":
            stack.callback(process.wait, LIMIT_S)
            stack.callback(process.terminate)
            return process

        orders = [_order(place, "late", 0.5), _order(place, "away", LIMIT_S)]
        orders.append(_order(place, "there", LIMIT_S, "wandb"))
        training = kept(_train(place, *orders))
        waits = "Waiting for pending evaluation jobs"
        until(lambda: waits in place.log("away") or training.poll() is not None, waits)
        stack.enter_context(_serve(place))
        assert training.wait(LIMIT_S) == 0, place.log("")
        yield place


def results(trained: Trained, name: str) -> list[tuple[int, float]]:
    lines = (trained.run(name) / "_unshard" / "results.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [(one["step"], one["metrics"][NAME]) for one in found]


def nothing_is_left(run: Path) -> bool:
    return not list_pins(run) and not list((run / "_unshard" / "spool").rglob("*.json"))


def test_a_server_that_comes_at_the_end_makes_one_job_of_each_step(trained: Trained) -> None:
    jobs = trained.jobs("away")
    assert sorted((job["step"], job["status"]) for job in jobs) == [
        (step, "completed") for step in STEPS
    ]
    logged = dict(re.findall(rf"'{LOGGED}': ([\d.e-]+).*step=(\d+)", trained.log("away")))
    assert trained.is_last("away", next(float(v) for v, s in logged.items() if int(s) == LAST))
    found = dict(results(trained, "away"))
    assert sorted(found) == list(STEPS)
    assert trained.is_last("away", found[LAST])
    assert not trained.is_last("away", found[STEPS[0]])
    assert nothing_is_left(trained.run("away"))
    assert "no result" not in trained.log("away")


def test_with_a_server_that_is_there_no_job_fails_and_the_last_result_is_in_wandb(
    trained: Trained,
) -> None:
    jobs = trained.jobs("there")
    assert {job["status"] for job in jobs} <= {"completed", "superseded"}
    done = {int(str(job["step"])) for job in jobs if job["status"] == "completed"}
    # Of the two saves of the last step the older may have been evaluated before the newer came.
    assert sorted(done) == list(STEPS)
    found = dict(results(trained, "there"))
    assert trained.is_last("there", found[LAST])
    (file,) = trained.root.glob("wandb/offline-run-*/run-*.wandb")
    rows = [row for row in history(file) if NAME in row]
    # Two jobs run at a time, so the steps may come in any order.
    values = {int(row["unshard_eval/step"]): float(row[NAME]) for row in rows}
    assert sorted(values) == list(STEPS)
    assert trained.is_last("there", values[LAST])
    assert nothing_is_left(trained.run("there"))
    assert "no result" not in trained.log("there")


def test_the_last_result_reaches_every_tracker_that_results_are_exported_to(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    for module in (sqlite_storage, utils):  # another test may have imported trackio before
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    with EvalClient(trained.url, timeout=LIMIT_S) as client:
        rows = client.results(run="there")
    for tracker in (Tracker.JSONL, Tracker.TENSORBOARD, Tracker.MLFLOW, Tracker.TRACKIO):
        export_all(rows, Destination(tracker, tmp_path, "project"))
    found: dict[str, list[tuple[int, float]]] = {}
    lines = (tmp_path / "there.jsonl").read_text().splitlines()
    found["jsonl"] = [(one["step"], one["metrics"][NAME]) for one in map(json.loads, lines)]
    events = EventAccumulator(str(tmp_path / "unshard_eval"))
    events.Reload()
    found["tensorboard"] = [(one.step, one.value) for one in events.Scalars(NAME)]
    client_of = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client_of.get_experiment_by_name("project")
    assert experiment is not None
    (run,) = client_of.search_runs([experiment.experiment_id])
    history_of = client_of.get_metric_history(run.info.run_id, NAME)
    found["mlflow"] = [(one.step, one.value) for one in history_of]
    (database,) = (tmp_path / "trackio").glob("project*.db")
    with closing(sqlite3.connect(database)) as connection:
        written = connection.execute("SELECT step, metrics FROM metrics").fetchall()
    found["trackio"] = [(step, json.loads(text)[NAME]) for step, text in written]
    for name, points in found.items():
        assert sorted(dict(points)) == list(STEPS), name
        assert trained.is_last("there", dict(points)[LAST]), name


def test_what_a_server_missed_for_longer_than_the_training_waits_comes_later(
    trained: Trained,
) -> None:
    """The next process on the run sends it, and has the results."""
    run = trained.run("late")
    steps = ", ".join(map(str, STEPS))
    assert f"no result yet: steps {steps}; the next trainer on {run}" in trained.log("late")
    assert [entry.step for entry in Spool(run).waiting()] == list(STEPS)
    given = {"server_url": trained.url, "profile": "command", "tasks": ["values"]}
    submitter = Submitter(EvalConfig.from_dict({**given, "poll_interval": 0.1}), run)
    assert submitter.close(LIMIT_S)
    found = dict(submitter.completed())
    assert sorted(found) == list(STEPS)
    assert trained.is_last("late", found[LAST][NAME])
    assert {job["status"] for job in trained.jobs("late")} == {"completed"}
    assert nothing_is_left(run)
