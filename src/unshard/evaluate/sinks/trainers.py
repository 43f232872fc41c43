"""The sinks of the trackers that a training process has open, found without importing a tracker.

A tracker that the process has not imported is not in use. Results go to the trainer's own run.
"""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from unshard.evaluate.sinks.base import PacedSink, Sink

__all__ = ["open_sinks", "open_wandb"]

_Kind = TypeVar("_Kind")

log = logging.getLogger(__name__)


def open_sinks(
    *, tensorboard_dir: Path | None = None, mlflow_run: tuple[str, str | None] | None = None
) -> tuple[list[Sink], list[PacedSink]]:
    """Return the sinks of the trackers open in this process: those for any thread, and paced ones.

    A tracker that cannot be written to is left out with a warning.

    Args:
        tensorboard_dir: of the trainer's event files, if it writes any.
        mlflow_run: id and tracking URI of the trainer's run, if it is not the active one.
    """
    sinks = [_opened(lambda: _tensorboard(tensorboard_dir)), _opened(lambda: _mlflow(mlflow_run))]
    paced = [_opened(_trackio), _opened(open_wandb)]
    return [one for one in sinks if one is not None], [one for one in paced if one is not None]


def _opened(opens: Callable[[], _Kind | None]) -> _Kind | None:
    try:
        return opens()
    except Exception as error:  # noqa: BLE001  (one tracker must not keep results from the others)
        log.warning("a tracker gets no results: %s: %s", type(error).__name__, error)
        return None


def _tensorboard(directory: Path | None) -> Sink | None:
    if directory is None:
        return None
    from unshard.evaluate.sinks.tensorboard import TensorBoardSink

    return TensorBoardSink(directory)


def _mlflow(run: tuple[str, str | None] | None) -> Sink | None:
    mlflow = sys.modules.get("mlflow")
    active = None if mlflow is None else mlflow.active_run()
    if run is None:
        run = None if active is None else (active.info.run_id, None)
    if run is None:
        return None
    from unshard.evaluate.sinks.mlflow import MlflowSink

    return MlflowSink(*run)


def _trackio() -> PacedSink | None:
    variables = sys.modules.get("trackio.context_vars")
    run = None if variables is None else variables.current_run.get()
    if run is None:
        return None
    from unshard.evaluate.sinks.trackio import TrackioSink

    return TrackioSink(run)


def open_wandb() -> PacedSink | None:
    """Return the sink of W&B's run, if this process has one open."""
    wandb = sys.modules.get("wandb")
    run = None if wandb is None else wandb.run
    if run is None:
        return None
    from unshard.evaluate.sinks.wandb import TrainerWandbSink

    return TrainerWandbSink(run)
