"""Find the trackers that this process has open: a tracker in use is already imported."""

import sys
from pathlib import Path

from unshard.evaluate.sinks.base import PacedSink, Sink
from unshard.integrations.harmless import ignoring_errors


def open_sinks(
    *, tensorboard_dir: Path | None = None, mlflow_run: tuple[str, str | None] | None = None
) -> tuple[list[Sink], list[PacedSink]]:
    """Return the sinks of the trackers open in this process: for any thread, and paced.

    Results go to the trainer's own run. A tracker that fails is left out with a warning.

    Args:
        tensorboard_dir: of the trainer's event files, if it writes any.
        mlflow_run: id and tracking URI of the trainer's run, if it is not the active one.
    """
    sinks: list[Sink] = []
    paced: list[PacedSink] = []
    failure = "a tracker gets no results"
    with ignoring_errors(failure):
        if tensorboard_dir is not None:
            from unshard.evaluate.sinks.tensorboard import TensorBoardSink

            sinks.append(TensorBoardSink(tensorboard_dir))
    with ignoring_errors(failure):
        mlflow = sys.modules.get("mlflow") if mlflow_run is None else None
        if mlflow is not None and (active := mlflow.active_run()) is not None:
            mlflow_run = active.info.run_id, None
        if mlflow_run is not None:
            from unshard.evaluate.sinks.mlflow import MlflowSink

            sinks.append(MlflowSink(*mlflow_run))
    with ignoring_errors(failure):
        variables = sys.modules.get("trackio.context_vars")
        if variables is not None and (run := variables.current_run.get()) is not None:
            from unshard.evaluate.sinks.trackio import TrackioSink

            paced.append(TrackioSink(run))
    with ignoring_errors(failure):
        paced += filter(None, [open_wandb()])
    return sinks, paced


def open_wandb() -> PacedSink | None:
    """Return the sink of W&B's run, if this process has one open."""
    wandb = sys.modules.get("wandb")
    if wandb is None or wandb.run is None:
        return None
    from unshard.evaluate.sinks.wandb import TrainerWandbSink

    return TrainerWandbSink(wandb.run)
