"""The table of what runs have reached: what `compare` prints, and what is told when a run ends."""

import shlex
from collections.abc import Mapping, Sequence

from unshard.evaluate.client.v1 import EvalClient
from unshard.evaluate.comparing import (
    Comparison,
    Difference,
    as_results,
    compare_runs,
    describe_settings,
)
from unshard.evaluate.jobs import Result
from unshard.evaluate.tables import Row, lay_out_table, write_markdown, write_number

MOST_METRICS = 40
"""How many rows a summary has; what is left out is said."""

_NUMBERS = frozenset(
    {"base", "best", "last", "at step", "value", "last - best", "- first run", "in stderrs"}
)


def summarise(client: EvalClient, run: str) -> str:
    """Return the best and the last step of a run per metric, as a table.

    Args:
        client: of the server.
        run: the run's directory, or its name: of all runs of that name.

    Returns:
        Nothing if the server has no results of the run that belong to a step.

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
    compared: Sequence[Comparison], *, as_markdown: bool = False, width: int | None = None
) -> list[str]:
    """Return a table of each run by itself and, if there is something common, one between runs.

    Args:
        compared: at least one.
        as_markdown: how tables are written.
        width: of the terminal, cells; None: as wide as it needs.
    """
    named = describe_settings(one.last for one in compared)
    tables: list[Sequence[Row]] = [[_row_of_run(one, named) for one in compared]]
    between = [_row_between(one, named) for one in compared if one.to_first is not None]
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


def _names(one: Comparison, named: Mapping[tuple[str, str], str]) -> dict[str, object]:
    names = ("task", "metric", "run", "weights", "profile")
    told = named[one.last.profile, one.last.settings]
    several = {"settings": told} if any(named.values()) else {}
    return {**{name: getattr(one.last, name) for name in names}, **several}


def _row_of_run(one: Comparison, named: Mapping[tuple[str, str], str]) -> dict[str, object]:
    return {
        **_names(one, named),
        "base": _value(one.base),
        "best": _value(one.best, with_step=True),
        "last": _value(one.last, with_step=True),
        "last - best": _signed(one.since_best),
        "in stderrs": _in_stderrs(one.since_best),
    }


def _row_between(one: Comparison, named: Mapping[tuple[str, str], str]) -> dict[str, object]:
    return {
        **_names(one, named),
        "at step": None if one.common is None else one.common.step,
        "value": _value(one.common),
        "- first run": _signed(one.to_first),
        "in stderrs": _in_stderrs(one.to_first),
    }


def _value(one: Result | None, *, with_step: bool = False) -> str | None:
    """Return a value, with its standard error, and its step before it."""
    if one is None:
        return None
    spread = "" if one.stderr is None else f" \u00b1 {write_number(one.stderr, 2)}"
    return (f"{one.step}: " if with_step else "") + write_number(one.value, 4) + spread


def _signed(one: Difference | None) -> str | None:
    return None if one is None else write_number(one.value, 4, sign="+")


def _in_stderrs(one: Difference | None) -> str | None:
    return None if one is None or one.stderrs is None else f"{one.stderrs:+.1f}"
