"""Options that several commands share, and the groups in which `--help` lists them."""

import inspect
import logging
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar, cast

import click

from unshard.cli.parser.parameters import Argument, Spec, argument
from unshard.fronts import spell
from unshard.keywords import DEFAULTS, GROUPS, MOST_USED
from unshard.keywords import Option as Declared

P = ParamSpec("P")
K = TypeVar("K")
Option = tuple[object, Spec]
"""The type of a value, and how it is given, with its default."""

CHECKPOINT = "Checkpoint"
OUTPUT = "Output"

_SHORT, _MANY = "unshard.short", 30  # of a command with more, `-h` lists those used most

_FLAGS = {"push_to_hub": ("--push-to-hub", "--push")}  # of options with two names
_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


class Grouped(click.Command):
    """A command whose `--help` lists its options by their groups, in plain text."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take `--overwrite` without a value, too: the word after it is not its value."""
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[_SHORT] = "-h" in args[:end] and len(self.params) > _MANY
        meant = ["--overwrite=ours" if arg == "--overwrite" else arg for arg in args[:end]]
        return super().parse_args(ctx, meant + args[end:])

    def sections(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        """Return the parameters by group, in the order in which the options are declared."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            group = getattr(parameter, "group", None) or "Options"
            group = "Arguments" if isinstance(parameter, Argument) else group
            if record is not None and ctx.meta.get(_SHORT):
                record = (record[0], record[1].split(". ")[0].rstrip(".") + ".")
                if group != "Arguments":
                    group, record = "Options", record if parameter.name in MOST_USED else None
            if record is not None:
                groups.setdefault(group, []).append(record)
        return {title: records for title, records in groups.items() if records}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section per group."""
        for title, records in self.sections(ctx).items():
            with formatter.section(title):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, and of short help, where the other options are."""
        from unshard.cli.parser.examples import EXAMPLES

        start = f"unshard {ctx.command_path.rpartition('unshard ')[2]} "
        lines = [line for line in EXAMPLES.splitlines() if f"{line} ".startswith(start)]
        with formatter.section("Examples"):
            formatter.write("".join(f"  {line}\n" for line in lines))
        if ctx.meta.get(_SHORT):
            count = sum(one.param_type_name == "option" for one in self.get_params(ctx))
            formatter.write(f"\n--help shows all {count} options.\n")


def option(
    metavar: str,
    help: str,  # noqa: A002
    group: str | None = None,
    *flags: str,
    default: object = ...,
    **more: Any,
) -> Spec:
    """Return an option with a value; without flags it is called like its parameter."""
    return Spec(metavar, help, group, flags, default, more=more)


def flag(
    name: str,
    help: str,  # noqa: A002
    group: str | None = None,
    *also: str,
    default: object = ...,
) -> Spec:
    """Return an option without a value."""
    return Spec("", help, group, (name, *also), default)


def one_of(
    names: Collection[str],
    help: str,  # noqa: A002
    group: str | None = None,
    default: object = ...,
) -> Spec:
    """Return an option whose values are shown and completed; `MergeOptions` checks them."""

    def complete(_context: object, _parameter: object, start: str) -> list[str]:
        return [name for name in names if name.startswith(start)]

    return option("|".join(names), help, group, default=default, shell_complete=complete)


def value(kind: type, metavar: str, help: str, group: str) -> Option:  # noqa: A002
    """Return an option that may be left out, for `taking`."""
    return kind | None, option(metavar, help, group, default=None)


CheckpointArgument = Annotated[
    Path,
    argument(
        "CHECKPOINT",
        "A checkpoint, a directory that contains several, or any directory inside one.",
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


def _make_option(name: str, row: Declared, group: str) -> Option:
    if row.kind is bool:
        return bool, flag(f"--{spell(name)}", row.text, group, default=False)
    default = DEFAULTS.get(name)
    if row.choices:
        return str | None, one_of(row.choices, row.text, group, default)
    flags = _FLAGS.get(name, ())
    return row.kind | None, option(row.metavar, row.text, group, *flags, default=default)


_OPTIONS = {
    name: _make_option(name, row, group)
    for group, rows in GROUPS.items()
    for name, row in rows.items()
}


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever stderr is when a line comes: a progress bar takes its place."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _show_logs(context: click.Context, _parameter: object, verbose: int) -> int:
    """Show the log of this command: of level info for `-v`, of level debug for `-vv`."""
    if not verbose:
        return verbose
    logger, handler = logging.getLogger("unshard"), _Stderr()
    handler.setFormatter(logging.Formatter("%(relativeCreated)6.0f ms  %(name)s: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(_LEVELS[min(verbose, len(_LEVELS) - 1)])
    context.call_on_close(lambda: logger.setLevel(level))
    context.call_on_close(lambda: logger.removeHandler(handler))
    return verbose


_VERBOSE: Option = (
    int,
    option(
        "",
        "Print what is read and decided, with times; -vv prints more.",
        None,
        *("--verbose", "-v"),
        default=0,
        count=True,
        show_default=False,
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
