"""A real transformers Trainer on the CPU, rotating to one checkpoint while the server evaluates."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import (
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from evaluation.servers import Stub, free_port, scores, serving
from evaluation.wandb_file import definitions, history
from tiny_models import tiny_model
from unshard.evaluate.callbacks.transformers import UnshardEvalCallback, _tensorboard_dir
from unshard.evaluate.pins.pin import list_pins
from waiting import LIMIT_S

NAME = "unshard_eval/t/acc"


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A few tokens."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(4) + index % 4
        return {"input_ids": tokens, "labels": tokens}


def train(
    output: Path, *callbacks: TrainerCallback, report_to: str = "none", steps: int = 6
) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=2,
        save_steps=2,
        save_total_limit=1,
        logging_steps=1,
        report_to=report_to,
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(tiny_model(), arguments, train_dataset=Rows(), callbacks=[*callbacks])
    trainer.train()
    return trainer


def config_for(url: str) -> dict[str, object]:
    return {
        "server_url": url,
        "model": "p",
        "tasks": ["t"],
        "poll_interval": 0.02,
        "flush_timeout": LIMIT_S,
    }


@pytest.fixture
def server() -> Iterator[Stub]:
    with serving(Stub(finishes=scores)) as stub:
        yield stub


def test_every_checkpoint_is_evaluated_although_only_one_is_kept(tmp_path: Path) -> None:
    """The server is away until the training has ended: rotation removed two of three by then."""
    port = free_port()
    stub, seen = Stub(), []

    def look(body: dict[str, object]) -> dict[str, object] | None:
        seen.append(sorted(path.name for path in Path(str(body["pin"])).iterdir()))
        return scores(body)

    stub.finishes = look
    callback = UnshardEvalCallback({**config_for(f"http://127.0.0.1:{port}"), "flush_timeout": 0})
    train(tmp_path / "run", callback)
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-6"]
    assert [pin.step for pin in list_pins(tmp_path / "run")] == [2, 4, 6]
    with serving(stub, port):
        again = UnshardEvalCallback(config_for(stub.url))
        train(tmp_path / "run", again)
    assert {body["step"] for body in stub.submissions} == {2, 4, 6}  # of both trainings
    assert seen[0] == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "trainer_state.json",
    ]
    lines = (tmp_path / "run" / "_unshard" / "results.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in lines} == {2, 4, 6}
    assert list_pins(tmp_path / "run") == []
    assert "unshard merge STEP" in (tmp_path / "run" / "MERGE.txt").read_text()


def test_results_reach_the_trackers_that_the_trainer_reports_to(
    tmp_path: Path, server: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    train(tmp_path / "run", UnshardEvalCallback(config_for(server.url)), report_to="wandb")
    run = wandb.run
    assert run is not None
    run.finish()
    wandb.teardown()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    rows = history(file)
    found = {(row["unshard_eval/step"], row[NAME]) for row in rows if NAME in row}
    assert found == {("2", "0.02"), ("4", "0.04"), ("6", "0.06")}
    steps = [row["train/global_step"] for row in rows if "train/loss" in row]
    assert steps == [str(step) for step in range(1, 7)]
    assert definitions(file)[NAME] == "unshard_eval/step"


def test_results_are_tensorboard_scalars(
    tmp_path: Path, server: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "logs"))
    train(tmp_path / "run", UnshardEvalCallback(config_for(server.url)), report_to="tensorboard")
    events = EventAccumulator(str(tmp_path / "logs" / "unshard_eval"), purge_orphaned_data=False)
    events.Reload()
    assert {event.step for event in events.Scalars(NAME)} == {2, 4, 6}


def test_an_older_transformers_says_itself_where_event_files_lie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    older = SimpleNamespace(report_to=["tensorboard"], logging_dir="logs", output_dir="out")
    assert _tensorboard_dir(older) == Path("logs")  # type: ignore[arg-type]  # of 4.x
    newer = SimpleNamespace(report_to=["tensorboard"], output_dir="out")
    assert _tensorboard_dir(newer) == Path("out/runs")  # type: ignore[arg-type]  # stands for it


def test_a_server_that_never_comes_does_not_stop_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    absent = {**config_for(f"http://127.0.0.1:{free_port()}"), "flush_timeout": 0}
    train(tmp_path / "run", UnshardEvalCallback(absent))
    assert caplog.text.count("no tokenizer in") == 1
    assert (tmp_path / "run" / "checkpoint-6").is_dir()
