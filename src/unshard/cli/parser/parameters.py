"""Commands from functions: each parameter says in its annotation how it is given."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args, get_origin

import click


class Spec(NamedTuple):
    """How a parameter is given on the command line, in its annotation or as its default.

    Attributes:
        metavar: how its value is written in `--help`; of an option without a value, empty.
        help: its text there.
        group: the title under which it is listed there.
        flags: the names of an option; without any it is called like its parameter.
        default: its value if it is not given; `...`: the default of the parameter.
        is_argument: whether it is given by its place.
        more: settings of `click.Option`; `limits` are the least and the highest number.
    """

    metavar: str
    help: str
    group: str | None = None
    flags: Sequence[str] = ()
    default: object = ...
    is_argument: bool = False
    more: Mapping[str, Any] = {}


def argument(metavar: str, help: str) -> Spec:  # noqa: A002
    """Return a parameter that is given by its place."""
    return Spec(metavar, help, is_argument=True)


class Argument(click.Argument):
    """An argument that `--help` describes, as it does an option."""

    def __init__(self, names: Sequence[str], *, text: str, **more: Any) -> None:
        super().__init__(names, **more)
        self.text = text

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:  # noqa: ARG002
        """Return its name, and its text."""
        needed = "  [required]" if self.required else ""
        return self.human_readable_name.strip("[]"), f"{self.text}{needed}"


class Option(click.Option):
    """An option, and under which title it is listed."""

    group: str | None = None


def command(
    function: Callable[..., None], kind: type[click.Command], **settings: Any
) -> click.Command:
    """Return the command that calls a function with what its parameters are given.

    A parameter `context` gets click's own, of which `args` are what the command does not know.
    """
    parameters = inspect.signature(function).parameters
    several = [name for name, one in parameters.items() if _is_list(_type_of(one))]
    has_context = "context" in parameters

    @functools.wraps(function)
    def call(**given: Any) -> None:
        if has_context:
            given["context"] = click.get_current_context()
        for name in several:
            given[name] = list(given[name]) or None
        function(**given)

    made = [_parameter(one) for name, one in parameters.items() if name != "context"]
    name = function.__name__.replace("_", "-")
    return kind(name, callback=call, params=made, help=inspect.getdoc(function), **settings)


def spec_of(parameter: inspect.Parameter) -> Spec:
    """Return how a parameter is given."""
    annotated: Sequence[Spec] = getattr(parameter.annotation, "__metadata__", ())
    found = parameter.default if isinstance(parameter.default, Spec) else annotated[0]
    return found._replace(default=parameter.default) if found.default is ... else found


def _type_of(parameter: inspect.Parameter) -> Any:
    """Return the type of a value; of `X | None`, X."""
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
    made = Option([*flags, parameter.name], help=text, metavar=metavar, show_envvar=True, **more)
    made.group = spec.group
    return made


def _click_type(kind: type, limits: tuple[Any, Any] | None) -> Any:
    if limits is not None:
        return (click.IntRange if kind is int else click.FloatRange)(*limits)
    return click.Path(path_type=Path) if kind is Path else kind
