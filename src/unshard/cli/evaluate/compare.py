"""`unshard eval compare`: the best and the last step of runs, and how runs differ."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from unshard.cli.evaluate.commands import URL, Csv, HigherIsBetter, ServerUrl, TokenFile, connect
from unshard.cli.evaluate.show import csv_lines
from unshard.cli.evaluate.tables import lay_out_table, terminal_width, write_markdown
from unshard.cli.options import Json
from unshard.errors import UsageError

if TYPE_CHECKING:
    from unshard.evaluate.comparing import Comparison, Difference
    from unshard.evaluate.jobs import Result

__all__ = ["compare"]

_NUMBERS = frozenset(
    {"base", "best", "last", "at step", "value", "last - best", "- first run", "in stderrs"}
)


def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Names of training runs.")],
    higher_is_better: HigherIsBetter = None,
    as_csv: Csv = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    server: ServerUrl = URL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Compare the best step of each run with the last, and runs with the first one named."""
    names = list(dict.fromkeys(runs))
    with connect(server, token_file) as client:
        from unshard.evaluate.comparing import as_results, compare_runs

        found = [one for run in names for one in as_results(client.results(run=run))]
    for run in names:
        if all(one.run != run or one.step is None for one in found):
            raise UsageError(
                f"run {run!r} has no results that belong to a step",
                hint="unshard eval results lists all results of the server",
            )
    compared = compare_runs(names, found, higher_is_better=higher_is_better)
    rows = [one.as_row() for one in compared]
    if as_json:
        print(json.dumps({"comparisons": rows}))
    elif as_csv:
        print("\n".join(csv_lines(list(rows[0]), rows)))
    else:
        print("\n".join(_tables(compared, as_markdown=as_markdown)))


def _tables(compared: "Sequence[Comparison]", *, as_markdown: bool) -> list[str]:
    """Return a table of each run by itself and, if there is something common, one between runs."""
    tables = [[_row_of_run(one) for one in compared]]
    between = [_row_between(one) for one in compared if one.to_first is not None]
    if between:
        tables.append(between)
    lines = list[str]()
    for rows in tables:
        if as_markdown:
            laid_out = write_markdown(rows, numbers=_NUMBERS)
        else:
            laid_out = lay_out_table(rows, numbers=_NUMBERS, width=terminal_width())
        lines += ["", *laid_out] if lines else laid_out
    return lines


def _names(one: "Comparison") -> dict[str, object]:
    return {
        name: getattr(one.last, name) for name in ("task", "metric", "run", "weights", "profile")
    }


def _row_of_run(one: "Comparison") -> dict[str, object]:
    return {
        **_names(one),
        "base": _value(one.base),
        "best": _value(one.best, with_step=True),
        "last": _value(one.last, with_step=True),
        "last - best": _signed(one.since_best),
        "in stderrs": _in_stderrs(one.since_best),
    }


def _row_between(one: "Comparison") -> dict[str, object]:
    return {
        **_names(one),
        "at step": None if one.common is None else one.common.step,
        "value": _value(one.common),
        "- first run": _signed(one.to_first),
        "in stderrs": _in_stderrs(one.to_first),
    }


def _value(one: "Result | None", *, with_step: bool = False) -> str | None:
    """Return a value, with its standard error, and its step before it."""
    if one is None:
        return None
    spread = "" if one.stderr is None else f" \u00b1 {one.stderr:.2g}"
    return (f"{one.step}: " if with_step else "") + f"{one.value:.4g}{spread}"


def _signed(one: "Difference | None") -> str | None:
    return None if one is None else f"{one.value:+.4g}"


def _in_stderrs(one: "Difference | None") -> str | None:
    return None if one is None or one.stderrs is None else f"{one.stderrs:+.1f}"
