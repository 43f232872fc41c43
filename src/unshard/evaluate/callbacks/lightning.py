"""Evaluate the checkpoints of a Lightning Trainer while it trains.

    from unshard.evaluate.callbacks.lightning import UnshardEvalCallback

    trainer = Trainer(..., callbacks=[checkpoints, UnshardEvalCallback("eval.yaml")])

Lightning has no hook after a checkpoint is written. So every later hook looks for new checkpoints
of `ModelCheckpoint`, and pins them before the next save, which may remove them. The run has the
name of its directory, or of the parent of `checkpoints`.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger

from unshard.api.hinting import write_hint
from unshard.evaluate.run_folder import RunFolder
from unshard.evaluate.sinks.base import PacedSink, Sink
from unshard.evaluate.sinks.open import open_sinks
from unshard.evaluate.trainer.config import EvalConfig
from unshard.evaluate.trainer.submitter import Submitter
from unshard.integrations.harmless import ignoring_errors
from unshard.read.unfinished import why_unfinished
from unshard.stores.remote_path import is_url, path_of

__all__ = ["UnshardEvalCallback"]


class UnshardEvalCallback(Callback):
    """Submits the checkpoints of `ModelCheckpoint`, and logs the results as they come.

    Args:
        config: a YAML file, its text, a mapping, or an `EvalConfig`.
        run_dir: of pins and results; None: the directory of the checkpoints, or the trainer's own
            if they are in an object store.
        sinks: further destinations of results.
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
        self._saves = _Saves([])
        self._sinks = tuple(sinks)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin, and continue with what an earlier process submitted."""
        del pl_module
        savers = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
        with ignoring_errors("checkpoints are not evaluated"):
            if self.submitter is not None:  # of a training that was interrupted
                self.submitter.close(0.0)
            run_dir, config = self._locate(trainer, savers)
            sinks: list[Sink] = []
            paced: list[PacedSink] = []
            if trainer.is_global_zero:
                with ignoring_errors("trackers get no results"):
                    sinks, paced = _open_sinks(trainer)
            self._saves = _Saves(savers)
            self.submitter = Submitter(
                config,
                run_dir,
                sinks=[*sinks, *self._sinks],
                paced=paced,
                acts=trainer.is_global_zero,
            )

    def _locate(
        self, trainer: Trainer, savers: Sequence[ModelCheckpoint]
    ) -> tuple[Path, EvalConfig]:
        """Return the run's directory on a disk, and the configuration with the run's name."""
        saved_to = getattr(savers[0], "dirpath", None) if savers else None
        run_dir, config = self._run_dir, self.config
        if saved_to and is_url(saved_to):  # submissions and results need a disk
            run_dir = run_dir or Path(trainer.default_root_dir)
            config = replace(config, run=config.run or RunFolder(path_of(saved_to)).name)
        return run_dir or Path(saved_to or trainer.default_root_dir), config

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Submit the checkpoints that were saved after the last batch."""
        del trainer, pl_module, batch, batch_idx
        self._submit()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Submit the checkpoints that were saved before."""
        del trainer, pl_module
        self._submit()

    on_train_epoch_end = on_validation_end

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
        del trainer, pl_module
        if self.submitter is not None:
            self._submit()
            self.submitter.close()

    def _submit(self) -> None:
        if self.submitter is not None and self.submitter.acts:
            with ignoring_errors("a checkpoint is not evaluated"):
                for path, step in self._saves.finished():
                    self.submitter.submit(path, step)
                    with ignoring_errors("no MERGE.txt"):
                        write_hint(path)


class _Saves:
    """The checkpoints that `ModelCheckpoint` callbacks save, from the callbacks' attributes."""

    def __init__(self, savers: Sequence[ModelCheckpoint]) -> None:
        self._seen = [(saver, _last_save(saver), _saved_paths(saver)) for saver in savers]
        self._steps: set[int] = set()
        self._unfinished: list[tuple[Path, int]] = []

    def finished(self) -> list[tuple[Path, int]]:
        """Return path and step of the checkpoints completed since the last call."""
        for number, (saver, before, old_paths) in enumerate(self._seen):
            now, paths = _last_save(saver), _saved_paths(saver)
            self._seen[number] = (saver, now, paths)
            step, path = now
            if now != before and path and step not in self._steps:
                self._steps.add(step)
                new = sorted(paths - old_paths)  # preferred: the next save overwrites `last.ckpt`
                self._unfinished.append((Path(new[0] if new else path), step))
        # The newest is checked first. Older saves can only have become complete since, so none is
        # submitted after a newer save.
        complete = [save for save in reversed(self._unfinished) if _is_whole(save[0])]
        self._unfinished = [save for save in self._unfinished if save not in complete]
        return complete[::-1]


def _last_save(saver: ModelCheckpoint) -> tuple[int, str]:
    return saver._last_global_step_saved, saver._last_checkpoint_saved  # noqa: SLF001  (no public name)


def _saved_paths(saver: ModelCheckpoint) -> set[str]:
    paths = {saver.best_model_path, saver.kth_best_model_path, *saver.best_k_models}
    return paths - {"", saver.last_model_path}


def _is_whole(path: Path) -> bool:
    """Return whether a checkpoint is complete: `AsyncCheckpointIO` writes it in another thread."""
    if is_url(path):
        return True  # the server refuses it until it is there
    with suppress(FileNotFoundError):
        return path.is_dir() or why_unfinished([path]) is None
    return False


def _open_sinks(trainer: Trainer) -> tuple[list[Sink], list[PacedSink]]:
    """Open the sinks of the trainer's loggers, and of the trackers that this process has open."""
    logs, run = None, None
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logs = logs or Path(logger.log_dir)
        elif isinstance(logger, MLFlowLogger) and logger.run_id:  # its run is not the active one
            run = run or (logger.run_id, logger._tracking_uri)  # noqa: SLF001  (no public name)
    return open_sinks(tensorboard_dir=logs, mlflow_run=run)
