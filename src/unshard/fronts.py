"""How each front names the options that messages mention.

A message names options as `unshard merge` has them: `--overwrite`, `--lora-alpha N`. A front is
what shows the message: a command of ours, a command that replaces another tool's, or Python. It
writes the options that it has in its own way, and for others it gives the line of `unshard merge`
to use instead. Text in backticks is a line of another program and is kept as it is.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, get_origin

from unshard.keywords import CHOICES, OPTIONS

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
_OTHERS = {  # of `verify` and `average`, which have functions in Python too
    "load": "",
    "atol": "X",
    "rtol": "X",
    "against": "PATH",
    "coefficients": "X,Y",
    "ema-decay": "X",
    "last": "N",
    "every": "N",
}
_SEQUENCES = {spell(name) for name, one in OPTIONS.items() if get_origin(one.kind) is list}
_IN_PYTHON = {option: keyword for keyword, option in _SPELLED.items()}

_MENTION = re.compile(
    r"(?<![\w/.-])--(?P<option>[a-z][a-z0-9]*(?:-[a-z0-9]+)*)(?![\w-])"
    r"(?:(?P<sep>[ =])(?!--)(?P<value>'[^']*'|[^\s'`]+))?"
)
_PLACEHOLDER = re.compile(r"[A-Z][A-Z0-9|,_]*")
_NO_PROSE = re.compile(r"\d|\w[./]\w")
_PLAIN = re.compile(r"[\w|./,:+-]+")
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?")


@dataclass(frozen=True, slots=True)
class Mention:
    """An option in a text: its name without the dashes, and its value, unquoted, if it has one."""

    option: str
    value: str | None = None

    @property
    def is_flag(self) -> bool:
        """Whether the option takes no value."""
        return not (MERGE_OPTIONS | _OTHERS).get(self.option, "?")

    def __str__(self) -> str:
        """Write it for a shell."""
        return self.named(f"--{self.option}")

    def named(self, name: str) -> str:
        """Write it for a shell under another name."""
        if self.value is None:
            return name
        quoted = self.value if _PLAIN.fullmatch(self.value) else shlex.quote(self.value)
        return f"{name}{'=' if self.is_flag else ' '}{quoted}"


class Front(Protocol):
    """What shows messages."""

    def name(self, mention: Mention) -> str | None:
        """Return how this front writes an option, or None if it does not have it."""

    def instead(self, mention: Mention) -> str:
        """Return the line to use for an option that it does not have."""


def mentions(text: str) -> Iterator[Mention]:
    """Yield the options that a text names, in order."""
    found: list[Mention] = []

    def collect(mention: Mention) -> str:
        found.append(mention)
        return str(mention)

    _replaced(text, collect)
    yield from found


def line_of(command: str, arguments: Sequence[str], options: Mapping[str, object]) -> str:
    """Return a command line to paste.

    Args:
        command: "unshard merge".
        arguments: paths.
        options: parameters of `unshard.merge` by name; booleans are flags.
    """
    parts = [command, *map(shlex.quote, arguments)]
    for name, value in options.items():
        mention = Mention(spell(name), None if isinstance(value, bool) else str(value))
        parts.append(str(mention))
    return " ".join(parts)


def call_of(function: str, arguments: Sequence[str], options: Mapping[str, object]) -> str:
    """Return a call of Python without its last bracket; see `line_of`."""
    named = (f"{name}={value!r}" for name, value in options.items())
    return f"{function}({', '.join([*map(repr, arguments), *named])}"


def reword(text: str, front: Front) -> str:
    """Return a text in which every option is written as a front writes it."""
    return _replaced(text, front.name)


def advice(text: str, front: Front) -> list[str]:
    """Return the lines to use for what a text names and a front does not have, each once."""
    known = (one for one in mentions(text) if one.option in MERGE_OPTIONS)
    return list(dict.fromkeys(front.instead(one) for one in known if front.name(one) is None))


def reword_warning(text: str, front: Front) -> str:
    """Return a warning as a front shows it: one text, with the lines to use at its end."""
    lines = advice(text, front)
    return reword(text, front) + (f" (use: {'; or: '.join(lines)})" if lines else "")


def _replaced(text: str, write: Callable[[Mention], str | None]) -> str:
    """Return a text whose mentions are written anew, or kept where `write` returns None."""

    def replace(match: re.Match[str]) -> str:
        mention, rest = _parsed(match)
        written = write(mention)
        return match[0] if written is None else f"{written}{rest}"

    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [_MENTION.sub(replace, part) for part in parts[::2]]
    return "".join(parts)


def _parsed(match: re.Match[str]) -> tuple[Mention, str]:
    """Return the option, and what follows it in the match without belonging to it.

    The word after an option is its value, or the next word of the sentence.
    """
    option, sep, value = match["option"], match["sep"], match["value"]
    if value is None:
        return Mention(option), ""
    if value.startswith("'"):
        return Mention(option, value[1:-1]), ""
    bare = value.rstrip(":;,.)…")
    rest = value[len(bare) :]
    is_subject = rest.startswith(":") and match.string[match.end() :][:1] in ("", " ", "\n")
    looks_like_value = (
        is_subject
        or "|" in bare
        or bare in CHOICES.get(option, ())
        or _PLACEHOLDER.fullmatch(bare)
        or _NO_PROSE.search(bare)
    )
    if sep == "=" or (bare and looks_like_value and not Mention(option).is_flag):
        return Mention(option, bare), rest
    return Mention(option), f"{sep}{value}"


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
        if self.own is None:
            return str(mention)
        name = self.own.get(mention.option)
        return None if name is None else mention.named(name)

    def instead(self, mention: Mention) -> str:
        """Return the line of `unshard merge` with an option."""
        others = re.sub(rf" --{mention.option}(?= |$)", "", self.line)
        value = (
            MERGE_OPTIONS[mention.option] if mention.value is None else mention.value.split("|")[0]
        )
        return f"{others} {Mention(mention.option, value or None)}"


@dataclass(frozen=True, slots=True)
class Python:
    """A function or method.

    Attributes:
        own: the parameters that it has, by the names of options; None: all those of `merge`.
        call: the call of `unshard.merge` that does what it does, without the last bracket.
    """

    own: Mapping[str, str] | None = None
    call: str = "unshard.merge(checkpoint, output"

    def name(self, mention: Mention) -> str | None:
        """Return how Python writes an option, or None if the function does not have it."""
        if mention.option not in MERGE_OPTIONS | _OTHERS:
            return None
        if self.own is None:
            return _as_keyword(mention, "…")
        name = self.own.get(mention.option)
        return None if name is None else f"{name}={_as_value(mention, '…')}"

    def instead(self, mention: Mention) -> str:
        """Return the call of `unshard.merge` with a parameter."""
        return f"{self.call}, {_as_keyword(mention, '...')})"


def _as_keyword(mention: Mention, unknown: str) -> str:
    if mention.option == "all-steps":
        return "unshard.merge_all"
    name = _IN_PYTHON.get(mention.option, mention.option.replace("-", "_"))
    return f"{name}={_as_value(mention, unknown)}"


def _as_value(mention: Mention, unknown: str) -> str:
    """Write an option's value as Python does; `unknown` if no value is given."""
    value = mention.value
    if value is None and mention.is_flag:
        return str(mention.option != "no-extra-state")
    if value in (None, (MERGE_OPTIONS | _OTHERS)[mention.option], "N"):
        return unknown
    if _NUMBER.fullmatch(value or ""):
        return str(value)
    if mention.option in _SEQUENCES:
        return repr([value])
    return " or ".join(map(repr, str(value).split("|")))


PYTHON = Python()
"""The functions of `unshard`."""
