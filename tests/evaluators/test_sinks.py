"""Results reach the real trackers under their own steps, whatever order they come in."""

import json
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import mlflow
import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from evaluation.wandb_file import definitions, history, run_record
from unshard.evaluate.sinks.base import STEP_METRIC, JsonlSink, Marks, Sink, name_metrics
from unshard.evaluate.sinks.mlflow import MlflowSink
from unshard.evaluate.sinks.open import open_sinks
from unshard.evaluate.sinks.tensorboard import TensorBoardSink
from unshard.evaluate.sinks.wandb import TrainerWandbSink, WandbSink
from unshard.evaluate.trainer import recorder as recorders
from unshard.evaluate.trainer.recorder import Recorder, Recording
from waiting import LIMIT_S
from waiting import wait_until as until

NAME = "unshard_eval/mmlu/acc"
OUT_OF_ORDER = ((30, 0.3), (10, 0.1), (20, 0.2))


def log_all(sink: Sink) -> None:
    for step, value in OUT_OF_ORDER:
        sink.log(step, {NAME: value}, f"job{step}")


def ignore(job_id: str) -> None:
    del job_id


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield tmp_path
    wandb.teardown()


def written(run: wandb.Run, place: Path) -> Path:
    """Finish a run and return its file; only when the service has ended all is in it."""
    run.finish()
    wandb.teardown()
    (file,) = place.glob(f"wandb/offline-run-*/run-{run.id}.wandb")
    return file


def test_names_carry_the_weights() -> None:
    assert name_metrics({"mmlu/acc": 1}, weights="model") == {NAME: 1.0}
    assert name_metrics({"t/a,f": 1}, weights="ema") == {"unshard_eval/ema/t/a,f": 1.0}


def test_marks_of_a_sink_with_a_long_name_are_remembered(tmp_path: Path) -> None:
    name = "tensorboard:/" + "/".join(["deep"] * 100)
    Marks(tmp_path, name).add("job1")
    assert "job1" in Marks(tmp_path, name)
    assert "job1" not in Marks(tmp_path, name + "er")


def test_jsonl_has_a_line_for_every_job_once(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "results.jsonl"
    log_all(JsonlSink(file))
    with file.open("ab") as stream:
        stream.write(b'{"job": "to')
    again = JsonlSink(file)
    log_all(again)
    again.log(None, {NAME: 1.0}, "other")
    lines = file.read_text().splitlines()
    assert lines.pop(3) == '{"job": "to'
    rows = [json.loads(line) for line in lines]
    assert [(row["job"], row["step"]) for row in rows] == [
        ("job30", 30),
        ("job10", 10),
        ("job20", 20),
        ("other", None),
    ]
    assert rows[0]["metrics"] == {NAME: 0.3}


def test_tensorboard_shows_every_step_next_to_what_the_trainer_writes(tmp_path: Path) -> None:
    trainer = EventFileWriter(str(tmp_path))
    trainer.close()
    for _ in range(2):  # a restarted trainer appends a second file
        sink = TensorBoardSink(tmp_path)
        log_all(sink)
        sink.close()
    events = EventAccumulator(str(tmp_path / "unshard_eval"), purge_orphaned_data=False)
    events.Reload()
    found = {(event.step, round(event.value, 3)) for event in events.Scalars(NAME)}
    assert found == set(OUT_OF_ORDER)
    assert len(list(tmp_path.glob("events.*"))) == 1


def test_mlflow_has_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.create_experiment("e", artifact_location=str(tmp_path))
    run_id = client.create_run(experiment).info.run_id
    sink = MlflowSink(run_id, uri)
    log_all(sink)
    sink.log(5, {"unshard_eval/t/match,strict": 0.5}, "job5")
    sink.close()
    found = [(metric.step, metric.value) for metric in client.get_metric_history(run_id, NAME)]
    assert sorted(found) == sorted(OUT_OF_ORDER)
    assert client.get_metric_history(run_id, "unshard_eval/t/match_strict")[0].step == 5


def test_mlflow_takes_any_name_and_any_number_of_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    client = mlflow.MlflowClient(tracking_uri=uri)
    run_id = client.create_run(client.create_experiment("e", str(tmp_path))).info.run_id
    odd = ["t/" + "long" * 100 + "a", "t/" + "long" * 100 + "b", "t/acc/", "t//acc", "t/../acc"]
    odd += ["t/acc,x", "t/acc_x", "t/acc=x", "/t/acc", "t/acc\udcff"]
    names = [f"unshard_eval/{name}" for name in odd] + [f"unshard_eval/{n}" for n in range(1000)]
    for step in (1, 2):
        MlflowSink(run_id, uri).log(step, {name: i for i, name in enumerate(names)}, "job")
    found = client.get_run(run_id).data.metrics
    assert sorted(found.values()) == list(range(len(names)))
    assert found["unshard_eval/t/acc_x"] == odd.index("t/acc_x")
    assert all(len(client.get_metric_history(run_id, name)) == 2 for name in list(found)[:5])


class Picky(JsonlSink):
    """Refuses one job, always."""

    def log(self, step: int | None, metrics: Mapping[str, float], job_id: str) -> None:
        if job_id == "refused":
            raise ValueError("a name that cannot be")
        super().log(step, metrics, job_id)


def test_a_result_that_a_tracker_always_refuses_is_set_aside_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorders, "_FIRST_WAIT", 0.01)
    first, picky = JsonlSink(tmp_path / "first"), Picky(tmp_path / "picky")
    recorded: list[str] = []
    recorder = Recorder([first, picky], [], marks=tmp_path / "m", on_recorded=recorded.append)
    recorder.add(Recording("refused", 0, {NAME: 1.0}))
    until(lambda: "step 0 not written" in caplog.text)
    for number in range(1, 5):
        recorder.add(Recording(f"job{number}", number, {NAME: 1.0}))
        until(lambda: f"job{number}" in recorded)  # noqa: B023
    until(lambda: "set aside: a name that cannot be" in caplog.text)
    tries = caplog.text.count("step 0 not written")
    recorder.add(Recording("last", 5, {NAME: 1.0}))
    recorder.close(LIMIT_S)
    assert recorded == ["job1", "job2", "job3", "job4", "last"]
    assert caplog.text.count("step 0 not written") == tries
    said = [one.message for one in caplog.records if "was not written" in one.message]
    assert said == ["jsonl-picky: step 0 was not written: a name that cannot be"]


