"""Evaluate the checkpoints of a Lightning Trainer while it trains.

    from unshard.evaluate.callbacks.lightning import UnshardEvalCallback

    trainer = Trainer(..., callbacks=[checkpoints, UnshardEvalCallback("eval.yaml")])

Lightning has no hook after a checkpoint is written, but tells its loggers
(`Logger.after_save_checkpoint`), before it removes older ones. So a silent logger is added to the
trainer: it pins while everything is still there.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import Logger, TensorBoardLogger

from unshard.evaluate.config import EvalConfig
from unshard.evaluate.courier import ignoring_errors
from unshard.evaluate.recorder import PacedSink
from unshard.evaluate.sinks.base import Sink
from unshard.evaluate.sinks.trainers import open_sinks
from unshard.evaluate.submitter import Submitter

__all__ = ["UnshardEvalCallback"]


class UnshardEvalCallback(Callback):
    """Submits what `ModelCheckpoint` saves, and logs the results as they come.

    Args:
        config: a file of YAML, its text, a mapping, or an `EvalConfig`.
        run_dir: where pins and results lie; None: the directory that checkpoints are saved to.
        sinks: further places for results.
    """

    def __init__(
        self,
        config: EvalConfig | Mapping[str, object] | str | Path,
        run_dir: Path | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        self.config = EvalConfig.of(config)
        self.submitter: Submitter | None = None
        self._run_dir = run_dir
        self._sinks = tuple(sinks)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin; what an earlier process submitted goes on."""
        del pl_module
        with ignoring_errors("checkpoints are not evaluated"):
            found: list[Sink] = []
            paced: list[PacedSink] = []
            if trainer.is_global_zero:
                with ignoring_errors("trackers get no results"):
                    found, paced = open_sinks(tensorboard_dir=_tensorboard_dir(trainer))
            saver = trainer.checkpoint_callback
            saved_to = getattr(saver, "dirpath", None) or trainer.default_root_dir
            self.submitter = Submitter(
                self.config,
                self._run_dir or Path(saved_to),
                sinks=[*found, *self._sinks],
                paced=paced,
                acts=trainer.is_global_zero,
            )
            trainer.loggers = [*trainer.loggers, _Listener(self.submitter, trainer)]

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Log at most one result in the trainer's own run, as often as the trainer logs."""
        del pl_module, outputs, batch, batch_idx
        every = max(1, getattr(trainer, "log_every_n_steps", 1))
        if self.submitter is not None and trainer.global_step % every == 0:
            self.submitter.tick()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for the last results, for as long as the configuration allows."""
        del pl_module
        if self.submitter is not None:
            self.submitter.close()
            trainer.loggers = [one for one in trainer.loggers if not isinstance(one, _Listener)]


class _Listener(Logger):
    """A logger that logs nothing: it hears of every checkpoint, before older ones are removed."""

    def __init__(self, submitter: Submitter, trainer: Trainer) -> None:
        super().__init__()
        self._submitter = submitter
        self._trainer = trainer
        self._last: tuple[str, int] | None = None

    @property
    def name(self) -> str:
        """Return the logger's name."""
        return "unshard"

    @property
    def version(self) -> str:
        """Return the logger's version."""
        return ""

    @property
    def save_dir(self) -> str:
        """Return what the trainer takes as its log directory if it has no other logger."""
        return self._trainer.default_root_dir

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log nothing."""

    def log_hyperparams(self, *args: object, **kwargs: object) -> None:
        """Log nothing."""

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Submit the checkpoint that was just saved; `last.ckpt` of the same step is the same."""
        with ignoring_errors("a checkpoint is not evaluated"):
            step = self._trainer.global_step
            path = checkpoint_callback._last_checkpoint_saved  # noqa: SLF001  (no public name)
            if path and (self._last is None or self._last[1] != step):
                self._last = (path, step)
                self._submitter.submit(path, step)


def _tensorboard_dir(trainer: Trainer) -> Path | None:
    found = [one for one in trainer.loggers if isinstance(one, TensorBoardLogger)]
    return Path(found[0].log_dir) if found else None
