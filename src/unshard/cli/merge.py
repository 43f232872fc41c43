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
            metavar="keep|config|bfloat16|float16|float32",
            help="Dtype of floating point tensors; config: what config.json names.",
        ),
    ] = "keep",
    weights: Weights = None,
    role: Role = None,
    step: Step = None,
    also: Also = None,
    config: Annotated[
        Path | None,
        typer.Option(help="config.json, or a directory with config, tokenizer and the like."),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file.")] = "5GB",
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
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors only.")] = False,
) -> None:
    """Merge a sharded checkpoint into a Hugging Face directory."""
    from unshard import api

    with listening(quiet=quiet) as listener:
        report = api.merge(
            checkpoint,
            output,
            dtype=dtype,
            weights=weights,
            role=role,
            step=step,
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
            listener=listener,
        )
    if as_json:
        print(json.dumps(asdict(report)))
    elif not quiet:
        _print_plan(report) if dry_run else _print_report(report)


def _print_report(report: "Report") -> None:
    rate = report.bytes_written / max(report.seconds, 1e-3)
    files = f"{len(report.files)} file{'s' if len(report.files) > 1 else ''}"
    print(f"merged {report.tensors} tensors of {report.world_size} ranks: {_dtypes(report)}")
    print(
        f"wrote {size(report.bytes_written)} in {files}, {report.seconds:.2f} s ({size(rate)}/s), "
        f"peak memory {size(report.peak_memory_bytes)}"
    )
    if report.companions:
        print(f"with {', '.join(report.companions)}")
    for skipped in report.skipped:
        print(f"left out {skipped.fqn}: {skipped.reason}")
    print(f"saved to {report.output}")


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
