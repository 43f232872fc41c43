"""`unshard merge`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unshard.cli.options import (
    SOURCE,
    Checkpoint,
    Json,
    OutputOption,
    Quiet,
    keywords_of,
    taking,
)
from unshard.cli.reports import print_reports, print_steps
from unshard.cli.running.guard import front_of
from unshard.cli.show import working
from unshard.errors import UsageError
from unshard.keywords import MergeKeywords

if TYPE_CHECKING:
    from unshard.api import MergeOptions

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
        typer.Option(
            "--all-steps",
            help="Merge every complete step of a run, each into its own directory.",
            rich_help_panel=SOURCE,
        ),
    ] = False,
    skip_existing: Annotated[
        bool,
        typer.Option(
            "--skip-existing",
            help="With --all-steps: leave out the steps that were merged already.",
            rich_help_panel=SOURCE,
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
    if all_steps or skip_existing:
        _merge_steps(*what, all_steps=all_steps, skip=skip_existing, as_json=as_json, quiet=quiet)
        return
    with working(quiet=quiet, front=front_of(merge)) as (listener, engine):
        report = api.merge_with(*what, listener, engine=engine)
    print_reports([report], as_list=False, as_json=as_json, quiet=quiet)


def _merge_steps(
    run: Path,
    output: Path | None,
    options: "MergeOptions",
    *,
    all_steps: bool,
    skip: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Merge all steps of a run; end with the code of the first that failed."""
    from unshard import api

    if not all_steps:
        raise UsageError("--skip-existing goes with --all-steps")
    with working(quiet=quiet, front=front_of(merge)) as (listener, engine):
        steps = list(api.merge_steps(run, output, options, listener, engine, skip_existing=skip))
    print_steps(steps, as_json=as_json, quiet=quiet)
    failed = [one.error for one in steps if one.error is not None and one.has_failed]
    if failed:
        raise typer.Exit(failed[0].exit_code)


def _one_of_both(argument: Path | None, option: Path | None) -> Path | None:
    if argument is not None and option is not None:
        raise UsageError(f"two outputs: {argument} and --output {option}", hint="leave one out")
    return option if argument is None else argument
