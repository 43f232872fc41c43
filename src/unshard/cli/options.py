"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "AllowGlobal",
    "AllowMissing",
    "AllowUnexpected",
    "Also",
    "AssumeDim0",
    "Base",
    "Checkpoint",
    "Config",
    "DryRun",
    "Dtype",
    "EpSize",
    "Exclude",
    "Include",
    "Json",
    "KeepFp32",
    "MaxShardSize",
    "Memory",
    "Names",
    "Overwrite",
    "Private",
    "PushToHub",
    "Quiet",
    "Role",
    "Step",
    "Verify",
    "Weights",
    "Workers",
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
Dtype = Annotated[
    str,
    typer.Option(
        metavar="keep|config|base|bfloat16|float16|float32",
        help="Dtype of floating point tensors; config: what config.json names; base: what the "
        "base model has, tensor by tensor.",
    ),
]
KeepFp32 = Annotated[str | None, typer.Option(metavar="REGEX", help="Tensors that are not cast.")]
Names = Annotated[
    str,
    typer.Option(
        metavar="hub|training",
        help="Tensor names and expert layout as on the hub, or as the training code had them.",
    ),
]
Base = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="The model it was trained from, a directory or hub id: says which tensors are "
        "expected, their names, dtypes and files; completes config and tokenizer.",
    ),
]
AllowMissing = Annotated[
    bool, typer.Option("--allow-missing", help="Tensors of the base may be missing.")
]
AllowUnexpected = Annotated[
    bool, typer.Option("--allow-unexpected", help="Tensors that the base has not are written.")
]
Include = Annotated[
    str | None, typer.Option(metavar="REGEX", help="Write only tensors of these names.")
]
Exclude = Annotated[
    str | None, typer.Option(metavar="REGEX", help="Leave out tensors of these names.")
]
Config = Annotated[
    Path | None,
    typer.Option(help="config.json, or a directory with config, tokenizer and the like."),
]
MaxShardSize = Annotated[
    str | None,
    typer.Option(help="Largest weight file.  [default: as the base has it, or 5GB]"),
]
Workers = Annotated[int | None, typer.Option(help="Threads.  [default: one per core, at most 8]")]
Memory = Annotated[str, typer.Option(help="Bound on all buffers together.")]
Verify = Annotated[
    str,
    typer.Option(
        metavar="light|full|off",
        help="light: reopen the output; full: also compare every byte, replicas, checksums.",
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace the weights of an earlier output; other files stay."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan, write nothing.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print errors only.")]
PushToHub = Annotated[
    str | None, typer.Option(metavar="REPO", help="Then upload it to this repository.")
]
Private = Annotated[
    bool, typer.Option("--private", help="Make that repository private, if it is new.")
]
