"""Results in Weights & Biases: in the trainer's own run, or in a separate run of its group.

W&B's internal step only rises, and rows that are logged with a lower one are dropped silently. So
results are logged without `step=`. Their step is a metric, and each metric is defined by its exact
name to be drawn over it (a pattern loses against the trainer's own `*`). In the trainer's run a
result is added to the row that the trainer commits next (`commit=False`). A row has one value of
the step, so the caller of `log` adds at most one result to each.
"""

import hashlib
from collections.abc import Mapping

import wandb

from unshard.evaluate.sinks.base import STEP_METRIC


class TrainerWandbSink:
    """Adds results to the training run, which stays open, from the trainer's process and thread."""

    def __init__(self, run: wandb.Run) -> None:
        self.name = f"wandb-{run.id}"
        self._run = run
        self._defined: set[str] = set()
        self._waiting_at: int | None = None  # W&B's step of the row with a result

    def describe(self, config: Mapping[str, object]) -> None:
        """Add the settings of results to the run's config."""
        self._run.config.update(dict(config), allow_val_change=True)  # type: ignore[no-untyped-call]

    def log(self, step: int, metrics: Mapping[str, float], job_id: str) -> None:
        """Add a result to the row that the trainer commits next."""
        del job_id
        self._run.log(_make_row(self._run, self._defined, step, metrics), commit=False)
        self._waiting_at = self._run.step

    @property
    def is_ready(self) -> bool:
        """Whether the trainer has committed the row with the last result."""
        return self._waiting_at != self._run.step

    def log_now(self, step: int, metrics: Mapping[str, float], job_id: str) -> None:
        """Write a result as a separate row, after the last log call of the trainer."""
        del job_id
        self.close()
        self._run.log(_make_row(self._run, self._defined, step, metrics), commit=True)

    def close(self) -> None:
        """Commit the row with the last result, if it is not committed; the run stays open."""
        if not self.is_ready:
            self._run.log({}, commit=True)
            self._waiting_at = None


class WandbSink:
    """Writes from another process than the trainer's, to its own run in the trainer's group.

    `group` is the name of the training run. The same names continue the same run.
    """

    def __init__(self, project: str, group: str) -> None:
        # The same id as in earlier versions, so that runs continue.
        identity = hashlib.sha256(f"None/{project}/{group}".encode()).hexdigest()[:16]
        self._run = wandb.init(
            project=project,
            group=group,
            job_type="eval",
            name=f"{group}-eval",
            id=f"eval-{identity}",
            resume="allow",
            reinit="create_new",
        )
        self.name = f"wandb-{self._run.id}"
        self._defined: set[str] = set()

    def describe(self, config: Mapping[str, object]) -> None:
        """Add the settings of results to the run's config."""
        self._run.config.update(dict(config), allow_val_change=True)  # type: ignore[no-untyped-call]

    def log(self, step: int, metrics: Mapping[str, float], job_id: str) -> None:
        """Write a row."""
        del job_id
        self._run.log(_make_row(self._run, self._defined, step, metrics), commit=True)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _make_row(
    run: wandb.Run, defined: set[str], step: int, metrics: Mapping[str, float]
) -> dict[str, float | int]:
    """Return a row with its step; new metrics are defined first."""
    if not defined:
        run.define_metric(STEP_METRIC)
    for name in metrics:
        if name not in defined:
            run.define_metric(name, step_metric=STEP_METRIC)
            defined.add(name)
    return {**metrics, STEP_METRIC: step}
