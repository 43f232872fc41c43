"""A real Lightning Trainer on the CPU that keeps one checkpoint."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from evaluation.servers import Stub, scores, serving
from unshard.evaluate.pins.pin import list_pins

pytest.importorskip("lightning", reason="pip install lightning; nothing of it was run")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from unshard.evaluate.callbacks.lightning import UnshardEvalCallback


class Ones(torch.utils.data.Dataset[torch.Tensor]):
    """A dozen rows."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        del index
        return torch.ones(2)


class Tiny(LightningModule):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        del batch_idx
        loss: torch.Tensor = self.layer(batch).sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def server() -> Iterator[Stub]:
    with serving(Stub(finishes=scores)) as stub:
        yield stub


class Using(Callback):
    """What users' code does with the loggers of a trainer."""

    def on_train_batch_start(self, trainer: Trainer, *args: object) -> None:
        del args
        for one in trainer.loggers:
            assert one.experiment  # type: ignore[attr-defined]  # every logger has it


def train(place: Path, saver: ModelCheckpoint, callback: Callback, **more: object) -> Trainer:
    trainer = Trainer(
        max_steps=6,
        accelerator="cpu",
        callbacks=[saver, callback, Using()],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=place,
        **{"logger": False, **more},  # type: ignore[arg-type]  # whatever a test wants
    )
    trainer.fit(Tiny(), torch.utils.data.DataLoader(Ones()))
    return trainer


def callback_for(server: Stub) -> UnshardEvalCallback:
    return UnshardEvalCallback(
        {"server_url": server.url, "profile": "p", "tasks": ["t"], "poll_interval": 0.02}
    )


@pytest.mark.filterwarnings("ignore")  # lightning's own advice about workers and devices
def test_every_checkpoint_is_evaluated_although_one_is_kept(tmp_path: Path, server: Stub) -> None:
    callback = callback_for(server)
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, save_top_k=1, save_last=True)
    trainer = train(tmp_path, saver, callback)
    assert len(list(tmp_path.glob("epoch*.ckpt"))) == 1
    assert [body["step"] for body in server.submissions] == [2, 4, 6]
    assert str(server.submissions[0]["pin"]).endswith("step=2.ckpt")
    assert callback.submitter is not None
    assert [step for step, _ in callback.submitter.completed()] == [2, 4, 6]
    assert list_pins(tmp_path) == []
    assert trainer.loggers == []
    assert "unshard merge STEP" in (tmp_path / "MERGE.txt").read_text()


@pytest.mark.filterwarnings("ignore")  # lightning's own advice about workers and devices
def test_loggers_stay_what_they_are_and_checkpoints_written_by_a_thread_are_whole(
    tmp_path: Path, server: Stub
) -> None:
    seen: list[object] = []

    def look(body: dict[str, object]) -> dict[str, object] | None:
        seen.append(torch.load(str(body["pin"]), weights_only=False)["global_step"])
        return scores(body)

    server.finishes = look
    logger = CSVLogger(tmp_path, name="my", version="v7")
    saver = ModelCheckpoint(every_n_train_steps=1, save_top_k=-1)
    using = {"logger": logger, "plugins": [AsyncCheckpointIO()]}
    trainer = train(tmp_path, saver, callback_for(server), **using)
    assert trainer.loggers == [logger]
    assert seen == [1, 2, 3, 4, 5, 6]
    assert {body["run"] for body in server.submissions} == {"v7"}


@pytest.mark.filterwarnings("ignore")  # lightning's own advice about workers and devices
def test_an_address_that_is_refused_does_not_end_the_training(tmp_path: Path, server: Stub) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path)
    saver.dirpath = "s3://user:password@bucket/run"  # credentials do not belong there
    trainer = Trainer(default_root_dir=tmp_path, callbacks=[saver], logger=False)
    callback = callback_for(server)
    callback.on_fit_start(trainer, LightningModule())
    assert callback.submitter is None
