"""Read JSON files of other programs, within bounds.

Python's own reader accepts any length and any depth that its stack allows, keeps the last of two
equal keys, and returns half surrogate pairs, which cannot be written to a file. Values from here
can be copied, compared and written again.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from unshard.containers.open_files import opened, pread, size_of
from unshard.errors import CorruptError

_T = TypeVar("_T")

MAX_JSON = 100_000_000
"""The most bytes of a JSON file, safetensors' limit for headers. The longest index in use has a
fifth of it."""

MAX_JSON_DEPTH = 64
"""The most nested objects and lists. Real configs have up to 6."""

_MOST_VALUES = 1_000_000
_BYTES_OF_VALUE = 8  # at least 9 on average, in headers and indices of more values than that


def json_object(path: Path) -> dict[str, object]:
    """Return the fields of a JSON file.

    Raises:
        CorruptError: it is not readable, not a regular file, longer than `MAX_JSON`, or refused by
            `parsed_object`.
    """
    try:
        with opened(path) as file:
            size = size_of(file)
            text = pread(file, size, 0) if size <= MAX_JSON else b""
    except OSError as error:
        raise CorruptError(f"{path}: cannot be read: {error.strerror}") from error
    if size > MAX_JSON:
        raise CorruptError(f"{path}: longer than {MAX_JSON} bytes")
    return parsed_object(text, str(path))


def parsed_object(
    text: bytes, what: str, *, parse_constant: Callable[[str], object] | None = None
) -> dict[str, object]:
    """Return the fields of a JSON object, which errors call `what`.

    It is UTF-8, with or without a byte order mark. NaN and Infinity are accepted, because Python
    writes them, unless `parse_constant` refuses them.

    Raises:
        CorruptError: it is not UTF-8, not JSON, not an object, nested deeper than
            `MAX_JSON_DEPTH`, has a key twice or a string that is not text, or may take more than
            max(300 MB, 20 x its length) in memory.
    """
    # A list takes 3 bytes of a text and 130 in memory, an object 7 and 260.
    values = text.count(b"[") + text.count(b"{") + text.count(b",")
    if values > max(_MOST_VALUES, len(text) // _BYTES_OF_VALUE):
        raise CorruptError(f"{what} has too many values for its {len(text)} bytes")
    try:
        fields = json.loads(
            text.decode("utf-8-sig"), object_pairs_hook=_unique, parse_constant=parse_constant
        )
    except UnicodeDecodeError as error:
        raise CorruptError(f"{what} is not UTF-8, at byte {error.start}") from error
    except RecursionError as error:
        raise CorruptError(f"{what} is not valid JSON: nested too deep") from error
    except _DuplicateKeyError as error:
        raise CorruptError(f"{what}: the key {shown(error.args[0])} occurs twice") from error
    except json.JSONDecodeError as error:
        raise CorruptError(f"{what} is not valid JSON: {error}") from error
    except ValueError as error:  # Python refuses to convert thousands of digits
        raise CorruptError(f"{what} is not valid JSON: a number of too many digits") from error
    if not isinstance(fields, dict):
        raise CorruptError(f"{what} is not a JSON object")
    _check(fields, what)
    return fields


class _DuplicateKeyError(ValueError):
    """An object has a key twice; the argument is the key."""


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        keys = Counter(key for key, _ in pairs)
        raise _DuplicateKeyError(keys.most_common(1)[0][0])
    return fields


def _check(fields: dict[str, object], what: str) -> None:
    """Check depth and text level by level: recursion would itself need a bound."""
    level: list[_Nested] = [("", fields)]
    for _ in range(MAX_JSON_DEPTH):
        level = [child for key, value in level for child in _children(key, value, what)]
        if not level:
            return
    raise CorruptError(
        f"{what}: {level[0][0]}: nested too deep", expected=f"at most {MAX_JSON_DEPTH} levels"
    )


_Nested = tuple[str, dict[str, object] | list[object]]
"""An object or list, and the key at the top of the file that contains it."""


def _children(top: str, value: dict[str, object] | list[object], what: str) -> Iterator[_Nested]:
    entries = value.items() if isinstance(value, dict) else (("", item) for item in value)
    for key, item in entries:
        if not is_text(key) or (isinstance(item, str) and not is_text(item)):
            raise CorruptError(f"{what}: {top or key}: half a surrogate pair, which is not text")
        if isinstance(item, dict | list):
            yield top or key, item


def is_text(text: str) -> bool:
    """Return whether a string can be written as UTF-8: it has no half of a surrogate pair."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class JsonFields:
    """Read fields of expected types from a file's JSON object; None if missing or null.

    Every method raises a CorruptError with file and key for a field of another type.

    Attributes:
        path: the file.
        fields: the fields, of any type.
        prefix: "key." of the object with these fields, if it is not the whole file.
    """

    path: Path
    fields: Mapping[str, object]
    prefix: str = ""

    def number(self, key: str) -> float | None:
        """Return a finite number, not below 0."""
        value = self.fields.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._malformed(key, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or number < 0:
            raise self._malformed(key, "a finite number, not below 0")
        return number

    def count(self, key: str) -> int | None:
        """Return a whole number, not below 0."""
        value = self.fields.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._malformed(key, "a whole number, not below 0")
        return value

    def flag(self, key: str) -> bool | None:
        """Return true or false."""
        return self._typed(key, bool, "true or false")

    def text(self, key: str) -> str | None:
        """Return a string."""
        return self._typed(key, str, "a string")

    def names(self, key: str) -> tuple[str, ...]:
        """Return a list of strings; empty if missing."""
        value = self._typed(key, list, "a list of names") or []
        if not all(isinstance(name, str) for name in value):
            raise self._malformed(key, "a list of names")
        return tuple(value)

    def inside(self, key: str) -> "JsonFields":
        """Return the fields of a nested object; empty if missing."""
        fields = self._typed(key, dict, "an object")
        return JsonFields(self.path, fields or {}, f"{self.prefix}{key}.")

    def _typed(self, key: str, kind: type[_T], expected: str) -> _T | None:
        value = self.fields.get(key)
        if value is None or isinstance(value, kind):
            return value
        raise self._malformed(key, expected)

    def _malformed(self, key: str, expected: str) -> CorruptError:
        subject = f"{self.path}: {self.prefix}{key} is not {expected}"
        return CorruptError(subject, found=shown(self.fields[key]))


def shown(value: object) -> str:
    """Return a value of a JSON file for a message: short, and never nested."""
    if isinstance(value, list):
        return "[" + ", ".join(map(_shown_alone, value[:8])) + (", …]" if value[8:] else "]")
    return _shown_alone(value)


def _shown_alone(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return repr(value)[:100]
