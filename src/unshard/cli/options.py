"""Options that several commands share, and their groups in `--help`."""

import inspect
import logging
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar, cast

import click

from unshard.cli.parser.parameters import Argument, Spec, argument
from unshard.fronts import spell
from unshard.keywords import DEFAULTS, GROUPS, MOST_USED, OptionRow

P = ParamSpec("P")
K = TypeVar("K")
TypedSpec = tuple[object, Spec]
"""The type of an option's value, and its `Spec` with a default."""

CHECKPOINT = "Checkpoint"
OUTPUT = "Output"

_SHORT, _MANY = "unshard.short", 30  # with more options, `-h` lists only those used most

_FLAGS = {"push_to_hub": ("--push-to-hub", "--push")}
_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


class Grouped(click.Command):
    """A command whose `--help` lists its options by group, in plain text."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Accept `--overwrite` without a value: the word after it is not its value."""
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[_SHORT] = "-h" in args[:end] and len(self.params) > _MANY
        options = ["--overwrite=ours" if arg == "--overwrite" else arg for arg in args[:end]]
        return super().parse_args(ctx, options + args[end:])

    def sections(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        """Return the parameters by group, in the order of their declaration."""
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
        """Write a section per group."""
        for title, records in self.sections(ctx).items():
            with formatter.section(title):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples; after short help, also how to list all options."""
        from unshard.cli.parser.examples import EXAMPLES

        start = f"unshard {ctx.command_path.rpartition('unshard ')[2]} "
        lines = [line for line in EXAMPLES.splitlines() if f"{line} ".startswith(start)]
        with formatter.section("Examples"):
            formatter.write("".join(f"  {line}\n" for line in lines))
        if ctx.meta.get(_SHORT):
            kinds = [parameter.param_type_name for parameter in self.get_params(ctx)]
            count = kinds.count("option")
            formatter.write(f"\n--help shows all {count} options.\n")


def option(
    metavar: str,
    help: str,  # noqa: A002
    group: str | None = None,
    *flags: str,
    default: object = ...,
    **more: Any,
) -> Spec:
    """Return an option with a value; by default it has the name of its parameter."""
    return Spec(metavar, help, group, flags, default, more=more)


def flag(
    name: str,
    help: str,  # noqa: A002
    group: str | None = None,
    *also: str,
    default: object = ...,
) -> Spec:
    """Return a flag: an option without a value."""
    return Spec("", help, group, (name, *also), default)


def one_of(
    names: Collection[str],
    help: str,  # noqa: A002
    group: str | None = None,
    default: object = ...,
) -> Spec:
    """Return an option with listed and completed values; `MergeOptions` checks them."""

    def complete(_context: object, _parameter: object, start: str) -> list[str]:
        return [name for name in names if name.startswith(start)]

    return option("|".join(names), help, group, default=default, shell_complete=complete)


def value(kind: type, metavar: str, help: str, group: str) -> TypedSpec:  # noqa: A002
    """Return an option without a default, for `taking`."""
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


def _make_option(name: str, row: OptionRow, group: str) -> TypedSpec:
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


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the current `sys.stderr`, which a progress bar may replace at any time."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _show_logs(context: click.Context, _parameter: object, verbose: int) -> int:
    """Show the log of this command: level info with `-v`, debug with `-vv`."""
    if not verbose:
        return verbose
    logger, handler = logging.getLogger("unshard"), _StderrHandler()
    handler.setFormatter(logging.Formatter("%(relativeCreated)6.0f ms  %(name)s: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(_LEVELS[min(verbose, len(_LEVELS) - 1)])
    context.call_on_close(lambda: logger.setLevel(level))
    context.call_on_close(lambda: logger.removeHandler(handler))
    return verbose


_VERBOSE: TypedSpec = (
    int,
    option(
        "",
        "Print each read and decision, with times; -vv prints more.",
        None,
        *("--verbose", "-v"),
        default=0,
        count=True,
        show_default=False,
        callback=_show_logs,
    ),
)


def taking(
    keywords: type, *, but: Collection[str] = (), **other: TypedSpec
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Return a decorator that adds a function's options, as `**given`, and `--verbose`.

    In `--help` they come before the command's keyword-only parameters, `--verbose` after them.

    Args:
        keywords: the function's keywords, a TypedDict.
        but: keywords to leave out.
        other: options that differ from those of `merge`, by name.
    """
    table = _OPTIONS | other
    names = [name for name in table if name in keywords.__annotations__ and name not in but]
    added = [_parameter(_parameter_name(name), table[name]) for name in names]

    def with_options(command: Callable[P, None]) -> Callable[P, None]:
        *own, _ = inspect.signature(command).parameters.values()
        first = [each for each in own if each.kind is not inspect.Parameter.KEYWORD_ONLY]
        last = [*own[len(first) :], _parameter("verbose", _VERBOSE)]
        command.__signature__ = inspect.Signature([*first, *added, *last])  # type: ignore[attr-defined]
        return command

    return with_options


def _parameter_name(keyword: str) -> str:
    """Return the name of a parameter, after its flag; a keyword may have another name."""
    return spell(keyword).replace("-", "_")


def _parameter(name: str, option: TypedSpec) -> inspect.Parameter:
    kind, spec = option
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=spec, annotation=kind)


def keywords_of(keywords: type[K], given: Mapping[str, object]) -> K:
    """Return the options that `taking` added to a command, as keywords of the function."""
    flags = {name: _parameter_name(name) for name in keywords.__annotations__}
    values = {name: given[flag] for name, flag in flags.items() if flag in given}
    for name in {"also", "allow_globals"} & values.keys():
        values[name] = values[name] or ()
    if "extra_state" in values:
        values["extra_state"] = not values["extra_state"]
    if values.get("overwrite", "") in (None, "ours"):
        values["overwrite"] = values["overwrite"] is not None
    return cast("K", values)
