"""`unshard eval compare`: the best and the last step of runs, and how runs differ."""

import json
from typing import Annotated

from unshard.cli.evaluate.commands import URL, Csv, HigherIsBetter, ServerUrl, TokenFile, connect
from unshard.cli.evaluate.show import csv_lines
from unshard.cli.options import Json, flag
from unshard.cli.parser.parameters import argument
from unshard.errors import UsageError
from unshard.evaluate.tables import terminal_width


def compare(
    runs: Annotated[list[str], argument("RUN...", "Names of training runs.")],
    higher_is_better: HigherIsBetter = None,
    as_csv: Csv = False,
    as_markdown: Annotated[bool, flag("--markdown", "Print Markdown.")] = False,
    server: ServerUrl = URL,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Compare the best step with the last. Runs are compared with the first one named."""
    names = list(dict.fromkeys(runs))
    with connect(server, token_file) as client:
        from unshard.evaluate.comparing import as_results, compare_runs
        from unshard.evaluate.summary import tables_of

        by_name = {run: as_results(client.results(run=run)) for run in names}
    for run, its in by_name.items():
        if all(one.step is None for one in its):
            raise UsageError(
                f"run {run!r} has no results that belong to a step",
                hint="unshard eval results lists all results of the server",
            )
    found = [one for its in by_name.values() for one in its]
    labels = list(dict.fromkeys(one.run for one in found))  # of a name there may be several
    compared = compare_runs(labels, found, higher_is_better=higher_is_better)
    rows = [one.as_row() for one in compared]
    if as_json:
        print(json.dumps({"comparisons": rows}))
    elif as_csv:
        print("\n".join(csv_lines(list(rows[0]), rows)))
    else:
        print("\n".join(tables_of(compared, as_markdown=as_markdown, width=terminal_width())))
