"""`unshard average`."""

from pathlib import Path
from typing import Annotated

import typer

from unshard.cli.guard import front_of
from unshard.cli.options import (
    AllowGlobal,
    AllowMissing,
    AllowUnexpected,
    Also,
    AssumeDim0,
    Base,
    Config,
    DryRun,
    Dtype,
    EpSize,
    Exclude,
    Include,
    Json,
    KeepFp32,
    MaxShardSize,
    Memory,
    Names,
    OutputOption,
    Overwrite,
    Private,
    PushToHub,
    Quiet,
    Role,
    Verify,
    Weights,
    Workers,
    overwriting,
)
from unshard.cli.reports import print_reports
from unshard.cli.show import working
from unshard.errors import UsageError

__all__ = ["average"]

_AVERAGE = "Average"


def average(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(
            metavar="CHECKPOINT",
            help="Checkpoints to average, in this order, or one run, to average all its complete "
            "steps; last the output directory, which must not exist yet, unless --output names it.",
        ),
    ],
    coefficients: Annotated[
        str | None,
        typer.Option(
            metavar="1,2,3",
            help="Weight of each checkpoint.  [default: all the same]",
            rich_help_panel=_AVERAGE,
        ),
    ] = None,
    ema_decay: Annotated[
        float | None,
        typer.Option(
            metavar="DECAY",
            help="Exponential moving average: each checkpoint moves it by 1 - DECAY.",
            rich_help_panel=_AVERAGE,
        ),
    ] = None,
    last: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Use only the last N steps of a run.", rich_help_panel=_AVERAGE
        ),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Use every Nth step of a run, counting back from the highest.",
            rich_help_panel=_AVERAGE,
        ),
    ] = None,
    weights: Weights = None,
    role: Role = None,
    also: Also = None,
    ep_size: EpSize = None,
    assume_dim0: AssumeDim0 = False,
    allow_global: AllowGlobal = None,
    dtype: Dtype = "keep",
    keep_fp32: KeepFp32 = None,
    names: Names = "hub",
    include: Include = None,
    exclude: Exclude = None,
    base: Base = None,
    allow_missing: AllowMissing = False,
    allow_unexpected: AllowUnexpected = False,
    output: OutputOption = None,
    config: Config = None,
    max_shard_size: MaxShardSize = None,
    overwrite: Overwrite = None,
    push_to_hub: PushToHub = None,
    private: Private = False,
    dry_run: DryRun = False,
    verify: Verify = "light",
    workers: Workers = None,
    memory: Memory = "64MB",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Average checkpoints into a Hugging Face directory, in one pass."""
    from unshard import api

    options = api.MergeOptions(
        dtype=dtype,
        keep_fp32=keep_fp32,
        names=names,
        base=base,
        allow_missing=allow_missing,
        allow_unexpected=allow_unexpected,
        include=include,
        exclude=exclude,
        weights=weights,
        role=role,
        also=also or (),
        config=config,
        max_shard_size=max_shard_size,
        workers=workers,
        memory=memory,
        assume_dim0=assume_dim0,
        ep_size=ep_size,
        allow_globals=allow_global or (),
        verify=verify,
        overwrite=overwriting(overwrite),
        dry_run=dry_run,
        push_to_hub=push_to_hub,
        private=private,
    )
    with working(quiet=quiet, front=front_of(average)) as (listener, engine):
        report = api.average(
            *_sources_and_output(checkpoints, output),
            coefficients=_numbers(coefficients),
            ema_decay=ema_decay,
            last=last,
            every=every,
            options=options,
            listener=listener,
            engine=engine,
        )
    print_reports([report], as_list=False, as_json=as_json, quiet=quiet)


def _sources_and_output(paths: list[Path], option: Path | None) -> tuple[list[Path], Path]:
    """Take the last path as the output, as `cp` does, unless the option names it.

    A path that exists may be a checkpoint: only the option can mean it as the output.
    """
    if option is not None:
        return paths, option
    *sources, last = paths
    if not sources or last.exists():
        raise UsageError(
            "no output was given",
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
