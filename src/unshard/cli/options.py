"""Options that several commands share, and the groups in which `--help` lists them."""

import inspect
import logging
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, ParamSpec, TypeVar, cast

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

from unshard.fronts import spell
from unshard.keywords import CHOICES, DEFAULTS, SHARD_SIZE

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter

P = ParamSpec("P")
K = TypeVar("K")
Option = tuple[object, OptionInfo]
"""The type of a value, and the option as typer has it, with its default."""

CHECKPOINT = "Checkpoint"
OUTPUT = "Output"

_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


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
    names: Collection[str],
    help: str,  # noqa: A002
    group: str | None = None,
    default: object = ...,
) -> OptionInfo:
    """Return an option whose values are shown and completed; `MergeOptions` checks them."""
    found = option("|".join(names), help, group, default=default)
    found.autocompletion = lambda: names
    return found


def value(kind: type, metavar: str, help: str, group: str) -> Option:  # noqa: A002
    """Return an option that may be left out, for `taking`."""
    return kind | None, option(metavar, help, group, default=None)


CheckpointArgument = Annotated[
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


class _Row(NamedTuple):
    """A keyword of the functions: its type, its text in `--help`, and how its value is written."""

    kind: type
    text: str
    metavar: str = ""


_TABLE: dict[str, dict[str, _Row]] = {
    CHECKPOINT: {
        "weights": _Row(str, f"Which weights.  [default: {CHOICES['weights'][0]}]"),
        "role": _Row(
            str,
            "Whose weights, where a step has several sets: actor (or policy), critic, or the name "
            "of their folder (ref, reward).  [default: actor, policy, model, trainer, the first "
            "there is]",
            "NAME",
        ),
        "step": _Row(int, "Which step of a run.  [default: the highest complete one]", "N"),
        "also": _Row(
            list[Path],
            "A directory of another node with more files of the same checkpoint; may be repeated. "
            "node:///path is that path on all nodes of a Ray cluster.",
            "DIR",
        ),
        "ep_size": _Row(
            int, "Size of expert parallelism, if the files do not record it (verl's VeOmni).", "N"
        ),
        "assume_dim0": _Row(
            bool, "Treat plain tensors that differ between ranks as shards along dimension 0."
        ),
        "allow_globals": _Row(
            list[str],
            "A tensor subclass to read as the plain tensor it stores; may be repeated.",
            "MODULE.NAME",
        ),
    },
    "Tensors": {
        "dtype": _Row(
            str,
            "Dtype of floating point tensors. config: as config.json says; base: as in the base "
            "model, tensor by tensor. bf16, fp16 and fp32 are accepted.",
        ),
        "quantize": _Row(
            str,
            "Write matrices in block FP8: float8_e4m3fn, and a float32 scale for each block of "
            "128 x 128.",
        ),
        "keep_fp32": _Row(str, "Do not cast tensors with these names.", "REGEX"),
        "names": _Row(
            str, "Tensor names and expert layout as on the Hugging Face hub, or as in training."
        ),
        "include": _Row(str, "Write only tensors with these names.", "REGEX"),
        "exclude": _Row(str, "Leave out tensors with these names.", "REGEX"),
        "lora": _Row(
            str,
            "Fuse adapters into the weights, write the adapter alone, or both, keep its matrices, "
            "or ignore an adapter that is next to the weights.  [default: fuse, but an adapter "
            "next to the weights is an error]",
        ),
        "lora_alpha": _Row(
            float, "lora_alpha of the adapter, if the checkpoint does not record it.", "ALPHA"
        ),
    },
    "Base model": {
        "base": _Row(
            str,
            "The model that training started from, a directory or hub id. It determines which "
            "tensors are expected, their names, dtypes and files, and completes config and "
            "tokenizer.",
            "MODEL",
        ),
        "allow_missing": _Row(
            bool, "Accept that tensors of the base model or of config.json are missing."
        ),
        "allow_unexpected": _Row(bool, "Also write tensors that neither of them has."),
    },
    OUTPUT: {
        "config": _Row(
            Path,
            "A config.json to use instead, or a directory with config, tokenizer and the like.",
            "FILE|DIR",
        ),
        "extra_state": _Row(bool, "Leave out scheduler and random state."),
        "optimizer": _Row(bool, "Write the state of the optimizer too: optimizer.safetensors."),
        "max_shard_size": _Row(
            str, f"Largest weight file.  [default: as in the base model, or {SHARD_SIZE}]", "SIZE"
        ),
        "overwrite": _Row(
            str,
            "Replace an earlier output of unshard; keep other files there. all: also remove "
            "weights, adapters and other files in the way that unshard did not write.",
            "[=all]",
        ),
        "resume": _Row(
            bool,
            "Go on with the finished files of an interrupted merge to the same output, and leave "
            "them if this one is interrupted.",
        ),
        "push_to_hub": _Row(str, "Upload the output to this repository afterwards.", "REPO"),
        "private": _Row(bool, "Make that repository private if it is new."),
        "dry_run": _Row(bool, "Show the plan and write nothing."),
    },
    "Running": {
        "verify": _Row(
            str, "light: reopen the output; full: also compare every byte, replicas and checksums."
        ),
        "workers": _Row(int, "Number of threads.  [default: one per core, at most 8]", "N"),
        "memory": _Row(str, "Total size of all buffers, at most.", "SIZE"),
        "engine": _Row(
            str, "Work on the nodes of a Ray cluster.  [default: the threads of this process]"
        ),
    },
}
"""The options by their groups in `--help`, in its order."""


def _make_option(name: str, row: _Row, group: str) -> Option:
    kind, text, metavar = row
    if kind is bool:
        return bool, flag(f"--{spell(name)}", text, group, default=False)
    default = DEFAULTS.get(name)
    if name in CHOICES:
        return str | None, one_of(CHOICES[name], text, group, default)
    return kind | None, option(metavar, text, group, default=default)


_OPTIONS = {
    name: _make_option(name, row, group)
    for group, rows in _TABLE.items()
    for name, row in rows.items()
}


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever stderr is when a line comes: a progress bar takes its place."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _show_logs(context: typer.Context, verbose: int) -> None:
    """Show the log of this command: of level info for `-v`, of level debug for `-vv`."""
    if not verbose:
        return
    logger, handler = logging.getLogger("unshard"), _Stderr()
    handler.setFormatter(logging.Formatter("%(relativeCreated)6.0f ms  %(name)s: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(_LEVELS[min(verbose, len(_LEVELS) - 1)])
    context.call_on_close(lambda: logger.setLevel(level))
    context.call_on_close(lambda: logger.removeHandler(handler))


_VERBOSE: Option = (
    int,
    typer.Option(
        *(0, "--verbose", "-v"),
        count=True,
        show_default=False,
        help="Print what is read and decided, with times; -vv prints more.",
        callback=_show_logs,
    ),
)


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
    table = _OPTIONS | other
    names = [name for name in table if name in keywords.__annotations__ and name not in but]
    added = [_parameter(_parameter_name(name), table[name]) for name in names]

    def with_options(command: Callable[P, None]) -> Callable[P, None]:
        *own, _ = inspect.signature(command).parameters.values()
        first = [one for one in own if one.kind is not inspect.Parameter.KEYWORD_ONLY]
        last = [*own[len(first) :], _parameter("verbose", _VERBOSE)]
        command.__signature__ = inspect.Signature([*first, *added, *last])  # type: ignore[attr-defined]
        return command

    return with_options


def _parameter_name(keyword: str) -> str:
    """Return what a parameter is called: like its flag, which is not always like the keyword."""
    return spell(keyword).replace("-", "_")


def _parameter(name: str, option: Option) -> inspect.Parameter:
    kind, info = option
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=kind)


def keywords_of(keywords: type[K], given: Mapping[str, object]) -> K:
    """Return the options that `taking` gave a command, as keywords of the function."""
    called = {name: _parameter_name(name) for name in keywords.__annotations__}
    found = {name: given[flag] for name, flag in called.items() if flag in given}
    for name in {"also", "allow_globals"} & found.keys():
        found[name] = found[name] or ()
    if "extra_state" in found:
        found["extra_state"] = not found["extra_state"]
    if found.get("overwrite", "") in (None, "ours"):
        found["overwrite"] = found["overwrite"] is not None
    return cast("K", found)
