"""Match patterns of module names from adapter_config.json in bounded time.

PEFT uses Python's `re`, which takes hours for `q*q*q*q*x` and a long name. Here all ways to match
are followed at once: a part of a pattern maps the set of positions where it may begin to the set of
positions where it may end. A set is an integer with bit p for position p, so a part costs a few
operations on integers as long as the name.

Supports characters, classes, groups, alternatives, `^`, `$`, `?`, and `*`, `+`, `{m,n}` after a
single character; other patterns are refused. Source: peft.utils.other.get_pattern_key (0.21).
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial, reduce
from operator import or_

from unshard.errors import ConversionError

_LONG = 256
_DEEP = 16
_TIMES_AT_MOST = 64
_CLASS = r"\[\^?\]?(?:\\.|[^\[\]\\])*\]"
_ONE = re.compile(rf"\\[^a-zA-Z0-9]|\\[dDsSwW]|{_CLASS}|[^\\\[\](){{}}*+?|^$]", re.DOTALL)
_KIND = re.compile(r"\.|\\[dDsSwW]|\[.*", re.DOTALL)
_OPERATION = re.compile(r"--|&&|~~|\|\|")
_TIMES = re.compile(r"(?:([*+?])|\{([0-9]{1,3})\}|\{([0-9]{0,3}),([0-9]{0,3})\})\??")

_Part = Callable[["_Name", int], int]
"""Maps the positions of a name where a part may begin to the positions where it may end."""


def ends_like(pattern: str, name: str) -> bool:
    r"""Return whether `re` would match `(.*\.)?(pattern)$` from the start of a name.

    Raises:
        ConversionError: the pattern is not supported.
    """
    text = _named(name)
    return bool(_parsed(pattern)(text, text.begins) & text.ends)


class _Name:
    """A module's name: the positions of each character, and where a match may begin and end."""

    def __init__(self, name: str) -> None:
        self.positions: dict[str, int] = {}
        for position, character in enumerate(name):
            self.positions[character] = self.positions.get(character, 0) | 1 << position
        line = name.partition("\n")[0]  # `.` does not match the end of a line
        self.begins = 1 | sum(2 << at for at, character in enumerate(line) if character == ".")
        self.ends = 1 << len(name)
        if name.endswith("\n"):  # `$` matches in front of it, too
            self.ends |= 1 << len(name) - 1

    def where(self, atom: str) -> int:
        """Return the positions of the characters that match a pattern of one character."""
        if _KIND.fullmatch(atom) is None:
            return self.positions.get(atom[-1], 0)
        own = self.positions
        return sum(own[character] for character in own if _is_of(atom, character))


_named = lru_cache(maxsize=4)(_Name)


@lru_cache(maxsize=65536)
def _is_of(kind: str, character: str) -> bool:
    return re.compile(kind).fullmatch(character) is not None


@lru_cache(maxsize=16384)
def _parsed(pattern: str) -> _Part:
    try:
        parser = _Parser(pattern)
        part = parser.either()
        if parser.is_done and len(pattern) <= _LONG:
            return part
    except (re.error, _UnknownError):
        pass
    raise ConversionError(
        f"rank_pattern or alpha_pattern: {pattern[:80]!r} cannot be matched safely",
        expected=f"at most {_LONG} characters, and *, + and {{m,n}} after single characters only",
        hint="write the modules' names out in adapter_config.json",
    )


class _UnknownError(ValueError):
    """A pattern is malformed or not supported."""


class _Parser:
    """Parse a pattern from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern[: _LONG + 1]
        self._at = 0
        self._depth = 0

    @property
    def is_done(self) -> bool:
        return self._at == len(self._pattern)

    def either(self) -> _Part:
        """Read alternatives, up to the end of their group."""
        parts = [self._sequence()]
        while self._takes("|"):
            parts.append(self._sequence())
        if len(parts) == 1:
            return parts[0]
        return lambda name, begin: reduce(or_, (part(name, begin) for part in parts))

    def _sequence(self) -> _Part:
        parts = []
        while not self.is_done and self._pattern[self._at] not in "|)":
            parts.append(self._item())
        return partial(_in_order, parts)

    def _item(self) -> _Part:
        if self._takes("^"):
            return lambda _name, begin: begin & 1
        if self._takes("$"):
            return lambda name, begin: begin & name.ends
        if self._takes("("):
            return self._group()
        atom = self._match(_ONE)
        if atom is None or (atom[0].startswith("[") and _OPERATION.search(atom[0])):
            raise _UnknownError
        if _KIND.fullmatch(atom[0]):
            re.compile(atom[0])  # a malformed class raises re.error
        return partial(_times, atom[0], *self._times())

    def _group(self) -> _Part:
        self._takes("?:")
        self._depth += 1
        if self._depth > _DEEP:
            raise _UnknownError
        part = self.either()
        self._depth -= 1
        is_closed, times = self._takes(")"), self._times()
        if not is_closed or times not in {(1, 1), (0, 1)}:
            raise _UnknownError
        return part if times == (1, 1) else lambda name, begin: begin | part(name, begin)

    def _times(self) -> tuple[int, int | None]:
        """Read the least and the most times that the item before may occur."""
        match = self._match(_TIMES)
        if match is None:
            return 1, 1
        sign, exactly, least, most = match.groups()
        if sign:
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        low = int(exactly or least or 0)
        high = int(exactly or most) if exactly or most else None
        if max(low, high or 0) > _TIMES_AT_MOST or (high is not None and high < low):
            raise _UnknownError
        return low, high

    def _takes(self, text: str) -> bool:
        is_next = self._pattern.startswith(text, self._at)
        self._at += len(text) * is_next
        return is_next

    def _match(self, regex: re.Pattern[str]) -> re.Match[str] | None:
        match = regex.match(self._pattern, self._at)
        self._at = match.end() if match else self._at
        return match


def _in_order(parts: Sequence[_Part], name: _Name, begin: int) -> int:
    for part in parts:
        if not begin:
            break
        begin = part(name, begin)
    return begin


def _times(atom: str, least: int, most: int | None, name: _Name, begin: int) -> int:
    """Match a character repeatedly. Without a limit, an addition carries through a whole run."""
    where = name.where(atom)
    for _ in range(least):
        begin = (begin & where) << 1
    if most is None:
        return (((begin & where) + where) ^ where) | begin
    ends = begin
    for _ in range(most - least):
        begin = (begin & where) << 1
        ends |= begin
    return ends
