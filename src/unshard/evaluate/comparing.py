"""Which step of a run is the best, and how its results differ from those of other steps and runs.

Pure. Only numbers of one line are compared step by step: of one run, weights, profile and settings.
There a step has one value of a metric: of several, that which was completed last.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from math import hypot

from unshard.errors import UsageError
from unshard.evaluate.jobs import BASE_STEP, Result
from unshard.evaluate.settings import Settings

_LEAST = {"number": 0, "profile": "", "completed_at": 0.0}
Line = tuple[str, str, str, str]
"""What can be compared step by step: run, weights, profile, settings."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference of two values, also as a multiple of its standard error, if both have one.

    The standard error of the difference is taken to be that of two independent samples,
    sqrt(a^2 + b^2). Evaluators ask every model the same questions, so it is smaller in truth.
    """

    value: float
    stderrs: float | None

    @classmethod
    def of(cls, one: Result, other: Result) -> "Difference":
        """Return by how much one result is above another."""
        value = one.value - other.value
        if one.stderr is None or other.stderr is None:
            return cls(value, None)
        error = hypot(one.stderr, other.stderr)
        return cls(value, value / error if error else None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of one run.

    Attributes:
        last: the result of the highest step.
        best: the best result, of equals that of the lowest step; None: which direction is better
            is not known.
        base: the result of step 0, if there is one.
        since_best: the last result minus the best.
        common: the result of the highest step that the first run has, too.
        to_first: that result minus the first run's; None for the first run itself.
    """

    last: Result
    best: Result | None
    base: Result | None
    since_best: Difference | None
    common: Result | None = None
    to_first: Difference | None = None

    def as_row(self) -> dict[str, object]:
        """Return it as one flat row; None where there is nothing."""
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


def _columns(name: str, one: Result | None) -> dict[str, object]:
    step, value, error = (None,) * 3 if one is None else (one.step, one.value, one.stderr)
    return {f"{name}_step": step, name: value, f"{name}_stderr": error}


def _difference(name: str, one: Difference | None) -> dict[str, object]:
    value, errors = (None, None) if one is None else (one.value, one.stderrs)
    return {name: value, f"{name}_in_stderrs": errors}


def as_results(answers: Iterable[Mapping[str, object]]) -> list[Result]:
    """Return the results that a server answered; an older one leaves fields out."""
    known = {one.name for one in fields(Result)}
    return [
        Result(**{**_LEAST, **{key: one[key] for key in known & one.keys()}})  # type: ignore[arg-type]  # as the protocol says
        for one in answers
    ]


def describe_settings(results: Iterable[Result]) -> dict[tuple[str, str], str]:
    """Return what distinguishes the settings of each profile, by its name and their ids.

    It is what differs of their arguments and, where these are equal, of the profile's revision. A
    limit is always said: such a number is one of a part of the task.
    """
    found = sorted({(one.profile, one.settings): one for one in results}.items())
    named: dict[tuple[str, str], str] = {}
    for _, group in groupby(found, key=lambda entry: entry[0][0]):
        named |= _tell_apart(dict(group))
    return named


def _tell_apart(lines: Mapping[tuple[str, str], Result]) -> dict[tuple[str, str], str]:
    arguments = {key: Settings(one.arguments).compared for key, one in lines.items()}
    names = sorted({name for of in arguments.values() for name in of})
    values = {name: {_shown(of.get(name)) for of in arguments.values()} for name in names}
    texts = {
        key: ", ".join(
            f"{name}={_shown(of[name])}" for name in of if name == "limit" or len(values[name]) > 1
        )
        for key, of in arguments.items()
    }
    counts = Counter(texts.values())
    return {
        key: ", ".join(filter(None, [text, _revision(lines[key]) if counts[text] > 1 else ""]))
        for key, text in texts.items()
    }


def _revision(one: Result) -> str:
    return f"revision {one.revision}" if one.revision else "revision not recorded"


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def best_numbers(
    results: Sequence[Result], metrics: Sequence[str], *, higher_is_better: bool | None
) -> frozenset[int]:
    """Return the numbers of the results that make a step the best of its run.

    A step counts if it has all of the metrics, and the best one has the best mean of them; of
    equals it is the lowest step. Lines are separate.

    Args:
        results: of any runs.
        metrics: "task/metric" or "task/metric,filter".
        higher_is_better: which direction is better; None: what the evaluator says of each metric.

    Raises:
        UsageError: no result has such a name, or the direction is not known, or not the same.
    """
    wanted = [one for one in results if _name(one) in metrics]
    for name in metrics:
        if all(_name(one) != name for one in wanted):
            known = sorted({_name(one) for one in results})
            raise UsageError(
                f"--best {name}: there is no such result",
                expected=", ".join(known[:20]) or "a run that has results",
            )
    if higher_is_better is None:
        higher_is_better = _direction(wanted)
    best = set[int]()
    for steps in _lines(wanted).values():
        whole = [step for step, found in steps.items() if len(found) == len(set(metrics))]
        if not whole:
            continue
        sign = 1 if higher_is_better else -1
        top = max(sorted(whole, key=_rank), key=lambda step, of=steps: sign * _mean(of[step]))  # type: ignore[misc]
        best |= {one.number for one in steps[top].values()}
    return frozenset(best)


