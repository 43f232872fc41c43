"""`unshard merge`."""

from pathlib import Path
from typing import Annotated

import typer

from unshard.cli.options import (
    SOURCE,
    Checkpoint,
    Json,
    OutputOption,
    Quiet,
    flag,
    keywords_of,
    taking,
)
from unshard.cli.reports import print_report, print_steps
from unshard.cli.running.guard import front_of
from unshard.cli.show import working
from unshard.errors import UsageError
from unshard.keywords import MergeKeywords

__all__ = ["merge"]


@taking(MergeKeywords)
def merge(
    checkpoint: Checkpoint,
    output: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUTPUT",
            help="Output directory; must not exist yet.  [default: merged/<step> next to the "
            "checkpoint]",
        ),
    ] = None,
    *,
    all_steps: Annotated[
        bool,
        flag(
            "--all-steps",
            "Merge every complete step of a run, each into its own directory.",
            SOURCE,
        ),
    ] = False,
    skip_existing: Annotated[
        bool,
        flag(
            "--skip-existing",
            "With --all-steps: leave out the steps that were merged already.",
            SOURCE,
        ),
    ] = False,
    output_option: OutputOption = None,
    as_json: Json = False,
    quiet: Quiet = False,
    **given: object,
) -> None:
    """Merge a sharded checkpoint into a Hugging Face directory."""
    from unshard import api

    options = api.MergeOptions(**keywords_of(MergeKeywords, given))
    what = (checkpoint, _one_of_both(output, output_option), options)
    if skip_existing and not all_steps:
        raise UsageError("--skip-existing needs --all-steps")
    with working(quiet=quiet, front=front_of(merge)) as (listener, engine):
        if not all_steps:
            report = api.merge_with(*what, listener, engine=engine)
        else:
            steps = list(api.merge_steps(*what, listener, engine, skip_existing=skip_existing))
    if not all_steps:
        print_report(report, as_json=as_json, quiet=quiet)
        return
    print_steps(steps, as_json=as_json, quiet=quiet)
    for one in steps:
        if one.error is not None and one.has_failed:
            raise typer.Exit(one.error.exit_code)


def _one_of_both(argument: Path | None, option: Path | None) -> Path | None:
    if argument is not None and option is not None:
        raise UsageError(f"two outputs: {argument} and --output {option}", hint="leave one out")
    return option if argument is None else argument
