"""How each front writes the options that messages mention.

A message marks the options of `unshard merge` that it mentions: `⟦--overwrite⟧`,
`⟦--lora-alpha N⟧`. A front shows the message: a command of ours, a command that replaces another
tool, or Python. It writes its own options in its own way; for options that it lacks, it adds the
line of `unshard merge` to use instead.

A plus marks an option to add: `⟦+--base MODEL⟧`. All options to add, of one message or of all
warnings, make one line to paste: the command as the user gave it, with these options. Alternatives
that exclude each other have no plus. Names and paths may look like marks, so only a `Text` and the
hint of an error can advise to add options.
"""

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Self, TypeAlias, get_origin

from unshard.keywords import OPTIONS

_SPELLED = {"allow_globals": "allow-global", "extra_state": "no-extra-state"}


def spell(keyword: str) -> str:
    """Return the command line's name of a keyword, without dashes."""
    return _SPELLED.get(keyword, keyword.replace("_", "-"))


MERGE_OPTIONS = {
    spell(name): ""
    if row.kind is bool or row.metavar.startswith("[")
    else row.metavar or name.upper()
    for name, row in OPTIONS.items()
} | {"all-steps": ""}
"""The options of `unshard merge` that messages may mention, with a placeholder for the value."""
OTHER_OPTIONS = {"load": "", "against": "PATH", "coefficients": "X,Y", "last": "N", "every": "N"}
OTHER_OPTIONS |= {"schedule": "NAME"}
OTHER_OPTIONS |= dict.fromkeys(("atol", "rtol", "ema-decay"), "X")
OTHER_OPTIONS |= {"follow": "", "keep": "N", "exec": "CMD", "retry": "N", "idle": "TIME"}
OTHER_OPTIONS |= {"interval": "SECONDS"}
"""More options of `verify`, `average` and `merge --follow`; Python's functions have them too."""
_ALL = MERGE_OPTIONS | OTHER_OPTIONS
_SEQUENCES = {spell(name) for name, row in OPTIONS.items() if get_origin(row.kind) is list}
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
        text: the option as in the text: "--base '/a b'".
        option: its name without the dashes.
        value: its value, unquoted, or a placeholder: "MODEL"; None: no value.
        after: the value as it follows the option's name in a shell: " '/a b'", "=all", "".
        is_added: whether the text advises to add it.
        is_exact: whether the value was quoted; if not, it may list alternatives: "actor|critic".
    """

    text: str
    option: str
    value: str | None
    after: str
    is_added: bool = False
    is_exact: bool = False

    @property
    def values(self) -> list[str]:
        """The alternatives that the value or its placeholder lists."""
        value = _ALL.get(self.option, "") if self.value is None else self.value
        return [value] if self.is_exact else value.split("|")


class Text(str):
    """A message with its options as data; as a `str`, a front has written the options.

    The sum of two texts has the options of both, as `unshard merge` writes them. F-strings and
    `join` return a plain `str`.

    Attributes:
        marked: the text with the marks.
        parts: the options, and the text between them.
    """

    __slots__ = ("marked", "parts")
    marked: str
    parts: tuple[str | Mention, ...]

    def __new__(cls, marked: str, front: "Front | None" = None) -> Self:
        """Parse the marks of a text, and write its options as a front, or as `unshard merge`."""
        before, *fields = _MARKED.split(marked)
        parts: list[str | Mention] = [before]
        for plus, text, option, quoted, rest in zip(*(fields[n::5] for n in range(5)), strict=True):
            is_quoted = quoted is not None and quoted[:1] == quoted[-1:] == "'"
            value = quoted[1:-1].replace("'\"'\"'", "'") if is_quoted else quoted
            after = _after(option, value, is_exact=is_quoted)
            parts += [Mention(text, option, value, after, plus == "+", is_quoted), rest]
        words = (
            part if isinstance(part, str) else (front and front.name(part)) or part.text
            for part in parts
        )
        self = super().__new__(cls, "".join(words))
        self.marked, self.parts = marked, tuple(parts)
        return self

    def __add__(self, other: str) -> "Text":
        return Text(self.marked + marked(other))

    def __radd__(self, other: str) -> "Text":
        return Text(marked(other) + self.marked)


def marked(text: str) -> str:
    """Return a text with the marks of its options; a plain `str` loses the marks of advice."""
    return text.marked if isinstance(text, Text) else _ADVICE.sub(r"\\u27e6", text)


def unadvised(text: str) -> "Text":
    """Return a text that only mentions the options that it advised to add."""
    return Text(marked(text).replace("⟦+", "⟦"))


def _after(option: str, value: str | None, *, is_exact: bool = True) -> str:
    if value is None:
        return ""
    is_plain = all(map(_PLAIN.fullmatch, [value] if is_exact else value.split("|")))
    quoted = value if is_plain else shlex.quote(value)
    return f" {quoted}" if _ALL.get(option, "?") else f"={quoted}"


class Call(NamedTuple):
    """A command or function with its arguments and options.

    A command's options are values (a boolean is a flag), Python's are expressions as text.
    """

    name: str
    arguments: Sequence[str]
    options: Mapping[str, Any] = MappingProxyType({})


Front: TypeAlias = "Command | Python"
"""A command or Python API that shows messages."""


def additions(text: str) -> list[Mention]:
    """Return the options that a text advises to add."""
    parts = text.parts if isinstance(text, Text) else ()
    return [part for part in parts if isinstance(part, Mention) and part.is_added]


def render(text: str, front: Front) -> tuple[str, list[str]]:
    """Return a text as a front writes it, and the lines to use.

    There is one line with all options to add; if there are none, one for each option that the front
    lacks, as alternatives.
    """
    written = Text(marked(text), front)
    added = additions(written)
    lacking = [
        [part]
        for part in written.parts
        if isinstance(part, Mention)
        and part.option in MERGE_OPTIONS
        and _lacks(front, [part])
        and (part.option != "push-to-hub" or part.value is None)
    ]
    lines = map(front.line, [added] if added else lacking)
    return str(written), list(dict.fromkeys(filter(None, lines)))


def reword_warning(text: str, front: Front) -> str:
    """Return a warning as a front writes it, ending with the alternative lines to use.

    Options to add go into one line for all warnings; see `additions`.
    """
    shown, lines = render(text, front)
    return shown + (f" (use: {'; or: '.join(lines)})" if lines and not additions(text) else "")


@dataclass(frozen=True, slots=True)
class Command:
    """A command line.

    Attributes:
        own: the options that it has, by the names of `unshard merge`; None: all.
        merge: the equivalent line of `unshard merge`.
        itself: the command as the user gave it; None: `merge` is used for all lines.
    """

    own: Mapping[str, str] | None = None
    merge: Call = field(default=Call("unshard merge", ("CHECKPOINT", "OUTPUT")))
    itself: Call | None = None

    def name(self, mention: Mention) -> str | None:
        """Return an option as this command writes it, or None if it does not have it."""
        name = f"--{mention.option}" if self.own is None else self.own.get(mention.option)
        return None if name is None else f"{name}{mention.after}"

    def line(self, added: Sequence[Mention], *, is_done: bool = False) -> str:
        """Return this command with some options, or `unshard merge` if it lacks an option.

        If the output exists by now (`is_done`), the line replaces it.
        """
        call = self.merge if self.itself is None or _lacks(self, added) else self.itself
        options = {spell(name): value for name, value in call.options.items()}
        for option, value in dict.fromkeys(
            (mention.option, mention.values[0]) for mention in added
        ):
            is_list = option in _SEQUENCES
            options[option] = [*options.get(option, ()), value] if is_list else value or True
        writes = "overwrite" in (self.own or MERGE_OPTIONS)
        if is_done and call.name == "unshard delta" and "run" in options:
            call = call._replace(arguments=("OUTPUT",))  # versions of an archive are not replaced
        elif is_done and writes and {"dry-run", "no-local"}.isdisjoint(options):
            options.setdefault("overwrite", True)
        # After the checkpoint, these have the engine's own options, which begin with dashes.
        most = 1 if call.name in {"unshard vllm", "unshard sglang"} else None
        paths = [re.sub("^-", "./-", path) for path in call.arguments[:most]]
        parts = [call.name, *map(shlex.quote, [*paths, *call.arguments[len(paths) :]])]
        for option, value in options.items():
            for item in value if isinstance(value, list | tuple) else [value]:
                text = None if isinstance(item, bool) else str(item)
                parts.append(f"--{option}{_after(option, text)}")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Python:
    """A function or method, with the attributes of a `Command`."""

    own: Collection[str] | None = None
    merge: Call | None = None
    itself: Call | None = None

    def name(self, mention: Mention) -> str | None:
        """Return an option as Python writes it, or None if no function has it."""
        return _assigned(mention, "…") if mention.option in _ALL else None

    def line(self, added: Sequence[Mention], *, is_done: bool = False) -> str:  # noqa: ARG002
        """Return its call with some options, or `unshard.merge` if it lacks an option."""
        call = self.merge if self.itself is None or _lacks(self, added) else self.itself
        if call is None:
            return ""
        options = dict(call.options)
        for mention in dict.fromkeys(added):
            first = mention._replace(value=mention.value and mention.values[0], is_exact=True)
            is_list = mention.option in _SEQUENCES
            name, _, value = _assigned(first, "[...]" if is_list else "...").partition("=")
            options[name] = f"{options[name]} + {value}" if is_list and name in options else value
        named = (f"{name}={value}" for name, value in options.items())
        return f"{call.name}({', '.join([*call.arguments, *named])})"


def _lacks(front: Front, mentions: Sequence[Mention]) -> bool:
    own = front.own
    return own is not None and any(mention.option not in own for mention in mentions)


def _assigned(mention: Mention, unknown: str) -> str:
    """Return an option as a keyword argument; `unknown` stands for a placeholder."""
    option, value = mention.option, mention.value
    if option in _FUNCTIONS:
        return _FUNCTIONS[option]
    if value is None and not _ALL[option]:
        text = str(option != "no-extra-state")
    elif value in (None, _ALL[option], "N") or _ALL[option].startswith(f"{value}|"):
        text = unknown
    elif _NUMBER.fullmatch(value):
        text = value
    else:
        text = repr([value]) if option in _SEQUENCES else " or ".join(map(repr, mention.values))
    return f"{_IN_PYTHON.get(option, option.replace('-', '_'))}={text}"


PYTHON = Python()
"""The functions of `unshard`."""