@pytest.mark.parametrize("is_own", [False, True])
def test_trackio_has_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_own: bool
) -> None:
    trackio = pytest.importorskip("trackio")
    from trackio import sqlite_storage, utils

    from unshard.evaluate.sinks.trackio import TrackioSink

    for module in (utils, sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path)
    project = f"project-{int(is_own)}"
    if is_own:
        sink = TrackioSink.open(project, "training")
        log_all(sink)
        sink.close()
    else:
        run = trackio.init(project, name="training", auto_log_gpu=False, embed=False)
        run.log({"loss": 1.0}, step=40)
        sink = TrackioSink(run)
        log_all(sink)
        sink.close()
        trackio.finish()
    (database,) = tmp_path.glob(f"{project}*.db")
    rows = sqlite3.connect(database).execute("SELECT run_name, step, metrics FROM metrics")
    found = {(name, step, json.loads(text).get(NAME)) for name, step, text in rows}
    name = "training-eval" if is_own else "training"
    assert {(name, step, value) for step, value in OUT_OF_ORDER} <= found


def test_trackio_goes_on_counting_the_steps_of_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer names no steps, and finishes the run before the last result comes."""
    trackio = pytest.importorskip("trackio")
    from trackio import sqlite_storage, utils

    from unshard.evaluate.sinks.trackio import TrackioSink

    for module in (utils, sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path)
    run = trackio.init("counting", name="training", auto_log_gpu=False, embed=False)
    sink = TrackioSink(run)
    for number in range(3):
        run.log({"loss": 1.0})
        sink.log(500 + number, {NAME: number / 10}, f"job{number}")
    trackio.finish()
    sink.log(503, {NAME: 0.3}, "job3")
    sink.close()
    (database,) = tmp_path.glob("counting*.db")
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("SELECT step, metrics FROM metrics").fetchall()
    found = {(step, *json.loads(text)) for step, text in rows}
    losses = {(step, "loss") for step in range(3)}
    assert found == losses | {(step, NAME) for step in range(500, 504)}


def test_wandb_rows_of_the_trainer_carry_one_result_each(offline: Path) -> None:
    run = wandb.init(project="p", dir=str(offline))
    run.define_metric("*", step_metric="train/global_step")
    recorder = Recorder([], [TrainerWandbSink(run)], marks=offline / "marks", on_recorded=ignore)
    for step, value in OUT_OF_ORDER:
        recorder.add(Recording(f"job{step}", step, {NAME: value}))
    for step in (40, 41):
        run.log({"loss": 1.0, "train/global_step": step}, step=step)
        recorder.tick()
    recorder.close(LIMIT_S)
    run.log({"loss": 1.0, "train/global_step": 42})
    file = written(run, offline)
    rows = history(file)
    found = [(row[STEP_METRIC], row[NAME]) for row in rows if NAME in row]
    assert found == [(str(step), str(value)) for step, value in OUT_OF_ORDER]
    assert [row["train/global_step"] for row in rows if "loss" in row] == ["40", "41", "42"]
    assert definitions(file)[NAME] == STEP_METRIC


def test_wandb_loses_no_row_of_a_trainer_that_counts_steps_itself(offline: Path) -> None:
    """Ten results at once, while the trainer logs with `step=`: W&B drops what goes back."""
    run = wandb.init(project="p", dir=str(offline))
    recorder = Recorder([], [TrainerWandbSink(run)], marks=offline / "marks", on_recorded=ignore)
    for step in range(10):
        recorder.add(Recording(f"job{step}", step, {NAME: step / 10}))
    for step in range(100, 106):
        run.log({"loss": 1.0, "train/global_step": step}, step=step)
        recorder.tick()
        recorder.tick()
    recorder.close(LIMIT_S)
    rows = history(written(run, offline))
    losses = [row["train/global_step"] for row in rows if "loss" in row]
    assert losses == [str(step) for step in range(100, 106)]
    assert [row[STEP_METRIC] for row in rows if NAME in row] == [str(step) for step in range(10)]


def test_wandb_from_another_process_is_a_run_of_its_own_in_the_group(offline: Path) -> None:
    trainer = wandb.init(project="p", dir=str(offline))
    sink = WandbSink("p", group="training")
    log_all(sink)
    assert wandb.run is trainer
    sink.close()
    trainer.finish()
    file = written(sink._run, offline)
    record = run_record(file).run
    assert (record.run_group, record.job_type) == ("training", "eval")
    rows = [(row[STEP_METRIC], row[NAME]) for row in history(file) if NAME in row]
    assert rows == [(str(step), str(value)) for step, value in OUT_OF_ORDER]


def test_what_is_open_in_the_process_is_found(
    tmp_path: Path, offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    del offline
    assert open_sinks() == ([], [])
    uri = (tmp_path / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    run = wandb.init(project="p", dir=str(tmp_path))
    with mlflow.start_run():
        sinks, paced = open_sinks(tensorboard_dir=tmp_path)
    assert [type(sink) for sink in sinks] == [TensorBoardSink, MlflowSink]
    assert [type(sink) for sink in paced] == [TrainerWandbSink]
    sinks, _ = open_sinks(tensorboard_dir=tmp_path, mlflow_run=("theirs", uri))
    assert [sink.name for sink in sinks][1] == "mlflow-theirs"
    monkeypatch.setitem(sys.modules, "unshard.evaluate.sinks.mlflow", None)
    sinks, paced = open_sinks(tensorboard_dir=tmp_path, mlflow_run=("theirs", uri))
    assert [type(sink) for sink in (*sinks, *paced)] == [TensorBoardSink, TrainerWandbSink]
    run.finish()


class Pages:
    """A paced sink that has a result only when its page is turned, and is away at first."""

    name = "pages"

    def __init__(self) -> None:
        self.failures = 1
        self.is_ready = True
        self.got: list[int] = []

    def log(self, step: int, metrics: Mapping[str, float], job_id: str) -> None:
        del metrics, job_id
        if self.failures:
            self.failures -= 1
            raise ConnectionError("away")
        self.got.append(step)
        self.is_ready = False

    def log_now(self, step: int, metrics: Mapping[str, float], job_id: str) -> None:
        self.log(step, metrics, job_id)
        self.is_ready = True

    def close(self) -> None:
        self.is_ready = True


def test_a_paced_sink_that_failed_gets_its_result_later_and_has_it_when_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorders, "_FIRST_WAIT", 0.0)
    recorded: list[str] = []
    pages = Pages()
    recorder = Recorder([], [pages], marks=tmp_path / "m", on_recorded=recorded.append)
    for step in (1, 2, 3):
        recorder.add(Recording(f"job{step}", step, {NAME: 1.0}))
    recorder.tick()
    assert pages.got == [2]  # the first failed, and comes last
    recorder.tick()
    assert (pages.got, recorded) == ([2], [])
    pages.is_ready = True
    recorder.tick()
    assert pages.got == [2, 3]
    until(lambda: recorded == ["job2"])
    recorder.close(LIMIT_S)
    assert pages.got == [2, 3, 1]
    until(lambda: sorted(recorded) == ["job1", "job2", "job3"])


class Away(JsonlSink):
    """Counts how often it was tried."""

    tried = 0

    def log(self, step: int | None, metrics: Mapping[str, float], job_id: str) -> None:
        del step, metrics, job_id
        self.tried += 1
        raise ConnectionError("away")


def test_a_tracker_that_is_away_is_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorders, "_FIRST_WAIT", 1000.0)
    away, last = Away(tmp_path / "away"), JsonlSink(tmp_path / "last")
    recorder = Recorder([away, last], [], marks=tmp_path / "m", on_recorded=ignore)
    for number in range(5):
        recorder.add(Recording(f"job{number}", number, {NAME: 1.0}))
    recorder.close(LIMIT_S)
    assert len((tmp_path / "last").read_text().splitlines()) == 5
    assert away.tried == 2  # the first time, and at the end


class Counting(JsonlSink):
    """Counts what it is asked to write."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked: list[str] = []

    def log(self, step: int | None, metrics: Mapping[str, float], job_id: str) -> None:
        self.asked.append(job_id)
        super().log(step, metrics, job_id)


def test_a_job_is_written_once_to_each_sink_also_by_the_next_process(tmp_path: Path) -> None:
    recorded: list[str] = []
    for _ in range(2):
        sink = Counting(tmp_path / "a.jsonl")
        recorder = Recorder([sink], [], marks=tmp_path / "m", on_recorded=recorded.append)
        recorder.add(Recording("one", 1, {NAME: 1.0}))
        recorder.add(Recording("one", 1, {NAME: 1.0}))
        recorder.close(LIMIT_S)
    assert sink.asked == []
    assert set(recorded) == {"one"}
    assert "one" in Marks(tmp_path / "m", "jsonl-a.jsonl")
    assert "two" not in Marks(tmp_path / "m", "jsonl-a.jsonl")
