"""`unshard verify`."""

import json
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unshard.cli.options import Json, Quiet, flag, keywords_of, one_of, option, taking
from unshard.cli.reports import print_comparison
from unshard.cli.running.guard import front_of
from unshard.keywords import VerifyKeywords
from unshard.showing import listening

if TYPE_CHECKING:
    from unshard.api import Comparison

__all__ = ["verify"]

_DIFFERENT = 1
_MERGED = "How it was merged"
_AS_MERGE = "As given to merge.  [default: from unshard.json]"
_REGEX = (str | None, option("REGEX", _AS_MERGE, _MERGED, default=None))


@taking(
    VerifyKeywords,
    base=(str | None, option("MODEL", "As given to merge.", _MERGED, default=None)),
    include=_REGEX,
    exclude=_REGEX,
    lora_alpha=(float | None, option("ALPHA", _AS_MERGE, _MERGED, default=None)),
    config=(
        Path | None,
        option(
            "FILE",
            "config.json to convert with.  [default: the output's own]",
            _MERGED,
            default=None,
        ),
    ),
)
def verify(
    output: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="A merged model: a directory, or one file.")
    ],
    against: Annotated[
        Path, option("PATH", "The checkpoint or Hugging Face model to compare it with.")
    ],
    atol: Annotated[float, option("A", "Allowed: |ours - theirs| <= A + R x |theirs|.")] = 0.0,
    rtol: Annotated[float, option("R", "See --atol.")] = 0.0,
    load: Annotated[
        bool, flag("--load", "Also load names and shapes with transformers (extra `torch`).")
    ] = False,
    *,
    names: Annotated[str | None, one_of("hub", "training", help=_AS_MERGE, group=_MERGED)] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    **given: object,
) -> None:
    """Compare every tensor of a merged model with a checkpoint or another model.

    The comparison is exact, bit by bit, unless --atol or --rtol is given. Exit code 1 means that
    the models differ.
    """
    from unshard import api

    with listening(quiet=quiet, front=front_of(verify)) as listener:
        found = api.verify(
            output,
            against,
            atol=atol,
            rtol=rtol,
            load=load,
            names=names,
            listener=listener,
            **keywords_of(VerifyKeywords, given),
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
