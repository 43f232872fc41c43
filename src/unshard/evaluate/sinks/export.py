"""Write a server's results into a tracker, each job once, under its own step.

`<directory>/unshard_exports/` has marks of the written jobs; a process that is killed between
writing and marking writes the same values under the same steps again.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from unshard.errors import UnshardError, UsageError
from unshard.evaluate.comparing import as_results, describe_settings
from unshard.evaluate.sinks.base import JsonlSink, Marks, Sink, describe, name_metrics

_MARKS = "unshard_exports"
_SETTINGS = ("settings", "arguments", "revision", "evaluator")


class Tracker(StrEnum):
    """A tracker that results can be exported to."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"
    TRACKIO = "trackio"
    JSONL = "jsonl"


_FILES = frozenset({Tracker.TENSORBOARD, Tracker.JSONL})
_OWNERS = {Tracker.MLFLOW: "MLFLOW_TRACKING_URI", Tracker.WANDB: "WANDB_ENTITY"}
_PACKAGES = {Tracker.MLFLOW: "mlflow or mlflow-skinny"}


@dataclass(frozen=True, slots=True)
class Destination:
    """The destination of an export.

    Attributes:
        tracker: the kind of tracker.
        directory: of the files, and of the marks of exported jobs.
        project: of W&B or trackio; MLflow's experiment.
        is_for_one: whether one run is exported, into `directory` itself, or each into its own.

    Raises:
        UsageError: the tracker needs a project.
    """

    tracker: Tracker
    directory: Path
    project: str = ""
    is_for_one: bool = True

    def __post_init__(self) -> None:
        if self.tracker not in _FILES and not self.project:
            raise UsageError(f"--to {self.tracker}: no project", expected="--project NAME")


@dataclass(frozen=True, slots=True)
class Exported:
    """The number of exported jobs of a run.

    Attributes:
        run: the run's name in the tracker.
        written: by this export.
        present: by an earlier one.
        without_step: left out, because a tracker would draw them at a wrong step.
    """

    run: str
    written: int
    present: int
    without_step: int


@dataclass(frozen=True, slots=True)
class _JobResults:
    job_id: str
    step: int | None
    metrics: Mapping[str, float]
    settings: Mapping[str, object]


def export_all(results: Iterable[Mapping[str, object]], to: Destination) -> list[Exported]:
    """Write results as the server lists them; see `export`.

    A tracker's run has one line of each metric. If the server has several lines with different
    profiles or settings, the one with the most steps is in the run itself, and each of the others
    in a run named after the difference.
    """
    exported = list[Exported]()
    for run, rows in sorted(_group(results, "run").items()):
        for name, part in _split_lines(rows, _marks_of(run, to)).items():
            destination = replace(to, is_for_one=to.is_for_one and not name)
            exported.append(export(f"{run} {name}".rstrip(), part, destination))
    return exported


def _split_lines(
    rows: Sequence[Mapping[str, object]], written: Marks
) -> dict[str, list[Mapping[str, object]]]:
    """Return the results of a run by a description of their lines; "" for each metric's main line.

    A line that was written to the run itself before stays there, even if another has more steps.
    """
    results = as_results(rows)
    descriptions = describe_settings(results)
    # For each metric and line, whether each of its results was written to the run itself.
    lines: dict[tuple[str, str], dict[tuple[str, str], list[bool]]] = {}
    for one in results:
        of_metric = lines.setdefault((one.weights, f"{one.task}/{one.metric}"), {})
        of_metric.setdefault((one.profile, one.settings), []).append(one.job_id in written)
    parts: dict[str, list[Mapping[str, object]]] = {}
    for row, one in zip(rows, results, strict=True):
        of_metric = lines[one.weights, f"{one.task}/{one.metric}"]
        main = max(of_metric, key=lambda line, of=of_metric: (any(of[line]), len(of[line])))  # type: ignore[misc]
        own = one.profile, one.settings
        name = f"{one.profile if one.profile != main[0] else ''} {descriptions[own]}".strip()
        name = name or f"settings {one.settings}"
        parts.setdefault("" if own == main else name, []).append(row)
    return parts


