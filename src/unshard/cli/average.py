"""`unshard average`."""

from pathlib import Path
from typing import Annotated

import typer

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
    Overwrite,
    Private,
    PushToHub,
    Quiet,
    Role,
    Verify,
    Weights,
    Workers,
)
from unshard.cli.reports import print_reports
from unshard.cli.show import working
from unshard.errors import UsageError

__all__ = ["average"]


def average(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(
            metavar="CHECKPOINT...",
            help="Checkpoints, in this order; or one run, all of whose complete steps are taken.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUTPUT", help="Where to; must not exist.")
    ],
    coefficients: Annotated[
        str | None,
        typer.Option(metavar="1,2,3", help="What each checkpoint counts.  [default: all the same]"),
    ] = None,
    ema_decay: Annotated[
        float | None,
        typer.Option(help="Exponential moving average: each checkpoint moves it by 1 - decay."),
    ] = None,
    last: Annotated[
        int | None, typer.Option(help="Of a run, only so many of its highest steps.")
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(help="Of a run, only every N-th step, counted back from the highest."),
    ] = None,
    dtype: Dtype = "keep",
    keep_fp32: KeepFp32 = None,
    names: Names = "hub",
    base: Base = None,
    allow_missing: AllowMissing = False,
    allow_unexpected: AllowUnexpected = False,
    include: Include = None,
    exclude: Exclude = None,
    weights: Weights = None,
    role: Role = None,
    also: Also = None,
    config: Config = None,
    max_shard_size: MaxShardSize = None,
    workers: Workers = None,
    memory: Memory = "64MB",
    assume_dim0: AssumeDim0 = False,
    ep_size: EpSize = None,
    allow_global: AllowGlobal = None,
    verify: Verify = "light",
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    push_to_hub: PushToHub = None,
    private: Private = False,
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
        overwrite=overwrite,
        dry_run=dry_run,
        push_to_hub=push_to_hub,
        private=private,
    )
    with working(quiet=quiet) as (listener, engine):
        report = api.average(
            checkpoints,
            output,
            coefficients=_numbers(coefficients),
            ema_decay=ema_decay,
            last=last,
            every=every,
            options=options,
            listener=listener,
            engine=engine,
        )
    print_reports([report], as_list=False, as_json=as_json, quiet=quiet)


def _numbers(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(
            f"--coefficients {text}: not numbers", expected="one for each checkpoint: 1,2,3"
        ) from error
