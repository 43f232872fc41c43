"""`unshard merge`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unshard.cli.guard import front_of
from unshard.cli.options import (
    OUTPUT,
    SOURCE,
    TENSORS,
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
    OutputOption,
    Overwrite,
    Private,
    PushToHub,
    Quiet,
    Role,
    Step,
    Verify,
    Weights,
    Workers,
    one_of,
    overwriting,
)
from unshard.cli.reports import print_reports, print_steps
from unshard.cli.show import working
from unshard.errors import UsageError

if TYPE_CHECKING:
    from unshard.api import MergeOptions

__all__ = ["merge"]


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
    weights: Weights = None,
    role: Role = None,
    step: Step = None,
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
    also: Also = None,
    ep_size: EpSize = None,
    assume_dim0: AssumeDim0 = False,
    allow_global: AllowGlobal = None,
    dtype: Dtype = "keep",
    keep_fp32: KeepFp32 = None,
    names: Names = "hub",
    include: Include = None,
    exclude: Exclude = None,
    lora: Annotated[
        str,
        one_of(
            *("fuse", "adapter", "both"),
            help="Fuse adapters into the weights, write the adapter alone, or both.",
            group=TENSORS,
        ),
    ] = "fuse",
    lora_alpha: Annotated[
        float | None,
        typer.Option(
            metavar="ALPHA",
            help="lora_alpha of the adapter, if the checkpoint does not record it.",
            rich_help_panel=TENSORS,
        ),
    ] = None,
    base: Base = None,
    allow_missing: AllowMissing = False,
    allow_unexpected: AllowUnexpected = False,
    output_option: OutputOption = None,
    config: Config = None,
    no_extra_state: Annotated[
        bool,
        typer.Option(
            "--no-extra-state",
            help="Leave out scheduler and random state.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
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
        overwrite=overwriting(overwrite),
        dry_run=dry_run,
        push_to_hub=push_to_hub,
        private=private,
    )
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