def _group(rows: Iterable[Mapping[str, object]], key: str) -> dict[str, list[Mapping[str, object]]]:
    groups: dict[str, list[Mapping[str, object]]] = {}
    for row in rows:
        groups.setdefault(str(row[key]), []).append(row)
    return groups


def export(run: str, results: Sequence[Mapping[str, object]], to: Destination) -> Exported:
    """Write the results of one run, the lowest step first.

    Raises:
        UsageError: the tracker is not installed, or not set up.
    """
    if run in {"", ".", ".."} or Path(run).name != run:
        raise UsageError(f"run {run!r}: cannot name a file")
    marks = _marks_of(run, to)
    jobs = _group_by_job(results)
    fitting = [job for job in jobs if job.step is not None or to.tracker is Tracker.JSONL]
    new = [job for job in fitting if job.job_id not in marks]
    if new:
        try:
            _write(_open_sink(run, to), new, marks)
        except (UnshardError, OSError):
            raise
        except Exception as error:  # trackers raise their own classes
            raise UsageError(
                f"--to {to.tracker}: nothing can be written to it",
                found=f"{type(error).__name__}: {error}",
                hint="is it set up for this user? (wandb login, MLFLOW_TRACKING_URI)",
            ) from error
    return Exported(run, len(new), len(fitting) - len(new), len(jobs) - len(fitting))


def _marks_of(run: str, to: Destination) -> Marks:
    """Return the marks of a run's jobs that were written to a tracker before."""
    # A project of another owner or server has its own marks. Hashed: a URL may have a password.
    owner = os.environ.get(_OWNERS.get(to.tracker, ""), "")
    owner = hashlib.sha256(owner.encode()).hexdigest()[:8] if owner else ""
    parts = filter(None, [to.tracker, owner, to.project, run])
    return Marks(to.directory / _MARKS, "-".join(parts))


def _group_by_job(results: Sequence[Mapping[str, object]]) -> list[_JobResults]:
    """Return the results of each job, by step; jobs of one step in the order of completion."""
    jobs = []
    for job, rows in _group(results, "job_id").items():
        step, weights = rows[-1]["step"], str(rows[-1]["weights"])
        metrics = {f"{row['task']}/{row['metric']}": float(str(row["value"])) for row in rows}
        metrics = name_metrics(metrics, weights=weights)
        settings = {str(rows[-1].get("profile", "")): {key: rows[-1].get(key) for key in _SETTINGS}}
        jobs.append(_JobResults(job, step if isinstance(step, int) else None, metrics, settings))
    return sorted(jobs, key=lambda job: (job.step is None, job.step or 0))


def _write(sink: Sink, jobs: Sequence[_JobResults], marks: Marks) -> None:
    """Write jobs; mark them when the sink is closed, because some trackers send from a thread."""
    written = []
    try:
        for job in jobs:
            describe(sink, job.settings)
            sink.log(job.step, job.metrics, job.job_id)  # type: ignore[arg-type]  # None: JSONL's
            written.append(job.job_id)
    finally:
        sink.close()
        for job_id in written:
            marks.add(job_id)


def _open_sink(run: str, to: Destination) -> Sink:
    """Open a tracker; no other is imported, because it may not be installed."""
    try:
        match to.tracker:
            case Tracker.TENSORBOARD:
                from unshard.evaluate.sinks.tensorboard import TensorBoardSink

                return TensorBoardSink(to.directory if to.is_for_one else to.directory / run)
            case Tracker.JSONL:
                return JsonlSink(to.directory / f"{run}.jsonl")
            case Tracker.WANDB:
                from unshard.evaluate.sinks.wandb import WandbSink

                return WandbSink(to.project, run)
            case Tracker.MLFLOW:
                from unshard.evaluate.sinks.mlflow import MlflowSink

                return MlflowSink.open(to.project, run)
            case Tracker.TRACKIO:
                from unshard.evaluate.sinks.trackio import TrackioSink

                return TrackioSink.open(to.project, run)
    except ImportError as error:
        needed = _PACKAGES.get(to.tracker, str(to.tracker))
        raise UsageError(
            f"--to {to.tracker}: {error}", hint=f"install {needed} next to unshard"
        ) from error
