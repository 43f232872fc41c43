"""Find the best step of a run, and compare its results with other steps and runs. Pure.

Only numbers of one line, of the same run, weights, profile and settings, are compared step by step.
If a step of a line has several values of a metric, the one completed last counts.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from math import hypot

from unshard.errors import UsageError
from unshard.evaluate.jobs import BASE_STEP, Result, Settings

_DEFAULTS = {"number": 0, "profile": "", "completed_at": 0.0}
Line = tuple[str, str, str, str]
"""A line: see `Result.line`."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference of two values, also as a multiple of its standard error, if both have one.

    sqrt(a^2 + b^2) is the standard error for independent samples. The real one is smaller, because
    evaluators ask every model the same questions.
    """

    value: float
    stderrs: float | None

    @classmethod
    def of(cls, one: Result, other: Result) -> "Difference":
        """Return the difference `one - other`."""
        value = one.value - other.value
        if one.stderr is None or other.stderr is None:
            return cls(value, None)
        error = hypot(one.stderr, other.stderr)
        return cls(value, value / error if error else None)


@dataclass(frozen=True, slots=True)
class MetricComparison:
    """One metric of one run.

    Attributes:
        last: the result of the highest step.
        best: the best result, the lowest step among equals; None: the better direction is not
            known.
        base: the result of step 0, if there is one.
        since_best: the last result minus the best.
        common: the result of the highest step that this run and the first run have.
        to_first: `common` minus the first run's result; None for the first run itself.
    """

    last: Result
    best: Result | None
    base: Result | None
    since_best: Difference | None
    common: Result | None = None
    to_first: Difference | None = None

    def as_row(self) -> dict[str, object]:
        """Return the comparison as one flat row; missing values are None."""
        return {
            **{name: getattr(self.last, name) for name in _NAMES},
            "higher_is_better": self.last.higher_is_better,
            **_columns("base", self.base),
            **_columns("best", self.best),
            **_columns("last", self.last),
            **_difference("last_minus_best", self.since_best),
            "common_step": None if self.common is None else self.common.step,
            **_difference("minus_first_run", self.to_first),
        }


_NAMES = ("run", "weights", "profile", "settings", "task", "metric")


def _columns(name: str, result: Result | None) -> dict[str, object]:
    return {
        f"{name}_step": result and result.step,
        name: result and result.value,
        f"{name}_stderr": result and result.stderr,
    }


def _difference(name: str, difference: Difference | None) -> dict[str, object]:
    return {
        name: difference and difference.value,
        f"{name}_in_stderrs": difference and difference.stderrs,
    }


def as_results(answers: Iterable[Mapping[str, object]]) -> list[Result]:
    """Return the results in a server's answers; an older server leaves fields out."""
    names = {field.name for field in fields(Result)}
    return [
        Result(**{**_DEFAULTS, **{key: answer[key] for key in names & answer.keys()}})  # type: ignore[arg-type]  # the protocol's types
        for answer in answers
    ]


def describe_settings(results: Iterable[Result]) -> dict[tuple[str, str], str]:
    """Return the distinguishing part of the settings, by profile and settings id.

    It has the arguments that differ within the profile, and the profile's revision where these
    are equal. A limit is always in it: the number is of a part of the task.
    """
    examples = sorted({(one.profile, one.settings): one for one in results}.items())
    descriptions: dict[tuple[str, str], str] = {}
    for _, group in groupby(examples, key=lambda entry: entry[0][0]):
        descriptions |= _describe_profile(dict(group))
    return descriptions


def _describe_profile(examples: Mapping[tuple[str, str], Result]) -> dict[tuple[str, str], str]:
    arguments = {
        key: {name: _as_text(value) for name, value in Settings(one.arguments).compared.items()}
        for key, one in examples.items()
    }
    names = {name for by_name in arguments.values() for name in by_name}
    differ = {n for n in names if len({by_name.get(n) for by_name in arguments.values()}) > 1}
    texts = {
        key: [f"{name}={by_name[name]}" for name in by_name if name in differ | {"limit"}]
        for key, by_name in arguments.items()
    }
    counts = Counter(map(tuple, texts.values()))
    for key, parts in texts.items():
        if counts[tuple(parts)] > 1:
            revision = examples[key].revision
            parts.append(f"revision {revision}" if revision else "revision not recorded")
    return {key: ", ".join(parts) for key, parts in texts.items()}


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def best_numbers(
    results: Sequence[Result], metrics: Sequence[str], *, higher_is_better: bool | None
) -> frozenset[int]:
    """Return the numbers of the results of the best step of each line.

    The best step has all the metrics, and the best mean of them; among equals it is the lowest.

    Args:
        results: of any runs.
        metrics: "task/metric" or "task/metric,filter".
        higher_is_better: the direction; None: the evaluator's.

    Raises:
        UsageError: a metric has no result, or the direction is not known, or not the same.
    """
    wanted = [one for one in results if _name(one) in metrics]
    if missing := [name for name in metrics if name not in map(_name, wanted)]:
        names = sorted(set(map(_name, results)))
        raise UsageError(
            f"--best {missing[0]}: there is no such result",
            expected=", ".join(names[:20]) or "a run that has results",
        )
    if higher_is_better is None:
        higher_is_better = _direction(wanted)
    sign = 1 if higher_is_better else -1
    best = set[int]()
    for steps in _lines(wanted).values():
        complete = [step for step in steps.items() if len(step[1]) == len(set(metrics))]
        if complete:
            complete.sort(key=lambda step: (step[0] is None, step[0] or 0))
            # Each step has as many values, so their sums have the order of their means.
            _, top = max(complete, key=lambda step: sign * sum(r.value for r in step[1].values()))
            best |= {one.number for one in top.values()}
    return frozenset(best)


