"""Options that several commands share, and the groups in which `--help` lists them."""

import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ParamSpec, TypeVar, cast

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter

__all__ = [
    "OUTPUT",
    "SOURCE",
    "Checkpoint",
    "Grouped",
    "Json",
    "OutputOption",
    "Quiet",
    "keywords_of",
    "one_of",
    "taking",
]

P = ParamSpec("P")
K = TypeVar("K")

SOURCE = "Checkpoint"
TENSORS = "Tensors"
BASE = "Base model"
OUTPUT = "Output"
RUNNING = "Running"


class Grouped(TyperCommand):
    """A command whose `--help` lists its options by their `rich_help_panel`, in plain text."""

    def parse_args(self, ctx: "Context", args: list[str]) -> list[str]:
        """Take `--overwrite` without a value, too: the word after it is not its value."""
        end = args.index("--") if "--" in args else len(args)
        meant = ["--overwrite=ours" if arg == "--overwrite" else arg for arg in args[:end]]
        return super().parse_args(ctx, meant + args[end:])

    def format_options(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        """Write one section per group, in the order in which the options are declared."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            is_argument = parameter.param_type_name == "argument"
            group = getattr(parameter, "rich_help_panel", None) or "Options"
            if record is not None:
                groups.setdefault("Arguments" if is_argument else group, []).append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def one_of(*names: str, help: str, group: str | None = None) -> typer.models.OptionInfo:  # noqa: A002
    """Return an option whose values are shown and completed; `MergeOptions` checks them."""
    found: typer.models.OptionInfo = typer.Option(
        metavar="|".join(names), help=help, rich_help_panel=group, autocompletion=lambda: names
    )
    return found


Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A checkpoint, a directory that contains several, or any directory inside one.",
    ),
]
Weights = Annotated[
    str | None, one_of("model", "ema", help="Which weights.  [default: model]", group=SOURCE)
]
Role = Annotated[
    str | None,
    one_of(
        *("actor", "policy", "critic"),
        help="Which role; policy is another name of the actor. Needed if the checkpoint has both, "
        "or only a critic.",
        group=SOURCE,
    ),
]
Step = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Which step of a run.  [default: the highest complete one]",
        rich_help_panel=SOURCE,
    ),
]
Also = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="DIR",
        help="A directory of another node with more files of the same checkpoint; may be repeated.",
        rich_help_panel=SOURCE,
    ),
]
EpSize = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Size of expert parallelism, if the files do not record it (verl's VeOmni).",
        rich_help_panel=SOURCE,
    ),
]
AssumeDim0 = Annotated[
    bool,
    typer.Option(
        "--assume-dim0",
        help="Treat plain tensors that differ between ranks as shards along dimension 0.",
        rich_help_panel=SOURCE,
    ),
]
AllowGlobal = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE.NAME",
        help="A tensor subclass to read as the plain tensor it stores; may be repeated.",
        rich_help_panel=SOURCE,
    ),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object on stdout; everything else goes to stderr."),
]
Dtype = Annotated[
    str,
    one_of(
        *("keep", "config", "base", "bfloat16", "float16", "float32"),
        help="Dtype of floating point tensors. config: as config.json says; base: as in the base "
        "model, tensor by tensor. bf16, fp16 and fp32 are accepted.",
        group=TENSORS,
    ),
]
KeepFp32 = Annotated[
    str | None,
    typer.Option(
        metavar="REGEX", help="Do not cast tensors with these names.", rich_help_panel=TENSORS
    ),
]
Lora = Annotated[
    str,
    one_of(
        *("fuse", "adapter", "both"),
        help="Fuse adapters into the weights, write the adapter alone, or both.",
        group=TENSORS,
    ),
]
LoraAlpha = Annotated[
    float | None,
    typer.Option(
        metavar="ALPHA",
        help="lora_alpha of the adapter, if the checkpoint does not record it.",
        rich_help_panel=TENSORS,
    ),
]
NoExtraState = Annotated[
    bool,
    typer.Option(
        "--no-extra-state",
        help="Leave out scheduler and random state.",
        rich_help_panel=OUTPUT,
    ),
]
Names = Annotated[
    str,
    one_of(
        *("hub", "training"),
        help="Tensor names and expert layout as on the Hugging Face hub, or as in training.",
        group=TENSORS,
    ),
]
Include = Annotated[
    str | None,
    typer.Option(
        metavar="REGEX", help="Write only tensors with these names.", rich_help_panel=TENSORS
    ),
]
Exclude = Annotated[
    str | None,
    typer.Option(
        metavar="REGEX", help="Leave out tensors with these names.", rich_help_panel=TENSORS
    ),
]
Base = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="The model that training started from, a directory or hub id. It determines which "
        "tensors are expected, their names, dtypes and files, and completes config and tokenizer.",
        rich_help_panel=BASE,
    ),
]
AllowMissing = Annotated[
    bool,
    typer.Option(
        "--allow-missing",
        help="Accept missing tensors, of the base model or by config.json.",
        rich_help_panel=BASE,
    ),
]
AllowUnexpected = Annotated[
    bool,
    typer.Option(
        "--allow-unexpected",
        help="Also write tensors that neither has.",
        rich_help_panel=BASE,
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        *("--output", "-o"),
        metavar="OUTPUT",
        help="The same as the argument OUTPUT.",
        rich_help_panel=OUTPUT,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE|DIR",
        help="A config.json to use instead, or a directory with config, tokenizer and the like.",
        rich_help_panel=OUTPUT,
    ),
]
MaxShardSize = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Largest weight file.  [default: as in the base model, or 5GB]",
        rich_help_panel=OUTPUT,
    ),
]
Overwrite = Annotated[
    str | None,
    typer.Option(
        "--overwrite",
        metavar="[=all]",
        help="Replace an earlier output of unshard; keep other files there. all: also remove "
        "weights, adapters and other files in the way that unshard did not write.",
        rich_help_panel=OUTPUT,
    ),
]
PushToHub = Annotated[
    str | None,
    typer.Option(
        metavar="REPO", help="Then upload the output to this repository.", rich_help_panel=OUTPUT
    ),
]
Private = Annotated[
    bool,
    typer.Option(
        "--private", help="Make that repository private if it is new.", rich_help_panel=OUTPUT
    ),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Show the plan and write nothing.", rich_help_panel=OUTPUT),
]
Verify = Annotated[
    str,
    one_of(
        *("light", "full", "off"),
        help="light: reopen the output; full: also compare every byte, replicas and checksums.",
        group=RUNNING,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Number of threads.  [default: one per core, at most 8]",
        rich_help_panel=RUNNING,
    ),
]
Memory = Annotated[
    str,
    typer.Option(
        metavar="SIZE", help="Total size of all buffers, at most.", rich_help_panel=RUNNING
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print errors only.")]

_TABLE: dict[str, tuple[object, object]] = {
    "weights": (Weights, None),
    "role": (Role, None),
    "step": (Step, None),
    "also": (Also, None),
    "ep_size": (EpSize, None),
    "assume_dim0": (AssumeDim0, False),
    "allow_globals": (AllowGlobal, None),
    "dtype": (Dtype, "keep"),
    "keep_fp32": (KeepFp32, None),
    "names": (Names, "hub"),
    "include": (Include, None),
    "exclude": (Exclude, None),
    "lora": (Lora, "fuse"),
    "lora_alpha": (LoraAlpha, None),
    "base": (Base, None),
    "allow_missing": (AllowMissing, False),
    "allow_unexpected": (AllowUnexpected, False),
    "config": (Config, None),
    "extra_state": (NoExtraState, False),
    "max_shard_size": (MaxShardSize, None),
    "overwrite": (Overwrite, None),
    "push_to_hub": (PushToHub, None),
    "private": (Private, False),
    "dry_run": (DryRun, False),
    "verify": (Verify, "light"),
    "workers": (Workers, None),
    "memory": (Memory, "64MB"),
}
"""The options that are keywords of the functions too, in the order of `--help`."""
_SPELLED = {"allow_globals": "allow_global", "extra_state": "no_extra_state"}


def taking(
    keywords: type, *, but: Collection[str] = (), **other: object
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Return what gives a command the options of a function, as `**given`.

    In `--help` they come before the command's keyword-only parameters.

    Args:
        keywords: those of the function, a TypedDict.
        but: those that the command does not have.
        other: those that mean something else there, by name, as typer has them; default None.
    """
    table = _TABLE | {name: (kind, None) for name, kind in other.items()}
    names = [name for name in table if name in keywords.__annotations__ and name not in but]
    added = [_parameter(_SPELLED.get(name, name), *table[name]) for name in names]

    def with_options(command: Callable[P, None]) -> Callable[P, None]:
        *own, _ = inspect.signature(command).parameters.values()
        first = [one for one in own if one.kind is not inspect.Parameter.KEYWORD_ONLY]
        last = own[len(first) :]
        command.__signature__ = inspect.Signature([*first, *added, *last])  # type: ignore[attr-defined]
        return command

    return with_options


def _parameter(name: str, kind: object, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def keywords_of(keywords: type[K], given: Mapping[str, object]) -> K:
    """Return the options that `taking` gave a command, as keywords of the function."""
    back = {flag: name for name, flag in _SPELLED.items()}
    named = {back.get(name, name): value for name, value in given.items()}
    found = {name: named[name] for name in keywords.__annotations__ if name in named}
    for name in {"also", "allow_globals"} & found.keys():
        found[name] = found[name] or ()
    if "extra_state" in found:
        found["extra_state"] = not found["extra_state"]
    if "overwrite" in found:
        value = found["overwrite"]
        found["overwrite"] = value is not None if value in (None, "ours") else value
    return cast("K", found)
