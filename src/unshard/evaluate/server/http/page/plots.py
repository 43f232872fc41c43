"""The plots of runs: each task and metric against the training step, as data and as CSV."""

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType

from pydantic import BaseModel

from unshard.evaluate.comparing import best_of, describe_settings
from unshard.evaluate.jobs import Result

_COLUMNS = (
    *("run", "weights", "profile", "step", "task", "metric", "value", "stderr", "completed"),
    *("arguments", "revision", "evaluator", "task_version", "n_shot", "n_samples"),
)
_LEAST_OF_GROUP = 4
_ORDER = ("model", "ema")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


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


def fold(names: Sequence[str]) -> tuple[list[str], dict[str, int]]:
    """Return the names without the subtasks of groups, and the number of tasks of each group.

    Evaluators do not report the tasks of a group. A task whose name begins with the name of another
    (`mmlu_anatomy`, `mmlu`) is a part of it if there are at least four of these.
    """
    tasks = {name.partition("/")[0] for name in names}
    group_of = {
        task: next((head for head in _heads(task) if head in tasks), task) for task in tasks
    }
    counts = Counter(group for task, group in group_of.items() if group != task)
    groups = {group: count for group, count in counts.items() if count >= _LEAST_OF_GROUP}
    shown = [
        name
        for name in names
        if group_of[task := name.partition("/")[0]] == task or group_of[task] not in groups
    ]
    return shown, groups


def _heads(task: str) -> Iterator[str]:
    """Yield the part of a name before each underscore, the shortest first."""
    return (task[:index] for index, letter in enumerate(task) if letter == "_")


def make_plots(
    points: Iterable[Result],
    names: Sequence[str],
    runs: Sequence[str],
    folded: Mapping[str, int] = MappingProxyType({}),
) -> list[Plot]:
    """Return the plots of these names, whose lines are in the order of the runs.

    Args:
        points: results with a step, in order of arrival; the last one of a step counts.
        names: "task/metric".
        runs: the labels of the runs.
        folded: the number of tasks of each group without a plot.
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
        arguments = json.dumps(dict(one.arguments))
        numbers = (repr(one.value), one.stderr, when)
        settings = (arguments, one.revision, one.evaluator, one.task_version)
        row = (one.run, one.weights, one.profile, one.step, one.task, one.metric)
        row = (*map(_plain, row), *numbers, *map(_plain, settings), one.n_shot, one.n_samples)
        writer.writerow(row)
    return file.getvalue()


def _plain(value: object) -> object:
    is_formula = isinstance(value, str) and value.startswith(_FORMULA)
    return f"'{value}" if is_formula else value
