"""click commands made from functions; a parameter's annotation describes its option."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args, get_origin

import click


class Spec(NamedTuple):
    """The option or argument of a parameter, in its annotation or as its default.

    Attributes:
        metavar: the placeholder of its value in `--help`; empty for a flag.
        help: its text there.
        group: the title above it there.
        flags: the names of an option; by default the name of the parameter.
        default: its value if it is not given; `...`: the default of the parameter.
        is_argument: whether it is positional.
        more: settings of `click.Option`; `limits` are the lowest and the highest number.
    """

    metavar: str
    help: str
    group: str | None = None
    flags: Sequence[str] = ()
    default: object = ...
    is_argument: bool = False
    more: Mapping[str, Any] = {}


def argument(metavar: str, help: str) -> Spec:  # noqa: A002
    """Return a positional argument."""
    return Spec(metavar, help, is_argument=True)


class Argument(click.Argument):
    """An argument with a text in `--help`."""

    def __init__(self, names: Sequence[str], *, text: str, **more: Any) -> None:
        super().__init__(names, **more)
        self.text = text

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:  # noqa: ARG002
        """Return its name and text."""
        needed = "  [required]" if self.required else ""
        return self.human_readable_name.strip("[]"), f"{self.text}{needed}"


class GroupedOption(click.Option):
    """An option with the title above it in `--help`."""

    group: str | None = None


def command(
    function: Callable[..., None], kind: type[click.Command], **settings: Any
) -> click.Command:
    """Return the click command of a function.

    A parameter `context` gets click's context, whose `args` are the unknown options.
    """
    parameters = inspect.signature(function).parameters
    lists = [name for name, parameter in parameters.items() if _is_list(_type_of(parameter))]
    has_context = "context" in parameters

    @functools.wraps(function)
    def call(**values: Any) -> None:
        if has_context:
            values["context"] = click.get_current_context()
        for name in lists:
            values[name] = list(values[name]) or None
        function(**values)

    params = [_parameter(each) for name, each in parameters.items() if name != "context"]
    name = function.__name__.replace("_", "-")
    return kind(name, callback=call, params=params, help=inspect.getdoc(function), **settings)


def spec_of(parameter: inspect.Parameter) -> Spec:
    """Return the option or argument of a parameter, with its default."""
    annotated: Sequence[Spec] = getattr(parameter.annotation, "__metadata__", ())
    spec = parameter.default if isinstance(parameter.default, Spec) else annotated[0]
    return spec._replace(default=parameter.default) if spec.default is ... else spec


def _type_of(parameter: inspect.Parameter) -> Any:
    """Return the type of a value; X for `X | None`."""
    kind: Any = parameter.annotation
    kind = kind.__origin__ if hasattr(kind, "__metadata__") else kind
    arguments: Sequence[Any] = get_args(kind)
    if NoneType in arguments:
        kind = next(each for each in arguments if each is not NoneType)
    return kind


def _is_list(kind: Any) -> bool:
    return get_origin(kind) is list


def _parameter(parameter: inspect.Parameter) -> click.Parameter:
    spec, kind = spec_of(parameter), _type_of(parameter)
    more = dict(spec.more)
    is_list = _is_list(kind)
    limits = more.pop("limits", None)
    more["type"] = _click_type(get_args(kind)[0] if is_list else kind, limits)
    more["required"] = spec.default is inspect.Parameter.empty
    if not more["required"] and not is_list:
        more["default"] = spec.default
    if spec.is_argument:
        more["nargs"] = -1 if is_list else 1
        shown = spec.metavar if more["required"] else f"[{spec.metavar.strip('[]')}]"
        return Argument([parameter.name], text=spec.help, metavar=shown, **more)
    flags = spec.flags or (f"--{parameter.name.replace('_', '-')}",)
    more |= {"is_flag": True} if kind is bool else {"multiple": is_list}
    more.setdefault("show_default", spec.default != "")
    text, metavar = spec.help, spec.metavar or None
    option = GroupedOption(
        [*flags, parameter.name], help=text, metavar=metavar, show_envvar=True, **more
    )
    option.group = spec.group
    return option


def _click_type(kind: type, limits: tuple[Any, Any] | None) -> Any:
    if limits is not None:
        return (click.IntRange if kind is int else click.FloatRange)(*limits)
    return click.Path(path_type=Path) if kind is Path else kind
