"""Options that several commands share, and the groups in which `--help` lists them."""

import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ParamSpec, TypeVar, cast

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

from unshard.cli.running.logs import show_logs

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
    "flag",
    "keywords_of",
    "one_of",
    "option",
    "taking",
]

P = ParamSpec("P")
K = TypeVar("K")
Option = tuple[object, OptionInfo]
"""The type of a value, and the option as typer has it, with its default."""

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


def option(
    metavar: str,
    help: str,  # noqa: A002
    group: str | None = None,
    *flags: str,
    default: object = ...,
) -> OptionInfo:
    """Return an option with a value; without flags it is called like its parameter."""
    found: OptionInfo = typer.Option(
        default, *flags, metavar=metavar, help=help, rich_help_panel=group
    )
    return found


def flag(
    name: str,
    help: str,  # noqa: A002
    group: str | None = None,
    default: object = ...,
) -> OptionInfo:
    """Return an option without a value; typer would add `--no-…` to one without a name."""
    found: OptionInfo = typer.Option(default, name, help=help, rich_help_panel=group)
    return found


def one_of(
    *names: str,
    help: str,  # noqa: A002
    group: str | None = None,
    default: object = ...,
) -> OptionInfo:
    """Return an option whose values are shown and completed; `MergeOptions` checks them."""
    found: OptionInfo = typer.Option(
        default,
        metavar="|".join(names),
        help=help,
        rich_help_panel=group,
        autocompletion=lambda: names,
    )
    return found


Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A checkpoint, a directory that contains several, or any directory inside one.",
    ),
]
OutputOption = Annotated[
    Path | None,
    option("OUTPUT", "The same as the argument OUTPUT.", OUTPUT, "--output", "-o"),
]
Json = Annotated[
    bool, flag("--json", "Print one JSON object on stdout; everything else goes to stderr.")
]
Quiet = Annotated[bool, flag("--quiet", "Print errors only.")]


def _value(kind: type, *shown: str, default: object = None) -> Option:
    return kind | None, option(*shown, default=default)


def _choice(*names: str, help: str, group: str, default: object = None) -> Option:  # noqa: A002
    return str | None, one_of(*names, help=help, group=group, default=default)


def _switch(name: str, shown: str, group: str) -> Option:
    return bool, flag(name, shown, group, default=False)


