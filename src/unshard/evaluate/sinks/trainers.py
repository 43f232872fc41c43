"""The sinks of the trackers that a training process already has open, found without importing any.

A tracker that the process has not imported is not in use; one that is gets its results in the
trainer's own run.
"""

import logging
import sys
from pathlib import Path
from types import ModuleType

from unshard.evaluate.recorder import PacedSink
from unshard.evaluate.sinks.base import Sink

__all__ = ["open_sinks"]

log = logging.getLogger(__name__)


def open_sinks(*, tensorboard_dir: Path | None = None) -> tuple[list[Sink], list[PacedSink]]:
    """Return the sinks of what is open in this process: those of any thread, and the paced ones.

    Args:
        tensorboard_dir: where the trainer writes its event files, if it does.
    """
    sinks: list[Sink] = []
    if tensorboard_dir is not None:
        from unshard.evaluate.sinks.tensorboard import TensorBoardSink

        sinks.append(TensorBoardSink(tensorboard_dir))
    return [*sinks, *_mlflow()], [*_trackio(), *_wandb()]


def _mlflow() -> list[Sink]:
    mlflow = _imported("mlflow")
    run = None if mlflow is None else mlflow.active_run()
    if run is None:
        return []
    from unshard.evaluate.sinks.mlflow import MlflowSink

    return [MlflowSink(run.info.run_id)]


def _trackio() -> list[PacedSink]:
    variables = _imported("trackio.context_vars")
    run = None if variables is None else variables.current_run.get()
    if run is None:
        return []
    from unshard.evaluate.sinks.trackio import TrackioSink

    return [TrackioSink(run)]


def _wandb() -> list[PacedSink]:
    wandb = _imported("wandb")
    run = None if wandb is None else wandb.run
    if run is None:
        return []
    from unshard.evaluate.sinks.wandb import TrainerWandbSink

    return [TrainerWandbSink(run)]


def _imported(name: str) -> ModuleType | None:
    return sys.modules.get(name)