def _direction(wanted: Iterable[Result]) -> bool:
    """Return whether higher values of all these metrics are better, by their evaluators."""
    directions = {_name(one): one.higher_is_better for one in wanted}
    if unknown := sorted(name for name, is_up in directions.items() if is_up is None):
        raise UsageError(
            f"--best {unknown[0]}: the evaluator does not report which direction is better",
            hint="add --higher-is-better or --lower-is-better",
        )
    if len(set(directions.values())) == 1:
        return bool(next(iter(directions.values())))
    named = sorted(directions.items())
    raise UsageError(
        "--best: a mean of these metrics has no best value",
        expected="metrics of one direction",
        found=", ".join(f"{name} ({'max' if is_up else 'min'})" for name, is_up in named),
    )


def _lines(results: Iterable[Result]) -> dict[Line, dict[int | None, dict[str, Result]]]:
    """Return the results of each line, by step and name; a step may be None."""
    lines: dict[Line, dict[int | None, dict[str, Result]]] = {}
    for one in sorted(results, key=lambda one: one.number):
        lines.setdefault(one.line, {}).setdefault(one.step, {})[_name(one)] = one
    return lines


def _name(one: Result) -> str:
    return f"{one.task}/{one.metric}"


def compare_runs(
    runs: Sequence[str], results: Iterable[Result], *, higher_is_better: bool | None
) -> list[MetricComparison]:
    """Compare the steps of each run, and runs with the first run, per metric.

    Args:
        runs: the labels of runs, in the order of the answer.
        results: of these runs; results without a step are left out.
        higher_is_better: the direction; None: the evaluator's, of each metric.

    Returns:
        For each metric, by name, weights, profile and settings: one comparison per run that has it.
    """
    stepped = [one for one in results if one.step is not None and one.run in runs]
    order = {run: index for index, run in enumerate(runs)}

    def key(one: Result) -> tuple[str, str, str, str, str, int]:
        return one.task, one.metric, *one.line[1:], order[one.run]

    comparisons = list[MetricComparison]()
    for _, of_metric in groupby(sorted(stepped, key=key), key=lambda one: key(one)[:-1]):
        first: dict[int, Result] = {}
        for run, series in groupby(of_metric, key=lambda one: one.run):
            newest = {one.step: one for one in sorted(series, key=lambda one: one.number)}
            numbers = sorted(step for step in newest if step is not None)
            steps = {step: newest[step] for step in numbers}
            comparisons.append(_compare(steps, first, higher_is_better=higher_is_better))
            if run == runs[0]:
                first = steps
    return comparisons


def best_of(results: Sequence[Result], *, higher_is_better: bool | None = None) -> Result | None:
    """Return the best result, the first among equals; None if the better direction is not known.

    `results` are of one metric, by rising step, at least one. Without `higher_is_better`, the
    direction of the last one counts.
    """
    if higher_is_better is None:
        higher_is_better = results[-1].higher_is_better
    if higher_is_better is None:
        return None
    sign = 1 if higher_is_better else -1
    return max(results, key=lambda one: sign * one.value)


def _compare(
    steps: Mapping[int, Result], first: Mapping[int, Result], *, higher_is_better: bool | None
) -> MetricComparison:
    last = steps[max(steps)]
    best = best_of(list(steps.values()), higher_is_better=higher_is_better)
    since_best = None if best is None else Difference.of(last, best)
    alone = MetricComparison(last, best, steps.get(BASE_STEP), since_best)
    if not (shared := steps.keys() & first.keys()):
        return alone
    step = max(shared)
    return replace(alone, common=steps[step], to_first=Difference.of(steps[step], first[step]))
