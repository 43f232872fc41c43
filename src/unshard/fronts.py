"""How each front names the options that messages mention.

A message has options as `unshard merge` has them, and marks them: `⟦--overwrite⟧`,
`⟦--lora-alpha N⟧`. A front is what shows the message: a command of ours, a command that replaces
another tool's, or Python. It writes the options that it has in its own way, and for others it gives
the line of `unshard merge` to use instead.
"""

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, get_origin

from unshard.keywords import OPTIONS

_SPELLED = {"allow_globals": "allow-global", "extra_state": "no-extra-state"}


def spell(keyword: str) -> str:
    """Return the name of the option that a keyword of the functions is on the command line."""
    return _SPELLED.get(keyword, keyword.replace("_", "-"))


MERGE_OPTIONS = {
    spell(name): ""
    if one.kind is bool or one.metavar.startswith("[")
    else one.metavar or name.upper()
    for name, one in OPTIONS.items()
} | {"all-steps": ""}
"""The options of `unshard merge` that messages may name, each with a placeholder for its value."""
OTHER_OPTIONS = {"load": "", "against": "PATH", "coefficients": "X,Y", "last": "N", "every": "N"}
OTHER_OPTIONS |= dict.fromkeys(("atol", "rtol", "ema-decay"), "X")
"""Those of `verify` and `average`, which have functions in Python too."""
_ALL = MERGE_OPTIONS | OTHER_OPTIONS
_SEQUENCES = {spell(name) for name, one in OPTIONS.items() if get_origin(one.kind) is list}
_IN_PYTHON = {option: keyword for keyword, option in _SPELLED.items()}

_MARKED = re.compile(r"⟦(--([a-z0-9-]+)(?:[ =]([^⟧]*))?)⟧")
_PLAIN = re.compile(r"[\w|./,:+-]+")
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?")


class Mention(NamedTuple):
    """An option that a text mentions.

    Attributes:
        text: what the text has: "--base '/a b'".
        option: its name without the dashes.
        value: its value, unquoted, or a placeholder: "MODEL"; None: the option alone.
        after: the value as it follows the option's name in a shell: " '/a b'", "=all", "".
    """

    text: str
    option: str
    value: str | None
    after: str


class Text(str):
    """A text of which the options are data; as a `str` it has them as `unshard merge` has.

    The sum of texts has the options of both; what f-strings and `join` make of a text is plain.

    Attributes:
        marked: the text with the marks.
        parts: the options, and what is between them.
    """

    __slots__ = ("marked", "parts")
    marked: str
    parts: tuple[str | Mention, ...]

    def __new__(cls, marked: str) -> Self:
        """Take a text with its marks; one without any is plain."""
        made = super().__new__(cls, _MARKED.sub(r"\1", marked))
        between, *found = _MARKED.split(marked)
        parts: list[str | Mention] = [between]
        for text, option, given, after in zip(*(found[n::4] for n in range(4)), strict=True):
            is_quoted = given is not None and given[:1] == given[-1:] == "'"
            value = given[1:-1].replace("'\"'\"'", "'") if is_quoted else given
            parts += [Mention(text, option, value, _after(option, value)), after]
        made.marked, made.parts = marked, tuple(parts)
        return made

    def __add__(self, other: str) -> "Text":
        return Text(self.marked + marked(other))

    def __radd__(self, other: str) -> "Text":
        return Text(other + self.marked)


def marked(text: str) -> str:
    """Return a text with the marks of its options."""
    return text.marked if isinstance(text, Text) else text


def _after(option: str, value: str | None) -> str:
    if value is None:
        return ""
    quoted = value if _PLAIN.fullmatch(value) else shlex.quote(value)
    return f" {quoted}" if _ALL.get(option, "?") else f"={quoted}"


class Front(Protocol):
    """What shows messages."""

    def name(self, mention: Mention) -> str | None:
        """Return how this front writes an option, or None if it does not have it."""

    def instead(self, mention: Mention) -> str:
        """Return the line to use for an option that it does not have."""


