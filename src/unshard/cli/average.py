"""`unshard average`."""

from pathlib import Path
from typing import Annotated

import typer

from unshard.cli.options import Json, OutputOption, Quiet, keywords_of, option, taking
from unshard.cli.reports import print_report
from unshard.cli.running.guard import front_of
from unshard.cli.show import working
from unshard.errors import UsageError
from unshard.keywords import MergeKeywords

__all__ = ["average"]

_AVERAGE = "Average"


@taking(MergeKeywords, but=("step", "lora", "lora_alpha", "extra_state"))
def average(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(
            metavar="CHECKPOINT",
            help="Checkpoints to average, in this order, or one run, to average all its complete "
            "steps. The last argument is the output directory, which must not exist yet, unless "
            "--output names it.",
        ),
    ],
    coefficients: Annotated[
        str | None,
        option("1,2,3", "Weight of each checkpoint.  [default: all the same]", _AVERAGE),
    ] = None,
    ema_decay: Annotated[
        float | None,
        option(
            "DECAY", "Exponential moving average: each checkpoint moves it by 1 - DECAY.", _AVERAGE
        ),
    ] = None,
    last: Annotated[
        int | None, option("N", "Use only the last N steps of a run.", _AVERAGE)
    ] = None,
    every: Annotated[
        int | None,
        option("N", "Use every Nth step of a run, counting back from the highest.", _AVERAGE),
    ] = None,
    *,
    output: OutputOption = None,
    as_json: Json = False,
    quiet: Quiet = False,
    **given: object,
) -> None:
    """Average checkpoints into a Hugging Face directory, in one pass."""
    from unshard import api

    with working(quiet=quiet, front=front_of(average)) as (listener, engine):
        report = api.average(
            *_sources_and_output(checkpoints, output),
            coefficients=_numbers(coefficients),
            ema_decay=ema_decay,
            last=last,
            every=every,
            listener=listener,
            engine=engine,
            **keywords_of(MergeKeywords, given),
        )
    print_report(report, as_json=as_json, quiet=quiet)


def _sources_and_output(paths: list[Path], option: Path | None) -> tuple[list[Path], Path]:
    """Take the last path as the output, as `cp` does, unless the option names it.

    A path that exists may be a checkpoint: only the option can mean it as the output.
    """
    if option is not None:
        return paths, option
    *sources, last = paths
    if not sources or last.exists():
        raise UsageError(
            "the output is missing",
            expected="a last argument that does not exist yet, or --output OUTPUT",
            found=f"{last} exists" if last.exists() else f"only {last}",
        )
    return sources, last


def _numbers(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(
            f"--coefficients {text}: not numbers", expected="one for each checkpoint: 1,2,3"
        ) from error
