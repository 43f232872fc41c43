"""How each front names the options that messages mention.

A message has options as `unshard merge` has them, and marks them: `⟦--overwrite⟧`,
`⟦--lora-alpha N⟧`. A front is what shows the message: a command of ours, a command that replaces
another tool's, or Python. It writes the options that it has in its own way, and for others it gives
the line of `unshard merge` to use instead.

A plus marks an option to add: `⟦+--base MODEL⟧`. All of them together, of one message or of all
warnings, make one line to paste: the command as it was given, with these options. Alternatives that
exclude each other have no plus. A name or path may look like a mark: only what is a `Text`, and the
hint of an error, advise to add options.
"""

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self, get_origin

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
OTHER_OPTIONS |= {"schedule": "NAME"}
OTHER_OPTIONS |= dict.fromkeys(("atol", "rtol", "ema-decay"), "X")
OTHER_OPTIONS |= {"follow": "", "keep": "N", "exec": "CMD", "retry": "N", "idle": "TIME"}
OTHER_OPTIONS |= {"interval": "SECONDS"}
"""Those of `verify`, `average` and `merge --follow`, which have functions in Python too."""
_ALL = MERGE_OPTIONS | OTHER_OPTIONS
_SEQUENCES = {spell(name) for name, one in OPTIONS.items() if get_origin(one.kind) is list}
_FUNCTIONS = {"all-steps": "unshard.merge_all", "follow": "unshard.follow"}
_IN_PYTHON = {option: keyword for keyword, option in _SPELLED.items()}

_ADVISED = (
    "allow-global|allow-missing|allow-unexpected|also|assume-dim0|base|config|dtype|ep-size|lora|"
    "lora-alpha|max-shard-size|names|no-extra-state|resume|role|step|weights"
)
_PLUS = rf"\+(?=--(?:(?:{_ADVISED})[ ⟧]|overwrite⟧))|"
_MARKED = re.compile(rf"⟦({_PLUS})(--([a-z0-9-]+)(?:[ =]([^⟦⟧\n]*))?)⟧")
_ADVICE = re.compile(r"⟦(?=\+|--overwrite=)")
_PLAIN = re.compile(r"[\w./,:+-]+")
_NUMBER = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?")


class Mention(NamedTuple):
    """An option that a text mentions.

    Attributes:
        text: what the text has: "--base '/a b'".
        option: its name without the dashes.
        value: its value, unquoted, or a placeholder: "MODEL"; None: the option alone.
        after: the value as it follows the option's name in a shell: " '/a b'", "=all", "".
        is_added: whether the text advises to add it.
        is_exact: whether the value was quoted; if not, it may be alternatives: "actor|critic".
    """

    text: str
    option: str
    value: str | None
    after: str
    is_added: bool = False
    is_exact: bool = False

    @property
    def values(self) -> list[str]:
        """The alternatives that the value, or its placeholder, consists of."""
        value = _ALL.get(self.option, "") if self.value is None else self.value
        return [value] if self.is_exact else value.split("|")


class Text(str):
    """A text of which the options are data; as a `str` it has them as a front writes them.

    The sum of texts has the options of both, as `unshard merge` writes them; what f-strings and
    `join` make of a text is plain.

    Attributes:
        marked: the text with the marks.
        parts: the options, and what is between them.
    """

    __slots__ = ("marked", "parts")
    marked: str
    parts: tuple[str | Mention, ...]

    def __new__(cls, marked: str, front: "Front | None" = None) -> Self:
        """Take a text with its marks; one without any is plain. The default is `unshard merge`."""
        between, *found = _MARKED.split(marked)
        parts: list[str | Mention] = [between]
        for plus, text, option, given, after in zip(*(found[n::5] for n in range(5)), strict=True):
            is_quoted = given is not None and given[:1] == given[-1:] == "'"
            value = given[1:-1].replace("'\"'\"'", "'") if is_quoted else given
            shown = _after(option, value, is_exact=is_quoted)
            parts += [Mention(text, option, value, shown, plus == "+", is_quoted), after]
        made = super().__new__(cls, "".join(_word(part, front) for part in parts))
        made.marked, made.parts = marked, tuple(parts)
        return made

    def __add__(self, other: str) -> "Text":
        return Text(self.marked + marked(other))

    def __radd__(self, other: str) -> "Text":
        return Text(marked(other) + self.marked)


def _word(part: str | Mention, front: "Front | None") -> str:
    return part if isinstance(part, str) else (front and front.name(part)) or part.text


def marked(text: str) -> str:
    """Return a text with the marks of its options; one that is no `Text` advises to add none."""
    return text.marked if isinstance(text, Text) else _ADVICE.sub(r"\\u27e6", text)


def unadvised(text: str) -> "Text":
    """Return a text that names what it advises, for a line that must not have it."""
    return Text(marked(text).replace("⟦+", "⟦"))


def _after(option: str, value: str | None, *, is_exact: bool = True) -> str:
    if value is None:
        return ""
    is_plain = all(map(_PLAIN.fullmatch, [value] if is_exact else value.split("|")))
    quoted = value if is_plain else shlex.quote(value)
    return f" {quoted}" if _ALL.get(option, "?") else f"={quoted}"


class Call(NamedTuple):
    """A command or a function, and what it was given: paths as they are, options by name.

    Those of a command are values, and booleans are flags; those of Python are written already.
    """

    name: str
    arguments: Sequence[str]
    options: Mapping[str, Any] = MappingProxyType({})