def line_of(command: str, arguments: Sequence[str], options: Mapping[str, object]) -> str:
    """Return a command line to paste.

    Args:
        command: "unshard merge".
        arguments: paths.
        options: parameters of `unshard.merge` by name; booleans are flags.
    """
    parts = [command, *map(shlex.quote, arguments)]
    for name, value in options.items():
        option = spell(name)
        parts.append(f"--{option}{_after(option, None if isinstance(value, bool) else str(value))}")
    return " ".join(parts)


def call_of(function: str, arguments: Sequence[str], options: Mapping[str, object]) -> str:
    """Return a call of Python without its last bracket; see `line_of`."""
    named = (f"{name}={value!r}" for name, value in options.items())
    return f"{function}({', '.join([*map(repr, arguments), *named])}"


def render(text: str, front: Front) -> tuple[str, list[str]]:
    """Return a text as a front writes it, and the lines to use for what it names but lacks."""
    shown, lines = "", []
    for part in text.parts if isinstance(text, Text) else (text,):
        if isinstance(part, str):
            shown += part
            continue
        written = front.name(part)
        if written is None and part.option in MERGE_OPTIONS:
            lines.append(front.instead(part))
        shown += part.text if written is None else written
    return shown, list(dict.fromkeys(lines))


def reword_warning(text: str, front: Front) -> str:
    """Return a warning as a front shows it: one text, with the lines to use at its end."""
    shown, lines = render(text, front)
    return shown + (f" (use: {'; or: '.join(lines)})" if lines else "")


@dataclass(frozen=True, slots=True)
class Command:
    """A command line.

    Attributes:
        own: the options that it has, by the names of `unshard merge`; None: all.
        line: the line of `unshard merge` that does what it does.
    """

    own: Mapping[str, str] | None = None
    line: str = "unshard merge CHECKPOINT OUTPUT"

    def name(self, mention: Mention) -> str | None:
        """Return how this command writes an option, or None if it does not have it."""
        name = f"--{mention.option}" if self.own is None else self.own.get(mention.option)
        return None if name is None else f"{name}{mention.after}"

    def instead(self, mention: Mention) -> str:
        """Return the line of `unshard merge` with an option."""
        option, value = mention.option, mention.value
        others = re.sub(rf" --{option}(?= |$)", "", self.line)
        value = (MERGE_OPTIONS[option] if value is None else value).split("|")[0]
        return f"{others} --{option}{_after(option, value or None)}"


@dataclass(frozen=True, slots=True)
class Python:
    """A function or method.

    Attributes:
        own: the parameters that it has; None: all those of the functions of `unshard`.
        call: the call of `unshard.merge` that does what it does, without the last bracket.
    """

    own: Collection[str] | None = None
    call: str = "unshard.merge(checkpoint, output"

    def name(self, mention: Mention) -> str | None:
        """Return how Python writes an option, or None if the function does not have it."""
        is_known = mention.option in _ALL and (self.own is None or _keyword(mention) in self.own)
        return _assigned(mention, "…") if is_known else None

    def instead(self, mention: Mention) -> str:
        """Return the call of `unshard.merge` with a parameter."""
        return f"{self.call}, {_assigned(mention, '...')})"


def _keyword(mention: Mention) -> str:
    return _IN_PYTHON.get(mention.option, mention.option.replace("-", "_"))


def _assigned(mention: Mention, unknown: str) -> str:
    """Write an option as Python does; `unknown` if no value is given."""
    option, value = mention.option, mention.value
    if option == "all-steps":
        return "unshard.merge_all"
    if value is None and not _ALL[option]:
        shown = str(option != "no-extra-state")
    elif value in (None, _ALL[option], "N"):
        shown = unknown
    elif _NUMBER.fullmatch(value):
        shown = value
    else:
        shown = repr([value]) if option in _SEQUENCES else " or ".join(map(repr, value.split("|")))
    return f"{_keyword(mention)}={shown}"


PYTHON = Python()
"""The functions of `unshard`."""
