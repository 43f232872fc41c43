"""The plots of runs: one per task and metric against the training step, as data and as CSV."""

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
        run, weights, profile: whose.
        settings: what distinguishes its settings from those of the plot's other lines.
        steps, values: of the points.
        errors: the standard errors of the values; None where there is none.
        base: the value at step 0, which is the model that training began with.
        best: the step with the best value, of equals the lowest; None if the evaluator does not say
            which direction is better.
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
    """All lines of a metric; `subtasks`: how many plots of the group's tasks are not shown."""

    name: str
    task: str
    metric: str
    series: list[Series]
    subtasks: int = 0


class PlotList(BaseModel):
    """The plots of a page; `runs` are the labels of those that were asked for, in this order."""

    runs: list[str]
    plots: list[Plot]


def fold(names: Sequence[str]) -> tuple[list[str], dict[str, int]]:
    """Return the names without the subtasks of groups, and how many tasks each group has.

    Evaluators do not say which tasks a group is made of. One whose name begins with that of another
    (`mmlu_anatomy`, `mmlu`) is taken to be a part of it if there are several of these.
    """
    tasks = {name.partition("/")[0] for name in names}
    group_of = {
        task: next((head for head in _heads(task) if head in tasks), task) for task in tasks
    }
    counts = Counter(group for task, group in group_of.items() if group != task)
    groups = {group: count for group, count in counts.items() if count >= _LEAST_OF_GROUP}
    kept = [
        name
        for name in names
        if group_of[task := name.partition("/")[0]] == task or group_of[task] not in groups
    ]
    return kept, groups


def _heads(task: str) -> Iterator[str]:
    """Yield what comes before each underscore, the shortest first."""
    return (task[:place] for place, letter in enumerate(task) if letter == "_")


def make_plots(
    points: Iterable[Result],
    names: Sequence[str],
    runs: Sequence[str],
    folded: Mapping[str, int] = MappingProxyType({}),
) -> list[Plot]:
    """Return the plots of these names, whose lines are in the order of the runs.

    Args:
        points: results with a step, in the order in which they came; of a step's, the last counts.
        names: "task/metric".
        runs: the labels of the runs.
        folded: how many tasks of each group are not shown.
    """
    found: dict[str, dict[tuple[int, int, str, str], dict[int, Result]]]
    found = {name: {} for name in names}
    for one in points:
        line = (runs.index(one.run), _ORDER.index(one.weights), *one.line[2:])
        found[f"{one.task}/{one.metric}"].setdefault(line, {})[one.step or 0] = one
    return [
        _make_plot(name, [lines[line] for line in sorted(lines)], folded)
        for name, lines in found.items()
        if lines
    ]


def _make_plot(name: str, lines: Sequence[dict[int, Result]], folded: Mapping[str, int]) -> Plot:
    task, _, metric = name.partition("/")
    named = describe_settings(one for points in lines for one in points.values())
    series = [_make_series(points, named) for points in lines]
    subtasks = folded.get(task, 0)
    return Plot(name=name, task=task, metric=metric, series=series, subtasks=subtasks)


def _make_series(points: dict[int, Result], named: Mapping[tuple[str, str], str]) -> Series:
    ordered = [points[step] for step in sorted(points)]
    first, best = ordered[0], best_of(ordered)
    return Series(
        run=first.run,
        weights=first.weights,
        profile=first.profile,
        settings=named[first.profile, first.settings],
        steps=sorted(points),
        values=[one.value for one in ordered],
        errors=[one.stderr for one in ordered],
        base=first.value if first.step == 0 else None,
        best=None if best is None else best.step,
    )


def as_csv(points: Iterable[Result]) -> str:
    """Return results as CSV, with headings.

    A text that a spreadsheet would take for a formula begins with an apostrophe.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for one in points:
        when = datetime.fromtimestamp(one.completed_at, UTC).isoformat(timespec="seconds")
        names = map(_plain, (one.run, one.weights, one.profile))
        what = map(_plain, (one.task, one.metric))
        said = map(_plain, (json.dumps(dict(one.arguments)), one.revision, one.evaluator or ""))
        of_task = (_plain(one.task_version or ""), one.n_shot, one.n_samples)
        row = (*names, one.step, *what, repr(one.value), one.stderr, when, *said, *of_task)
        writer.writerow(row)
    return file.getvalue()


def _plain(text: str) -> str:
    return f"'{text}" if text.startswith(_FORMULA) else text
