"""The table of runs' results, which `compare` prints, and which trainers log when a run ends."""

import shlex
from collections.abc import Mapping, Sequence

from unshard.evaluate.client.v1 import EvalClient
from unshard.evaluate.comparing import (
    Difference,
    MetricComparison,
    as_results,
    compare_runs,
    describe_settings,
)
from unshard.evaluate.jobs import Result
from unshard.evaluate.tables import Row, lay_out_table, write_markdown, write_number

MOST_METRICS = 40  # rows of a summary
_NUMBERS = frozenset(
    {"base", "best", "last", "at step", "value", "last - best", "- first run", "in stderrs"}
)


def summarise(client: EvalClient, run: str) -> str:
    """Return the best and the last step of a run per metric, as a table; or "" without any results.

    `run` is the run's directory, or the name of one or several runs.

    Raises:
        UnshardError: the server does not answer.
    """
    results = as_results(client.results(run=run))
    labels = list(dict.fromkeys(one.run for one in results))
    compared = compare_runs(labels, results, higher_is_better=None)
    if not compared:
        return ""
    lines = tables_of(compared[:MOST_METRICS])
    if (left := len(compared) - MOST_METRICS) > 0:
        lines.append(f"... and {left} more: unshard eval compare {shlex.join(labels)}")
    return "\n".join([f"evaluations of {', '.join(labels)}:", *lines])


def tables_of(
    compared: Sequence[MetricComparison], *, as_markdown: bool = False, width: int | None = None
) -> list[str]:
    """Return a table with a row per metric and run and, if runs share steps, one of differences.

    `compared` is not empty. `width` is that of the terminal, in cells; None: unlimited.
    """
    settings = describe_settings(one.last for one in compared)
    tables: list[Sequence[Row]] = [[_row_of_run(one, settings) for one in compared]]
    between = [_row_between(one, settings) for one in compared if one.to_first is not None]
    if between:
        tables.append(between)
    lines = list[str]()
    for rows in tables:
        if as_markdown:
            laid_out = write_markdown(rows, numbers=_NUMBERS)
        else:
            laid_out = lay_out_table(rows, numbers=_NUMBERS, width=width)
        lines += ["", *laid_out] if lines else laid_out
    return lines


def _keys(one: MetricComparison, settings: Mapping[tuple[str, str], str]) -> dict[str, object]:
    names = ("task", "metric", "run", "weights", "profile")
    keys = {name: getattr(one.last, name) for name in names}
    if any(settings.values()):
        keys["settings"] = settings[one.last.profile, one.last.settings]
    return keys


def _row_of_run(one: MetricComparison, settings: Mapping[tuple[str, str], str]) -> Row:
    return {
        **_keys(one, settings),
        "base": _value(one.base),
        "best": _value(one.best, with_step=True),
        "last": _value(one.last, with_step=True),
        **_difference("last - best", one.since_best),
    }


def _row_between(one: MetricComparison, settings: Mapping[tuple[str, str], str]) -> Row:
    return {
        **_keys(one, settings),
        "at step": one.common and one.common.step,
        "value": _value(one.common),
        **_difference("- first run", one.to_first),
    }


def _value(result: Result | None, *, with_step: bool = False) -> str | None:
    """Return a value, with its standard error, and its step before it."""
    if result is None:
        return None
    spread = "" if result.stderr is None else f" \u00b1 {write_number(result.stderr, 2)}"
    return (f"{result.step}: " if with_step else "") + write_number(result.value, 4) + spread


def _difference(heading: str, difference: Difference | None) -> dict[str, str | None]:
    if difference is None:
        return {heading: None, "in stderrs": None}
    stderrs = None if difference.stderrs is None else f"{difference.stderrs:+.1f}"
    return {heading: write_number(difference.value, 4, sign="+"), "in stderrs": stderrs}
