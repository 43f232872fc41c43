"""`unshard merge`."""

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
    Checkpoint,
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
    Step,
    Verify,
    Weights,
    Workers,
)
from unshard.cli.reports import print_reports
from unshard.cli.show import working

__all__ = ["merge"]


def merge(
    checkpoint: Checkpoint,
    output: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUTPUT",
            help="Where to; must not exist.  [default: merged/<step> beside the checkpoint]",
        ),
    ] = None,
    dtype: Dtype = "keep",
    keep_fp32: KeepFp32 = None,
    names: Names = "hub",
    base: Base = None,
    allow_missing: AllowMissing = False,
    allow_unexpected: AllowUnexpected = False,
    include: Include = None,
    exclude: Exclude = None,
    lora: Annotated[
        str,
        typer.Option(
            metavar="fuse|adapter|both",
            help="Fuse adapters into the weights, write the adapter alone, or both.",
        ),
    ] = "fuse",
    lora_alpha: Annotated[
        float | None, typer.Option(help="Scale of the adapter, where the checkpoint lacks it.")
    ] = None,
    weights: Weights = None,
    role: Role = None,
    step: Step = None,
    all_steps: Annotated[
        bool, typer.Option("--all-steps", help="Merge every complete step, each by itself.")
    ] = False,
    also: Also = None,
    config: Config = None,
    max_shard_size: MaxShardSize = None,
    workers: Workers = None,
    memory: Memory = "64MB",
    assume_dim0: AssumeDim0 = False,
    ep_size: EpSize = None,
    allow_global: AllowGlobal = None,
    verify: Verify = "light",
    no_extra_state: Annotated[
        bool, typer.Option("--no-extra-state", help="Leave out scheduler and random state.")
    ] = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    push_to_hub: PushToHub = None,
    private: Private = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Merge a sharded checkpoint into a Hugging Face directory."""
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
        lora=lora,
        lora_alpha=lora_alpha,
        weights=weights,
        role=role,
        step=step,
        config=config,
        also=also or (),
        max_shard_size=max_shard_size,
        workers=workers,
        memory=memory,
        assume_dim0=assume_dim0,
        ep_size=ep_size,
        allow_globals=allow_global or (),
        verify=verify,
        extra_state=not no_extra_state,
        overwrite=overwrite,
        dry_run=dry_run,
        push_to_hub=push_to_hub,
        private=private,
    )
    with working(quiet=quiet) as (listener, engine):
        what = (checkpoint, output, options, listener)
        if all_steps:
            reports = api.merge_all(*what, engine=engine)
        else:
            reports = [api.merge_with(*what, engine=engine)]
    print_reports(reports, as_list=all_steps, as_json=as_json, quiet=quiet)
