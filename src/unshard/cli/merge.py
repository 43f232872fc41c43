"""`unshard merge`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unshard.cli.options import (
    AllowGlobal,
    Also,
    AssumeDim0,
    Checkpoint,
    EpSize,
    Json,
    Role,
    Step,
    Weights,
)
from unshard.cli.show import listening, size

if TYPE_CHECKING:
    from unshard.api import Report

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
    dtype: Annotated[
        str,
        typer.Option(
            metavar="keep|config|base|bfloat16|float16|float32",
            help="Dtype of floating point tensors; config: what config.json names; base: what the "
            "base model has, tensor by tensor.",
        ),
    ] = "keep",
    keep_fp32: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Tensors that are not cast.")
    ] = None,
    names: Annotated[
        str,
        typer.Option(
            metavar="hub|training",
            help="Tensor names and expert layout as on the hub, or as the training code had them.",
        ),
    ] = "hub",
    base: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The model it was trained from, a directory or hub id: says which tensors are "
            "expected, their names, dtypes and files; completes config and tokenizer.",
        ),
    ] = None,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Tensors of the base may be missing.")
    ] = False,
    allow_unexpected: Annotated[
        bool, typer.Option("--allow-unexpected", help="Tensors that the base has not are written.")
    ] = False,
    include: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Write only tensors of these names.")
    ] = None,
    exclude: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Leave out tensors of these names.")
    ] = None,
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
    config: Annotated[
        Path | None,
        typer.Option(help="config.json, or a directory with config, tokenizer and the like."),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(help="Largest weight file.  [default: as the base has it, or 5GB]"),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Threads.  [default: one per core, at most 8]")
    ] = None,
    memory: Annotated[str, typer.Option(help="Bound on all buffers together.")] = "64MB",
    assume_dim0: AssumeDim0 = False,
    ep_size: EpSize = None,
    allow_global: AllowGlobal = None,
    verify: Annotated[
        str,
        typer.Option(
            metavar="light|full|off",
            help="light: reopen the output; full: also compare every byte, replicas, checksums.",
        ),
    ] = "light",
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace the weights of an earlier output; other files stay."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan, write nothing.")
    ] = False,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="REPO", help="Then upload it to this repository.")
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Make that repository private, if it is new.")
    ] = False,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors only.")] = False,
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
        overwrite=overwrite,
        dry_run=dry_run,
        push_to_hub=push_to_hub,
        private=private,
    )
    with listening(quiet=quiet) as listener:
        if all_steps:
            reports = api.merge_all(checkpoint, output, options, listener)
        else:
            reports = [api.merge_with(checkpoint, output, options, listener)]
    _print(reports, as_list=all_steps, as_json=as_json, quiet=quiet)


def _print(reports: "list[Report]", *, as_list: bool, as_json: bool, quiet: bool) -> None:
    if as_json:
        fields = [asdict(report) for report in reports]
        print(json.dumps(fields if as_list else fields[0]))
        return
    for report in reports:
        if not quiet:
            _print_plan(report) if report.dry_run else _print_report(report)


def _print_report(report: "Report") -> None:
    rate = report.bytes_written / max(report.seconds, 1e-3)
    files = f"{len(report.files)} file{'s' if len(report.files) > 1 else ''}"
    print(f"merged {report.tensors} tensors of {report.world_size} ranks: {_dtypes(report)}")
    print(
        f"wrote {size(report.bytes_written)} in {files}, {report.seconds:.2f} s ({size(rate)}/s), "
        f"peak memory {size(report.peak_memory_bytes)}"
    )
    if report.changed_from_base is not None:
        changed, compared = report.changed_from_base
        print(f"{changed} of {compared} tensors differ from the base model")
    if report.companions:
        print(f"with {', '.join(report.companions)}")
    for skipped in report.skipped:
        print(f"left out {skipped.fqn}: {skipped.reason}")
    print(f"saved to {report.output}")
    if report.url is not None:
        print(f"pushed to {report.url}")


def _print_plan(report: "Report") -> None:
    print(f"plan: {report.source} -> {report.output} (nothing was written)")
    for name, length in report.files.items():
        print(f"  {name}  {length:,} bytes")
    for name in report.companions:
        print(f"  {name}")
    operations = ", ".join(f"{count} {kind}" for kind, count in report.operations.items())
    print(f"tensors:    {report.tensors} ({_dtypes(report)}), {report.parameters:,} parameters")
    print(f"operations: {operations or 'none'}")
    print(f"reads:      {report.bytes_read:,} bytes")
    print(f"writes:     {report.bytes_written:,} bytes")
    print(f"buffers:    {size(report.memory_bytes)}; the process stays below 128 MB")


def _dtypes(report: "Report") -> str:
    return ", ".join(f"{count} {name}" for name, count in report.dtypes.items())