class Front(Protocol):
    """What shows messages."""

    @property
    def own(self) -> Collection[str] | None:
        """The options that it has, by the names of `unshard merge`; None: all."""

    def name(self, mention: Mention) -> str | None:
        """Return how this front writes an option, or None if it is as `unshard merge` does."""

    def line(self, added: Sequence[Mention], *, is_done: bool = False) -> str:
        """Return the line to use with some options, each in place of an earlier value of it.

        If the output has been made (`is_done`), the line replaces it. "": no line is known.
        """


def additions(text: str) -> list[Mention]:
    """Return the options that a text advises to add."""
    parts = text.parts if isinstance(text, Text) else ()
    return [part for part in parts if isinstance(part, Mention) and part.is_added]


def render(text: str, front: Front) -> tuple[str, list[str]]:
    """Return a text as a front writes it, and the lines to use for what to add, or what it lacks.

    What it lacks are alternatives, with a line for each, unless the text names what to add.
    """
    worded = Text(marked(text), front)
    mentions = [part for part in worded.parts if isinstance(part, Mention)]
    own = [one for one in mentions if one.option in MERGE_OPTIONS and _lacks(front, [one])]
    lacking = [one for one in own if one.option != "push-to-hub" or one.value is None]
    added = additions(worded)
    lines = map(front.line, [added] if added else [[one] for one in lacking])
    return str(worded), list(dict.fromkeys(filter(None, lines)))


def reword_warning(text: str, front: Front) -> str:
    """Return a warning as a front shows it: one text, with alternatives to use at its end.

    The line for what to add is that of all warnings; see `additions`.
    """
    shown, lines = render(text, front)
    return shown + (f" (use: {'; or: '.join(lines)})" if lines and not additions(text) else "")


@dataclass(frozen=True, slots=True)
class Command:
    """A command line.

    Attributes:
        own: the options that it has, by the names of `unshard merge`; None: all.
        merge: the line of `unshard merge` that does what it does.
        itself: the command as it was given; None: its lines are those of `unshard merge`.
    """

    own: Mapping[str, str] | None = None
    merge: Call = field(default=Call("unshard merge", ("CHECKPOINT", "OUTPUT")))
    itself: Call | None = None

    def name(self, mention: Mention) -> str | None:
        """Return how this command writes an option, or None if it does not have it."""
        name = f"--{mention.option}" if self.own is None else self.own.get(mention.option)
        return None if name is None else f"{name}{mention.after}"

    def line(self, added: Sequence[Mention], *, is_done: bool = False) -> str:
        """Return this command with some options, or that of `unshard merge` if it lacks one."""
        call = self.merge if self.itself is None or _lacks(self, added) else self.itself
        options = {spell(name): value for name, value in call.options.items()}
        for option, given in dict.fromkeys((one.option, one.values[0]) for one in added):
            is_list = option in _SEQUENCES
            options[option] = [*options.get(option, ()), given] if is_list else given or True
        writes = "overwrite" in (self.own or MERGE_OPTIONS)
        if is_done and writes and {"dry-run", "no-local"}.isdisjoint(options):
            options.setdefault("overwrite", True)
        most = 1 if call.name in {"unshard vllm", "unshard sglang"} else None  # then its options
        paths = [re.sub("^-", "./-", one) for one in call.arguments[:most]]
        parts = [call.name, *map(shlex.quote, [*paths, *call.arguments[len(paths) :]])]
        for option, given in options.items():
            values = given if isinstance(given, list | tuple) else [given]
            texts = (None if isinstance(value, bool) else str(value) for value in values)
            parts += [f"--{option}{_after(option, text)}" for text in texts]
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Python:
    """A function or method; its attributes are as those of `Command`."""

    own: Collection[str] | None = None
    merge: Call | None = None
    itself: Call | None = None

    def name(self, mention: Mention) -> str | None:
        """Return how Python writes an option, or None if it is not one of a function."""
        return _assigned(mention, "…") if mention.option in _ALL else None

    def line(self, added: Sequence[Mention], *, is_done: bool = False) -> str:  # noqa: ARG002
        """Return its call with some options, or that of `unshard.merge` if it lacks one."""
        call = self.merge if self.itself is None or _lacks(self, added) else self.itself
        if call is None:
            return ""
        options = dict(call.options)
        for one in dict.fromkeys(added):
            first = one._replace(value=one.value and one.values[0], is_exact=True)
            is_list = one.option in _SEQUENCES
            name, _, value = _assigned(first, "[...]" if is_list else "...").partition("=")
            options[name] = f"{options[name]} + {value}" if is_list and name in options else value
        named = (f"{name}={value}" for name, value in options.items())
        return f"{call.name}({', '.join([*call.arguments, *named])})"


def _lacks(front: Front, mentions: Sequence[Mention]) -> bool:
    return front.own is not None and any(one.option not in front.own for one in mentions)


def _keyword(mention: Mention) -> str:
    return _IN_PYTHON.get(mention.option, mention.option.replace("-", "_"))


def _assigned(mention: Mention, unknown: str) -> str:
    """Write an option as Python does; `unknown` if no value is given."""
    option, value = mention.option, mention.value
    if option in _FUNCTIONS:
        return _FUNCTIONS[option]
    if value is None and not _ALL[option]:
        shown = str(option != "no-extra-state")
    elif value in (None, _ALL[option], "N") or _ALL[option].startswith(f"{value}|"):
        shown = unknown
    elif _NUMBER.fullmatch(value):
        shown = value
    else:
        shown = repr([value]) if option in _SEQUENCES else " or ".join(map(repr, mention.values))
    return f"{_keyword(mention)}={shown}"


PYTHON = Python()
"""The functions of `unshard`."""
