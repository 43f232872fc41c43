"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "AllowGlobal",
    "Also",
    "AssumeDim0",
    "Checkpoint",
    "EpSize",
    "Json",
    "Role",
    "Step",
    "Weights",
]

Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A checkpoint, a directory of several, or any directory inside one.",
    ),
]
Weights = Annotated[
    str | None, typer.Option(metavar="model|ema", help="Which weights.  [default: model]")
]
Role = Annotated[
    str | None,
    typer.Option(metavar="actor|critic", help="Which role; needed only where both exist."),
]
Step = Annotated[
    int | None, typer.Option(help="Which step of several.  [default: the highest complete one]")
]
Also = Annotated[
    list[Path] | None,
    typer.Option(help="Another node's directory, with more files of the same checkpoint."),
]
EpSize = Annotated[
    int | None,
    typer.Option(
        help="Size of the expert parallelism, where the files do not record it (verl's VeOmni)."
    ),
]
AssumeDim0 = Annotated[
    bool,
    typer.Option(
        "--assume-dim0",
        help="Take plain tensors that differ between ranks as shards along dimension 0.",
    ),
]
AllowGlobal = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE.NAME", help="A tensor subclass to read as the plain tensor it stores."
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout; all else goes to stderr.")
]
