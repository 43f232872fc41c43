"""The metrics of runs against the training step: plots as data and CSV, cells of the list of runs.

A run may have several lines of a metric. A cell has the line with the highest step, among equals
that of the model's own weights, and the number of lines.
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType

from pydantic import BaseModel

from unshard.evaluate.comparing import best_of, describe_settings
from unshard.evaluate.jobs import Result, Status
from unshard.evaluate.server.store.overview import Point, RunSummary

_COLUMNS = (
    *("run", "weights", "profile", "step", "task", "metric", "value", "stderr", "completed"),
    *("arguments", "revision", "evaluator", "task_version", "n_shot", "n_samples"),
)
_LEAST_OF_GROUP = 4
_ORDER = ("model", "ema")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_WIDTH, _HEIGHT, _DRAWN = 960, 200, 40
_LAST, _BEST = "last ", "best "


class Series(BaseModel):
    """A line: the points of a run, weights, profile and settings, by rising step.

    Attributes:
        settings: the distinguishing part of its settings: see `describe_settings`.
        steps, values: of the points.
        errors: the standard errors of the values, where known.
        base: the value at step 0, of the base model.
        best: the step with the best value, the lowest among equals; None if the evaluator does not
            report which direction is better.
    """

    run: str
    weights: str
    profile: str
    settings: str
    steps: list[int]
    values: list[float]
    errors: list[float | None]
    base: float | None
    best: int | None


class Plot(BaseModel):
    """All lines of a metric; `subtasks`: the number of the group's tasks without a plot."""

    name: str
    task: str
    metric: str
    series: list[Series]
    subtasks: int = 0


class PlotList(BaseModel):
    """The plots of a page; `runs` are the labels of the requested runs, in this order."""

    runs: list[str]
    plots: list[Plot]


def fold(
    names: Sequence[str], parents: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[str], dict[str, int]]:
    """Return the names without the subtasks of groups, and the number of tasks of each group.

    A subtask's name begins with that of its group (`mmlu_anatomy`, `mmlu`). If the subtasks of a
    group are not known, all such tasks with one of its metrics are. A task that is a group itself
    is not a subtask, and a group has at least four.

    Args:
        names: "task/metric".
        parents: the group of a task, where the evaluator reports it.
    """
    metrics: dict[str, set[str]] = {}
    for name in names:
        task, _, metric = name.partition("/")
        metrics.setdefault(task, set()).add(metric)
    known = {*parents.values()}
    heads = {
        task: [
            head
            for head in _heads(task)
            if not metrics[task].isdisjoint(metrics.get(head, ()))
            and (head not in known or head in _groups_of(task, parents))
        ]
        for task in metrics
    }
    counts = Counter(head for own in heads.values() for head in own)
    groups = {task for task, count in counts.items() if count >= _LEAST_OF_GROUP}
    group_of = {
        task: next(head for head in own if head in groups)
        for task, own in heads.items()
        if task not in groups and not groups.isdisjoint(own)
    }
    folded = {
        group: count
        for group, count in Counter(group_of.values()).items()
        if count >= _LEAST_OF_GROUP
    }
    return [name for name in names if group_of.get(name.partition("/")[0]) not in folded], folded


def _heads(task: str) -> Iterator[str]:
    """Yield the part of a name before each underscore, the longest first."""
    return (task[:place] for place in range(len(task) - 1, 0, -1) if task[place] == "_")


def _groups_of(task: str, parents: Mapping[str, str]) -> set[str]:
    """Return the groups that a task is in, at any depth."""
    groups = set[str]()
    while (task := parents.get(task, task)) not in groups:
        groups.add(task)
    return groups


def make_plots(
    points: Iterable[Result],
    names: Sequence[str],
    runs: Sequence[str],
    folded: Mapping[str, int] = MappingProxyType({}),
) -> list[Plot]:
    """Return the plots of these names ("task/metric"), with lines in the order of the runs' labels.

    `points` have a step, and are in order of arrival; the last one of a step counts. `folded` has
    the number of tasks of each group without a plot.
    """
    by_name: dict[str, dict[tuple[int, int, str, str], dict[int, Result]]]
    by_name = {name: {} for name in names}
    for one in points:
        line = (runs.index(one.run), _ORDER.index(one.weights), *one.line[2:])
        by_name[f"{one.task}/{one.metric}"].setdefault(line, {})[one.step or 0] = one
    return [
        _make_plot(name, [lines[line] for line in sorted(lines)], folded)
        for name, lines in by_name.items()
        if lines
    ]


def _make_plot(name: str, lines: Sequence[dict[int, Result]], folded: Mapping[str, int]) -> Plot:
    task, _, metric = name.partition("/")
    descriptions = describe_settings(one for points in lines for one in points.values())
    series = [_make_series(points, descriptions) for points in lines]
    subtasks = folded.get(task, 0)
    return Plot(name=name, task=task, metric=metric, series=series, subtasks=subtasks)