_TABLE: dict[str, Option] = {
    "weights": _choice("model", "ema", help="Which weights.  [default: model]", group=SOURCE),
    "role": _value(
        str,
        "NAME",
        "Whose weights, where a step has several sets: actor (or policy), critic, or the name of "
        "their folder (ref, reward).  [default: actor, policy, model, trainer, the first there is]",
        SOURCE,
    ),
    "step": _value(int, "N", "Which step of a run.  [default: the highest complete one]", SOURCE),
    "also": _value(
        list[Path],
        "DIR",
        "A directory of another node with more files of the same checkpoint; may be repeated.",
        SOURCE,
    ),
    "ep_size": _value(
        int,
        "N",
        "Size of expert parallelism, if the files do not record it (verl's VeOmni).",
        SOURCE,
    ),
    "assume_dim0": _switch(
        "--assume-dim0",
        "Treat plain tensors that differ between ranks as shards along dimension 0.",
        SOURCE,
    ),
    "allow_globals": _value(
        list[str],
        "MODULE.NAME",
        "A tensor subclass to read as the plain tensor it stores; may be repeated.",
        SOURCE,
    ),
    "dtype": _choice(
        *("keep", "config", "base", "bfloat16", "float16", "float32"),
        help="Dtype of floating point tensors. config: as config.json says; base: as in the base "
        "model, tensor by tensor. bf16, fp16 and fp32 are accepted.",
        group=TENSORS,
        default="keep",
    ),
    "keep_fp32": _value(str, "REGEX", "Do not cast tensors with these names.", TENSORS),
    "names": _choice(
        *("hub", "training"),
        help="Tensor names and expert layout as on the Hugging Face hub, or as in training.",
        group=TENSORS,
        default="hub",
    ),
    "include": _value(str, "REGEX", "Write only tensors with these names.", TENSORS),
    "exclude": _value(str, "REGEX", "Leave out tensors with these names.", TENSORS),
    "lora": _choice(
        *("fuse", "adapter", "both"),
        help="Fuse adapters into the weights, write the adapter alone, or both.",
        group=TENSORS,
        default="fuse",
    ),
    "lora_alpha": _value(
        float,
        "ALPHA",
        "lora_alpha of the adapter, if the checkpoint does not record it.",
        TENSORS,
    ),
    "base": _value(
        str,
        "MODEL",
        "The model that training started from, a directory or hub id. It determines which "
        "tensors are expected, their names, dtypes and files, and completes config and tokenizer.",
        BASE,
    ),
    "allow_missing": _switch(
        "--allow-missing",
        "Accept that tensors of the base model or of config.json are missing.",
        BASE,
    ),
    "allow_unexpected": _switch(
        "--allow-unexpected", "Also write tensors that neither of them has.", BASE
    ),
    "config": _value(
        Path,
        "FILE|DIR",
        "A config.json to use instead, or a directory with config, tokenizer and the like.",
        OUTPUT,
    ),
    "extra_state": _switch("--no-extra-state", "Leave out scheduler and random state.", OUTPUT),
    "max_shard_size": _value(
        str, *("SIZE", "Largest weight file.  [default: as in the base model, or 5GB]", OUTPUT)
    ),
    "overwrite": _value(
        str,
        "[=all]",
        "Replace an earlier output of unshard; keep other files there. all: also remove weights, "
        "adapters and other files in the way that unshard did not write.",
        OUTPUT,
        "--overwrite",
    ),
    "push_to_hub": _value(str, "REPO", "Upload the output to this repository afterwards.", OUTPUT),
    "private": _switch("--private", "Make that repository private if it is new.", OUTPUT),
    "dry_run": _switch("--dry-run", "Show the plan and write nothing.", OUTPUT),
    "verify": _choice(
        *("light", "full", "off"),
        help="light: reopen the output; full: also compare every byte, replicas and checksums.",
        group=RUNNING,
        default="light",
    ),
    "workers": _value(int, "N", "Number of threads.  [default: one per core, at most 8]", RUNNING),
    "memory": _value(str, "SIZE", "Total size of all buffers, at most.", RUNNING, default="64MB"),
}
"""The options that are keywords of the functions too, in the order of `--help`."""
_VERBOSE: Option = (
    int,
    typer.Option(
        *(0, "--verbose", "-v"),
        count=True,
        show_default=False,
        help="Print what is read and decided, with times; -vv prints more.",
        callback=show_logs,
    ),
)
# Parameters are called like their flags, which are not always called like the keyword.
_SPELLED = {"allow_globals": "allow_global", "extra_state": "no_extra_state"}


def taking(
    keywords: type, *, but: Collection[str] = (), **other: Option
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Return what gives a command the options of a function, as `**given`, and `--verbose`.

    In `--help` they come before the command's keyword-only parameters, `--verbose` after them.

    Args:
        keywords: those of the function, a TypedDict.
        but: those that the command does not have.
        other: those that mean something else there, by name.
    """
    table = _TABLE | other
    names = [name for name in table if name in keywords.__annotations__ and name not in but]
    added = [_parameter(_SPELLED.get(name, name), table[name]) for name in names]

    def with_options(command: Callable[P, None]) -> Callable[P, None]:
        *own, _ = inspect.signature(command).parameters.values()
        first = [one for one in own if one.kind is not inspect.Parameter.KEYWORD_ONLY]
        last = [*own[len(first) :], _parameter("verbose", _VERBOSE)]
        command.__signature__ = inspect.Signature([*first, *added, *last])  # type: ignore[attr-defined]
        return command

    return with_options


def _parameter(name: str, option: Option) -> inspect.Parameter:
    kind, info = option
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=kind)


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
