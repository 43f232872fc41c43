"""Results in Weights & Biases: in the trainer's own run, or in a run of their own beside it.

W&B's internal step only rises, and what is logged with a lower one is dropped without a word. So
results never carry `step=`: their step is a metric of its own, and each metric is told by its exact
name to be drawn over it (a pattern loses against the trainer's own `*`). In the trainer's run a
result is added to the row that the trainer commits next (`commit=False`), at most one a row,
because a row holds one value of the step; who calls `log` sees to that.
"""

import hashlib
from collections.abc import Mapping

import wandb

from unshard.evaluate.sinks.base import STEP_METRIC

__all__ = ["TrainerWandbSink", "WandbSink"]


class TrainerWandbSink:
    """Adds results to the training run, from the trainer's process and thread.

    Args:
        run: what `wandb.init` returned; it stays open.
    """

    def __init__(self, run: wandb.Run) -> None:
        self._run = run
        self._defined: set[str] = set()
        self._waiting_at: int | None = None  # W&B's step of the row that holds a result

    @property
    def name(self) -> str:
        """Return the sink's name."""
        return f"wandb-{self._run.id}"

    def log(self, step: int, metrics: Mapping[str, float], job_id: str) -> None:
        """Add a result to the row that the trainer commits next."""
        del job_id
        self._run.log(_row(self._run, self._defined, step, metrics), commit=False)
        self._waiting_at = self._run.step

    @property
    def is_ready(self) -> bool:
        """Whether the trainer has committed the row that holds the last result."""
        return self._waiting_at != self._run.step

    def log_now(self, step: int, metrics: Mapping[str, float], job_id: str) -> None:
        """Write a result as a row of its own: when the trainer logs no more."""
        del job_id
        self.close()
        self._run.log(_row(self._run, self._defined, step, metrics), commit=True)

    def close(self) -> None:
        """Commit the row that holds the last result, if it waits; the run stays open."""
        if not self.is_ready:
            self._run.log({}, commit=True)
            self._waiting_at = None


class WandbSink:
    """Writes from another process than the trainer's: to a run of its own in the trainer's group.

    Args:
        project: of the training run.
        group: the name of the training run.
        entity: whose project; None: the default.

    The same names again continue the same run.
    """

    def __init__(self, project: str, group: str, entity: str | None = None) -> None:
        identity = hashlib.sha256(f"{entity}/{project}/{group}".encode()).hexdigest()[:16]
        self._run = wandb.init(
            entity=entity,
            project=project,
            group=group,
            job_type="eval",
            name=f"{group}-eval",
            id=f"eval-{identity}",
            resume="allow",
            reinit="create_new",
        )
        self._defined: set[str] = set()

    @property
    def name(self) -> str:
        """Return the sink's name."""
        return f"wandb-{self._run.id}"

    def log(self, step: int, metrics: Mapping[str, float], job_id: str) -> None:
        """Write a row."""
        del job_id
        self._run.log(_row(self._run, self._defined, step, metrics), commit=True)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _row(
    run: wandb.Run, defined: set[str], step: int, metrics: Mapping[str, float]
) -> dict[str, float | int]:
    """Return a row with its own step; what is not known yet is defined first."""
    if not defined:
        run.define_metric(STEP_METRIC)
    for name in metrics:
        if name not in defined:
            run.define_metric(name, step_metric=STEP_METRIC)
            defined.add(name)
    return {**metrics, STEP_METRIC: step}