def _mean(found: Mapping[str, Result]) -> float:
    return sum(one.value for one in found.values()) / len(found)


def _direction(wanted: Iterable[Result]) -> bool:
    """Return whether higher values are better, as the evaluators say of all of these."""
    said = {_name(one): one.higher_is_better for one in wanted}
    match sorted({str(one) for one in said.values()}):
        case ["True"]:
            return True
        case ["False"]:
            return False
    unknown = sorted(name for name, one in said.items() if one is None)
    if unknown:
        raise UsageError(
            f"--best {unknown[0]}: the evaluator does not say which direction is better",
            hint="add --higher-is-better or --lower-is-better",
        )
    raise UsageError(
        "--best: a mean of these metrics has no best value",
        expected="metrics of one direction",
        found=", ".join(f"{name} ({'max' if up else 'min'})" for name, up in sorted(said.items())),
    )


def _lines(results: Iterable[Result]) -> dict[Line, dict[int | None, dict[str, Result]]]:
    """Return the results of each line, by step and name; None is a step, too."""
    found: dict[Line, dict[int | None, dict[str, Result]]] = {}
    for one in sorted(results, key=lambda one: one.number):
        found.setdefault(one.line, {}).setdefault(one.step, {})[_name(one)] = one
    return found


def _name(one: Result) -> str:
    return f"{one.task}/{one.metric}"


def _rank(step: int | None) -> tuple[bool, int]:
    return step is None, step or 0


def compare_runs(
    runs: Sequence[str], results: Iterable[Result], *, higher_is_better: bool | None
) -> list[Comparison]:
    """Compare the steps of each run, and runs with the first one, per metric.

    Args:
        runs: their names, in the order of the answer.
        results: of these runs; those without a step are left out.
        higher_is_better: which direction is better; None: what the evaluator says of each metric.

    Returns:
        For each metric, by name, weights, profile and settings: one comparison per run that has it.
    """
    stepped = [one for one in results if one.step is not None and one.run in runs]
    order = {run: place for place, run in enumerate(runs)}

    def key(one: Result) -> tuple[str, str, str, str, str, int]:
        return one.task, one.metric, *one.line[1:], order[one.run]

    found = list[Comparison]()
    for _, of_metric in groupby(sorted(stepped, key=key), key=lambda one: key(one)[:-1]):
        first: dict[int, Result] | None = None
        for run, series in groupby(of_metric, key=lambda one: one.run):
            steps = _by_step(series)
            found.append(_compare(steps, first, higher_is_better=higher_is_better))
            if run == runs[0]:
                first = steps
    return found


def best_of(results: Sequence[Result], *, higher_is_better: bool | None = None) -> Result | None:
    """Return the best result, of equals the first; None if no direction is known to be better.

    Args:
        results: of a metric, one for each step, by rising step; at least one.
        higher_is_better: which direction is better; None: what the evaluator says of the last one.
    """
    if higher_is_better is None:
        higher_is_better = results[-1].higher_is_better
    if higher_is_better is None:
        return None
    sign = 1 if higher_is_better else -1
    return max(results, key=lambda one: sign * one.value)


def _by_step(series: Iterable[Result]) -> dict[int, Result]:
    """Return the newest result of every step, by step."""
    newest = {one.step: one for one in sorted(series, key=lambda one: one.number)}
    return {step: newest[step] for step in sorted(step for step in newest if step is not None)}


def _compare(
    steps: Mapping[int, Result],
    first: Mapping[int, Result] | None,
    *,
    higher_is_better: bool | None,
) -> Comparison:
    last = steps[max(steps)]
    best = best_of(list(steps.values()), higher_is_better=higher_is_better)
    since_best = None if best is None else Difference.of(last, best)
    alone = Comparison(last, best, steps.get(BASE_STEP), since_best)
    shared = () if first is None else steps.keys() & first.keys()
    if first is None or not shared:
        return alone
    step = max(shared)
    to_first = Difference.of(steps[step], first[step])
    return Comparison(last, best, alone.base, since_best, steps[step], to_first)
