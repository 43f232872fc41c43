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
from unshard.cli.show import listening

if TYPE_CHECKING:
    from unshard.api import Comparison
    from unshard.write.comparison import Loading, TensorComparison

__all__ = ["verify"]

_DIFFERENT = 1
_SHOWN = 20


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
        _print(found)
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


def _print(found: "Comparison") -> None:
    how = "bit by bit" if found.atol == found.rtol == 0 else "within the tolerances"
    equal = len(found.tensors) - len(found.different)
    cast = [one for one in found.tensors if one.cast and one.equal]
    print(f"compared    {len(found.tensors)} tensors, {how}")
    print(f"equal       {equal}" + (f" ({len(cast)} after a cast to our dtype)" if cast else ""))
    print(f"different   {len(found.different)}")
    _print_some([_line(one) for one in found.different])
    for title, names in (
        ("missing", found.missing),
        ("unexpected", found.unexpected),
        ("NaN in", [one.name for one in found.with_nan]),
        ("all zero", [one.name for one in found.all_zero]),
    ):
        if names:
            print(f"{title:<11} {len(names)}")
            _print_some(list(names))
    if found.loading is not None:
        _print_loading(found.loading)
    print("the models are " + ("the same" if found.equal else "not the same"))


def _print_loading(loading: "Loading") -> None:
    if loading.complete:
        print(f"loads       as {loading.model_class}: every parameter is there, in its shape")
        return
    print(f"loads       as {loading.model_class}, but:")
    mismatched = (
        f"{one.name}: shape {_shape(one.found)}, not {_shape(one.expected)}"
        for one in loading.mismatched
    )
    missing = (f"{name}: missing" for name in loading.missing)
    unexpected = (f"{name}: unexpected" for name in loading.unexpected)
    _print_some([*missing, *unexpected, *mismatched])


def _print_some(lines: list[str]) -> None:
    for line in lines[:_SHOWN]:
        print(f"  {line}")
    if len(lines) > _SHOWN:
        print(f"  and {len(lines) - _SHOWN} more")


def _line(one: "TensorComparison") -> str:
    if one.values is None:
        return f"{one.name}: shape {_shape(one.shape_ours)}, not {_shape(one.shape_theirs)}"
    values = one.values
    parts = [f"{values.different:,} of {values.elements:,} elements"]
    if not one.cast and one.dtype_ours != one.dtype_theirs:
        parts.insert(0, f"{one.dtype_ours}, not {one.dtype_theirs}")
    if values.different and not values.different_values:
        parts.append("in their bits only")
    else:
        parts.append(f"by up to {values.max_abs_diff:.3g} ({values.max_rel_diff:.3g} relative)")
    if values.nans_ours != values.nans_theirs:
        parts.append(f"NaN {values.nans_ours:,}, not {values.nans_theirs:,}")
    parts.append(f"norm {values.norm_ours:.6g}, not {values.norm_theirs:.6g}")
    return f"{one.name}: {', '.join(parts)}"


def _shape(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes)) or "()"
