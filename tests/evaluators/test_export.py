"""`unshard eval export` from a real server to the real trackers: right steps, nothing twice."""

import json
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from evaluation.running import whole_model
from evaluation.servers import SCORE, Live, live, unshard
from evaluation.wandb_file import config, history, run_record
from unshard.errors import UsageError
from unshard.evaluate.sinks import export as exporting
from unshard.evaluate.sinks.base import JsonlSink
from unshard.evaluate.sinks.export import Destination, Exported, Tracker, export, export_all

pytestmark = pytest.mark.xdist_group("eval-export")  # one server for all

NAME = "unshard_eval/t/acc"
POINTS = {(10, 0.01), (20, 0.02)}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that has results of two runs, and one that belongs to no step."""
    place = tmp_path_factory.mktemp("served")
    with live(place / "server", script=SCORE, roots=[str(place)]) as running:
        with running.client() as client:
            for run, step in (("a", 20), ("a", 10), ("b", 5), ("a", None)):
                model = whole_model(place / run / f"model{step or ''}")
                client.submit(str(model), step, "script", ["t"], run=run)
            until_all = running.all_ended(4)
        assert {job["status"] for job in until_all} == {"completed"}
        yield running


def exported(real: Live, to: str, *more: object) -> dict[str, tuple[int, int, int]]:
    done = unshard("eval", "export", f"--to={to}", f"--server={real.url}", "--json", *more)
    runs = json.loads(done.stdout)["runs"]
    return {one["run"]: (one["written"], one["present"], one["without_step"]) for one in runs}


def test_jsonl_has_a_file_for_each_run(real: Live, tmp_path: Path) -> None:
    assert exported(real, "jsonl", "--directory", tmp_path) == {"a": (3, 0, 0), "b": (1, 0, 0)}
    before = (tmp_path / "a.jsonl").read_bytes()
    assert exported(real, "jsonl", "--directory", tmp_path) == {"a": (0, 3, 0), "b": (0, 1, 0)}
    assert (tmp_path / "a.jsonl").read_bytes() == before
    rows = [json.loads(line) for line in before.splitlines()]
    assert [(row["step"], row["metrics"]) for row in rows] == [
        (10, {NAME: 0.01}),
        (20, {NAME: 0.02}),
        (None, {NAME: 0.0}),
    ]


def test_tensorboard_shows_a_run_next_to_its_training(real: Live, tmp_path: Path) -> None:
    for written, present in ((2, 0), (0, 2)):
        found = exported(real, "tensorboard", "--run=a", "--directory", tmp_path / "logs")
        assert found == {"a": (written, present, 1)}
    events = EventAccumulator(str(tmp_path / "logs" / "unshard_eval"))
    events.Reload()
    points = [(event.step, round(event.value, 6)) for event in events.Scalars(NAME)]
    assert sorted(points) == sorted(POINTS)
    exported(real, "tensorboard", "--directory", tmp_path / "all")
    assert len(list((tmp_path / "all").glob("*/unshard_eval/events.*"))) == 2


def test_wandb_gets_a_run_of_its_own_in_the_group(
    real: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    options = ("--run=a", "--project=p", "--directory", tmp_path)
    assert exported(real, "wandb", *options) == {"a": (2, 0, 1)}
    assert exported(real, "wandb", *options) == {"a": (0, 2, 1)}
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert run_record(file).run.run_group == "a"
    assert json.loads(config(file)["unshard_eval/script"])["arguments"] == {}
    rows = [row for row in history(file) if NAME in row]
    assert {(int(r["unshard_eval/step"]), float(r[NAME])) for r in rows} == POINTS
    assert len(rows) == 2


def test_mlflow_gets_a_run_in_the_experiment(
    real: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    for directory in ("one", "one", "forgotten"):  # the same run is continued
        exported(real, "mlflow", "--run=a", "--project=p", "--directory", tmp_path / directory)
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("p")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    points = [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, NAME)]
    assert sorted(points) == sorted([*POINTS, *POINTS])
    assert run.info.run_name == "a-eval"
    assert json.loads(run.data.tags["unshard_eval/script"])["arguments"] == {}


def test_trackio_gets_a_run_of_its_own(
    real: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    options = ("--run=a", "--project=p", "--directory", tmp_path)
    assert exported(real, "trackio", *options) == {"a": (2, 0, 1)}
    assert exported(real, "trackio", *options) == {"a": (0, 2, 1)}
    (database,) = (tmp_path / "trackio").glob("p*.db")
    rows = sqlite3.connect(database).execute("SELECT run_name, step, metrics FROM metrics")
    found = [(name, step, json.loads(text).get(NAME)) for name, step, text in rows]
    assert sorted(found) == sorted(("a-eval", step, value) for step, value in POINTS)


def test_a_server_without_results_says_so(real: Live, tmp_path: Path) -> None:
    done = unshard(
        "eval",
        "export",
        "--to=jsonl",
        "--run=none",
        f"--server={real.url}",
        "--directory",
        tmp_path,
    )
    assert done.stdout == "the server has no results of none\n"


def test_what_a_tracker_needs_is_asked_for(tmp_path: Path) -> None:
    def refusal(*arguments: object) -> str:
        done: subprocess.CompletedProcess[str] = unshard("eval", "export", *arguments, check=False)
        assert done.returncode == 2
        return done.stderr

    assert "--project NAME" in refusal("--to=wandb")
    assert "--to excel: unknown" in refusal("--to=excel")
    assert not list(tmp_path.iterdir())


def test_a_tracker_that_is_not_set_up_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://nowhere")
    with pytest.raises(UsageError, match="--to mlflow: nothing can be written") as caught:
        export("a", [{**ROW, "metric": "acc"}], Destination(Tracker.MLFLOW, tmp_path, "p"))
    assert "Exception" in caught.value.found


ROW = {"run": "a", "job_id": "1", "step": 3, "weights": "ema", "task": "t", "value": 0.5}


def test_weights_and_filters_are_in_the_names(tmp_path: Path) -> None:
    rows = [{**ROW, "metric": "acc"}, {**ROW, "metric": "acc,strict"}]
    to = Destination(Tracker.JSONL, tmp_path)
    assert export("a", rows, to) == Exported("a", 1, 0, 0)
    (line,) = (tmp_path / "a.jsonl").read_text().splitlines()
    assert json.loads(line)["metrics"] == {
        "unshard_eval/ema/t/acc": 0.5,
        "unshard_eval/ema/t/acc,strict": 0.5,
    }


@pytest.mark.parametrize("name", ["../x", "/etc/x", "..", ""])
def test_a_run_cannot_name_another_place(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot name a file"):
        export_all([{**ROW, "run": name, "metric": "acc"}], Destination(Tracker.JSONL, tmp_path))


def test_what_was_written_before_a_failure_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unshard.evaluate.sinks.base import JsonlSink

    rows = [{**ROW, "job_id": str(n), "step": n, "metric": "acc"} for n in range(4)]
    log, to = JsonlSink.log, Destination(Tracker.JSONL, tmp_path)

    def failing(self: JsonlSink, step: int | None, metrics: dict[str, float], job: str) -> None:
        if step == 2:
            raise OSError(28, "No space left on device")
        log(self, step, metrics, job)

    with monkeypatch.context() as patched:
        patched.setattr(JsonlSink, "log", failing)
        with pytest.raises(OSError, match="No space"):
            export("a", rows, to)
    assert export("a", rows, to) == Exported("a", 2, 2, 0)
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) == 4


def test_the_same_names_elsewhere_are_another_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = Destination(Tracker.WANDB, tmp_path, "p")
    one = {"job_id": "1", "run": "a", "task": "t", "metric": "m", "weights": "model"}
    found: list[dict[str, object]] = [{**one, "value": 1.0, "step": 1}]
    monkeypatch.setattr(exporting, "_open_sink", lambda run, to: JsonlSink(tmp_path / "lines"))  # noqa: ARG005
    for entity, written in (("one", 1), ("other", 1), ("one", 0)):
        monkeypatch.setenv("WANDB_ENTITY", entity)
        assert export("a", found, to).written == written


def test_the_later_of_two_results_of_a_step_is_written_last(tmp_path: Path) -> None:
    """A step may be saved again when its first save has been evaluated already."""
    rows = [{**ROW, "job_id": job, "metric": "acc", "value": 0.5} for job in ("b", "a")]
    assert export("a", rows, Destination(Tracker.JSONL, tmp_path)).written == 2
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert [json.loads(line)["job"] for line in lines] == ["b", "a"]


def line(job: str, step: int, value: float, **arguments: object) -> dict[str, object]:
    settings = {"settings": str(sorted(arguments)), "arguments": arguments, "revision": "r"}
    return {**ROW, "metric": "acc", "job_id": job, "step": step, "value": value, **settings}


def read_lines(file: Path) -> list[tuple[int, float]]:
    rows = [json.loads(text) for text in file.read_text().splitlines()]
    return [(row["step"], next(iter(row["metrics"].values()))) for row in rows]


def test_each_line_of_a_metric_has_a_run_of_its_own(tmp_path: Path) -> None:
    """And keeps it, whichever of them has more steps later."""
    to = Destination(Tracker.JSONL, tmp_path)
    smoke = [line("s1", 1, 0.9, limit=5), line("s2", 2, 0.9, limit=5)]
    export_all([*smoke, line("1", 1, 0.1)], to)
    later = [line(str(step), step, 0.1) for step in (1, 2, 3, 4)]
    export_all([*smoke, *later], to)
    files = {path.name: read_lines(path) for path in tmp_path.glob("*.jsonl")}
    assert sorted(files.values()) == [
        [(1, 0.1), (2, 0.1), (3, 0.1), (4, 0.1)],
        [(1, 0.9), (2, 0.9)],
    ]
    assert files["a.jsonl"] == [(1, 0.9), (2, 0.9)]  # which it got first


def test_a_result_says_what_it_was_measured_with(tmp_path: Path) -> None:
    export_all([line("1", 1, 0.1, num_fewshot=5)], Destination(Tracker.JSONL, tmp_path))
    (row,) = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    (measured,) = row["measured_with"].values()
    assert (measured["arguments"], measured["revision"]) == ({"num_fewshot": 5}, "r")