def _make_series(points: dict[int, Result], descriptions: Mapping[tuple[str, str], str]) -> Series:
    ordered = [points[step] for step in sorted(points)]
    first, best = ordered[0], best_of(ordered)
    return Series(
        run=first.run,
        weights=first.weights,
        profile=first.profile,
        settings=descriptions[first.profile, first.settings],
        steps=sorted(points),
        values=[one.value for one in ordered],
        errors=[one.stderr for one in ordered],
        base=first.value if first.step == 0 else None,
        best=None if best is None else best.step,
    )


def as_csv(points: Iterable[Result]) -> str:
    """Return results as CSV, with headings.

    A text that a spreadsheet would read as a formula begins with an apostrophe.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for one in points:
        when = datetime.fromtimestamp(one.completed_at, UTC).isoformat(timespec="seconds")
        numbers = (repr(one.value), one.stderr, when)
        arguments = json.dumps(dict(one.arguments))
        settings = (arguments, one.revision, one.evaluator, one.task_version)
        keys = (one.run, one.weights, one.profile, one.step, one.task, one.metric)
        row = (*map(_plain, keys), *numbers, *map(_plain, settings))
        writer.writerow((*row, one.n_shot, one.n_samples))
    return file.getvalue()


def _plain(value: object) -> object:
    is_formula = isinstance(value, str) and value.startswith(_FORMULA)
    return f"'{value}" if is_formula else value


@dataclass(frozen=True, slots=True)
class Cell:
    """A run's line of a metric, by step, and the number of its lines of this metric."""

    line: Mapping[int, Point]
    lines: int

    @property
    def last(self) -> Point:
        """The point of the highest step."""
        return self.line[max(self.line)]

    @property
    def sign(self) -> int:
        """1 if higher is better, -1 if lower is; 0: the evaluator does not report it."""
        better = self.last.higher_is_better
        return 0 if better is None else 1 if better else -1

    @property
    def best(self) -> Point | None:
        """The best point, the lowest step among equals; None: the direction is not known."""
        sign = self.sign
        if sign == 0:
            return None
        return max(self.line.values(), key=lambda one: (sign * one.value, -one.step))

    @property
    def drawn(self) -> str:
        """The points of a sparkline in SVG, at most 40."""
        points = [self.line[step] for step in sorted(self.line)]
        points = [*points[: -1 : -(-len(points) // _DRAWN)], points[-1]]
        values, first = [one.value for one in points], points[0].step
        low, across = min(values), (_WIDTH - 20) / ((points[-1].step - first) or 1)
        span = (max(values) / 2 - low / 2) or 1  # halves: a difference of floats may be infinite
        up = _HEIGHT - 20
        return " ".join(
            f"{10 + (step - first) * across:.0f},{10 + up - (value / 2 - low / 2) / span * up:.0f}"
            for step, value in zip([one.step for one in points], values, strict=True)
        )


def make_cells(points: Iterable[Point]) -> dict[tuple[str, str], Cell]:
    """Return cells by the run's id and the metric, from points in the order of arrival."""
    lines: dict[tuple[str, str], dict[tuple[object, ...], dict[int, Point]]] = {}
    for one in points:
        of_metric = lines.setdefault((one.run, one.metric), {})
        of_metric.setdefault((one.weights, one.profile, one.settings), {})[one.step] = one

    def rank(line: Mapping[int, Point]) -> tuple[int, str, int]:
        last = line[max(line)]
        return last.step, last.weights, last.number  # "model" is after "ema" in the alphabet

    return {key: Cell(max(of.values(), key=rank), len(of)) for key, of in lines.items()}


def metric_of(sort: str) -> str:
    """Return the metric in a sort key; empty if there is none."""
    text = sort.removeprefix("-")
    return text[len(_LAST) :] if text.startswith((_LAST, _BEST)) else ""


def sort_runs(
    runs: Iterable[RunSummary], sort: str, cells: Mapping[tuple[str, str], Cell]
) -> list[RunSummary]:
    """Sort runs by best, most or newest first; runs without a value are last.

    Args:
        runs: the newest first.
        sort: "name", "step", "waiting", "failed", "last METRIC" or "best METRIC", reversed after a
            "-"; otherwise the newest first.
        cells: of the metric in `sort`.
    """
    text, metric = sort.removeprefix("-"), metric_of(sort)

    def key(run: RunSummary) -> float | str | None:
        if not metric:
            open_ = run.counts[Status.QUEUED] + run.counts[Status.RUNNING]
            counts = {"step": run.step, "waiting": open_, "failed": run.counts[Status.FAILED]}
            return run.run.label.casefold() if text == "name" else counts.get(text, 0)
        cell = cells.get((run.run.id, metric))
        if cell is None:
            return None
        point = cell.best if text.startswith(_BEST) else cell.last
        return point and (-1 if cell.sign < 0 else 1) * point.value

    keyed = [(key(run), run) for run in runs]
    comparable = [one for one in keyed if one[0] is not None]
    is_falling = (text != "name") != sort.startswith("-")
    comparable.sort(key=lambda one: one[0], reverse=is_falling)  # type: ignore[arg-type, return-value]
    return [run for _, run in comparable] + [run for value, run in keyed if value is None]
