"""`unshard verify`."""

import json
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unshard.cli.options import (
    AllowGlobal,
    Also,
    AssumeDim0,
    EpSize,
    Json,
    Role,
    Step,
    Weights,
)
from unshard.cli.reports import print_comparison
from unshard.cli.show import listening

if TYPE_CHECKING:
    from unshard.api import Comparison

__all__ = ["verify"]

_DIFFERENT = 1


def verify(
    output: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="A merged model: a directory, or one file.")
    ],
    against: Annotated[
        Path,
        typer.Option(metavar="PATH", help="The checkpoint, or a Hugging Face model, to compare."),
    ],
    atol: Annotated[float, typer.Option(help="Allowed |ours - theirs|; with --rtol added.")] = 0.0,
    rtol: Annotated[float, typer.Option(help="Allowed |ours - theirs| / |theirs|.")] = 0.0,
    load: Annotated[
        bool,
        typer.Option(
            "--load", help="Also load names and shapes with transformers (extra `torch`)."
        ),
    ] = False,
    names: Annotated[
        str | None,
        typer.Option(
            metavar="hub|training",
            help="Tensor names that the output was given.  [default: as its record says]",
        ),
    ] = None,
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The base model that merge was given.")
    ] = None,
    include: Annotated[
        str | None, typer.Option(metavar="REGEX", help="As merge.  [default: as its record says]")
    ] = None,
    exclude: Annotated[
        str | None, typer.Option(metavar="REGEX", help="As merge.  [default: as its record says]")
    ] = None,
    lora_alpha: Annotated[
        float | None, typer.Option(help="As merge.  [default: as its record says]")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="config.json to convert by.  [default: the output's own]")
    ] = None,
    weights: Weights = None,
    role: Role = None,
    step: Step = None,
    also: Also = None,
    workers: Annotated[
        int | None, typer.Option(help="Threads.  [default: one per core, at most 8]")
    ] = None,
    memory: Annotated[str, typer.Option(help="Bound on all buffers together.")] = "64MB",
    assume_dim0: AssumeDim0 = False,
    ep_size: EpSize = None,
    allow_global: AllowGlobal = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors only.")] = False,
) -> None:
    """Compare every tensor of a merged model with a checkpoint or another model.

    Exact, bit by bit, unless --atol or --rtol is given. Exit code 1: compared, and different.
    """
    from unshard import api

    with listening(quiet=quiet) as listener:
        found = api.verify(
            output,
            against,
            atol=atol,
            rtol=rtol,
            load=load,
            names=names,
            base=base,
            include=include,
            exclude=exclude,
            lora_alpha=lora_alpha,
            config=config,
            weights=weights,
            role=role,
            step=step,
            also=also or (),
            workers=workers,
            memory=memory,
            assume_dim0=assume_dim0,
            ep_size=ep_size,
            allow_globals=allow_global or (),
            listener=listener,
        )
    if as_json:
        print(_as_json(found))
    elif not quiet:
        print_comparison(found)
    if not found.equal:
        raise typer.Exit(_DIFFERENT)


def _as_json(found: "Comparison") -> str:
    counts = {
        "equal": found.equal,
        "compared": len(found.tensors),
        "different": len(found.different),
    }
    return json.dumps(_finite(counts | asdict(found)))


def _finite(value: object) -> object:
    """Return a value in which NaN and infinity, for which JSON has no numbers, are text."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value
