"""Write the results that a server has into a tracker, each job once, under its own step.

`<directory>/unshard_exports/` remembers which jobs were written where; a process that is killed
between writing and remembering writes the same values under the same steps again.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from unshard.errors import UnshardError, UsageError
from unshard.evaluate.sinks.base import Marks, Sink, name_metrics

__all__ = ["Destination", "Exported", "Target", "export", "export_all"]

_MARKS = "unshard_exports"


class Target(StrEnum):
    """A tracker that results can be exported to."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"
    TRACKIO = "trackio"
    JSONL = "jsonl"


_FILES = frozenset({Target.TENSORBOARD, Target.JSONL})
_OWNERS = {Target.MLFLOW: "MLFLOW_TRACKING_URI", Target.WANDB: "WANDB_ENTITY"}
_PACKAGES = {Target.MLFLOW: "mlflow or mlflow-skinny"}


@dataclass(frozen=True, slots=True)
class Destination:
    """Where results are written.

    Attributes:
        target: the kind of tracker.
        directory: of the files, and of the record of what has been exported.
        project: of W&B or trackio; MLflow's experiment.
        is_for_one: whether one run is exported, into `directory` itself, or each into its own.
    """

    target: Target
    directory: Path
    project: str = ""
    is_for_one: bool = True

    def check(self) -> None:
        """Raise UsageError if the target needs a project and has none."""
        if self.target not in _FILES and not self.project:
            raise UsageError(f"--to {self.target}", expected="--project NAME")

    def place(self, run: str) -> Path:
        """Return the directory of a run's files."""
        return self.directory if self.is_for_one else self.directory / run


@dataclass(frozen=True, slots=True)
class Exported:
    """How many jobs of a run were exported.

    Attributes:
        run: its name.
        written: by this export.
        present: by an earlier one.
        without_step: left out, because a tracker would draw them at a wrong step.
    """

    run: str
    written: int
    present: int
    without_step: int


@dataclass(frozen=True, slots=True)
class _Measured:
    job_id: str
    step: int | None
    metrics: Mapping[str, float]


def export_all(results: Iterable[Mapping[str, object]], to: Destination) -> list[Exported]:
    """Write results as the server lists them; see `export`."""
    to.check()
    runs: dict[str, list[Mapping[str, object]]] = {}
    for one in results:
        runs.setdefault(str(one["run"]), []).append(one)
    return [export(run, runs[run], to) for run in sorted(runs)]


def export(run: str, results: Sequence[Mapping[str, object]], to: Destination) -> Exported:
    """Write the results of one run, the lowest step first.

    Raises:
        UsageError: the tracker is not installed, or not set up.
    """
    if run in {"", ".", ".."} or Path(run).name != run:
        raise UsageError(f"run {run!r}: cannot name a file")
    named = filter(None, [to.target, _owner(to.target), to.project, run])
    marks = Marks(to.directory / _MARKS, "-".join(named))
    jobs = _by_job(results)
    fitting = [job for job in jobs if job.step is not None or to.target is Target.JSONL]
    new = [job for job in fitting if job.job_id not in marks]
    if new:
        try:
            _write(_sink(run, to), new, marks)
        except (UnshardError, OSError):
            raise
        except Exception as error:  # whatever a tracker raises
            raise UsageError(
                f"--to {to.target}: nothing can be written to it",
                found=f"{type(error).__name__}: {error}",
                hint="is it set up for this user? (wandb login, MLFLOW_TRACKING_URI)",
            ) from error
    return Exported(run, len(new), len(fitting) - len(new), len(jobs) - len(fitting))


def _by_job(results: Sequence[Mapping[str, object]]) -> list[_Measured]:
    """Return the results of each job, by step; for one step in the order of completion."""
    metrics: dict[str, dict[str, float]] = {}
    about: dict[str, Mapping[str, object]] = {}
    for one in results:
        job = str(one["job_id"])
        about[job] = one
        metrics.setdefault(job, {})[f"{one['task']}/{one['metric']}"] = float(str(one["value"]))
    found = []
    for job, one in about.items():
        step = one["step"]
        named = name_metrics(metrics[job], weights=str(one["weights"]))
        found.append(_Measured(job, step if isinstance(step, int) else None, named))
    return sorted(found, key=lambda one: (one.step is None, one.step or 0))


def _write(sink: Sink, jobs: Sequence[_Measured], marks: Marks) -> None:
    """Write jobs; mark them when the sink is closed, because some trackers send from a thread."""
    written = []
    try:
        for job in jobs:
            sink.log(job.step, job.metrics, job.job_id)  # type: ignore[arg-type]  # None: JSONL's
            written.append(job.job_id)
    finally:
        sink.close()
        for job_id in written:
            marks.add(job_id)


def _owner(target: Target) -> str:
    """Return a hash of the project's owner or server: the same name there is another project."""
    owner = os.environ.get(_OWNERS.get(target, ""), "")  # may hold a password
    return hashlib.sha256(owner.encode()).hexdigest()[:8] if owner else ""


def _sink(run: str, to: Destination) -> Sink:
    """Open a tracker; only this one is imported."""
    try:
        match to.target:
            case Target.TENSORBOARD:
                from unshard.evaluate.sinks.tensorboard import TensorBoardSink

                return TensorBoardSink(to.place(run))
            case Target.JSONL:
                from unshard.evaluate.sinks.jsonl import JsonlSink

                return JsonlSink(to.directory / f"{run}.jsonl")
            case Target.WANDB:
                from unshard.evaluate.sinks.wandb import WandbSink

                return WandbSink(to.project, run)
            case Target.MLFLOW:
                from unshard.evaluate.sinks.mlflow import MlflowSink

                return MlflowSink.open(to.project, run)
            case Target.TRACKIO:
                from unshard.evaluate.sinks.trackio import TrackioSink

                return TrackioSink.open(to.project, run)
    except ImportError as error:
        needed = _PACKAGES.get(to.target, str(to.target))
        raise UsageError(
            f"--to {to.target}: {error}", hint=f"install {needed} next to unshard"
        ) from error
