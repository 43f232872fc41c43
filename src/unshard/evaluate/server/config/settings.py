"""A mapping of a configuration file, read key by key, each with its type checked. Pure.

Knows nothing of what the keys mean. An error names the file and the key and lists what is known.
"""

from collections.abc import Collection, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from unshard.errors import UsageError
from unshard.evaluate.values import Scalar

__all__ = ["Settings"]

_LONGEST_TIME = 1e9
_Choice = TypeVar("_Choice", bound=StrEnum)


class Settings:
    """The settings under one key of a file.

    Args:
        value: what the file holds there; None is an empty mapping.
        known: the keys that may occur.
        where: names the file, and the place in it, in errors.
        base: the directory that relative paths start from.

    Raises:
        UsageError: it is no mapping, or has another key than the known ones.
    """

    def __init__(self, value: object, *, known: Collection[str], where: str, base: Path) -> None:
        self.where = where
        self.base = base
        if value is not None and not isinstance(value, dict):
            raise UsageError(f"{where} cannot be read", expected="a mapping", found=_shown(value))
        self._values: dict[object, object] = value or {}
        unknown = [key for key in self._values if key not in known]
        if unknown:
            names = ", ".join(map(repr, unknown))
            raise UsageError(
                f"{where} has the unknown key {names}", expected=", ".join(sorted(known))
            )

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def raw(self, key: str) -> object:
        """Return what is there, or None."""
        return self._values.get(key)

    def wrong(self, key: str, *, expected: str) -> UsageError:
        """Make the error for a key whose value cannot be."""
        found = _shown(self._values.get(key))
        return UsageError(f"{self.where}: {key} cannot be read", expected=expected, found=found)

    def text(self, key: str, default: str) -> str:
        """Return a string that is not empty."""
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or not value.strip() or "\0" in value:
            raise self.wrong(key, expected="a string that is not empty")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings that are not empty; one string is a list of one."""
        value = self._values.get(key)
        items = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(item, str) and item and "\0" not in item for item in items):
            raise self.wrong(key, expected="a list of strings")
        return tuple(items)

    def path(self, key: str) -> Path | None:
        """Return a path; a relative one starts at the file's directory."""
        return self._path(self.text(key, "")) if key in self else None

    def paths(self, key: str) -> tuple[Path, ...]:
        """Return a list of paths; relative ones start at the file's directory."""
        return tuple(self._path(text) for text in self.texts(key))

    def count(self, key: str, default: int, *, least: int = 0, most: int = 2**63) -> int:
        """Return a whole number from `least` to `most`."""
        value = self._values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            limits = f"at least {least}" if most == 2**63 else f"{least} to {most}"
            raise self.wrong(key, expected=f"a whole number, {limits}")
        return value

    def limit(self, key: str, default: int | None, *, least: int = 0) -> int | None:
        """Return a whole number from `least` on, or None for an explicit null: no limit."""
        if key not in self._values:
            return default
        return self.count(key, 0, least=least) if key in self else None

    def seconds(self, key: str, default: float) -> float:
        """Return a duration above zero."""
        value = self._values.get(key)
        if value is None:
            return default
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value <= _LONGEST_TIME:  # type: ignore[operator]  # a number
            raise self.wrong(key, expected="seconds, above zero")
        return float(value)  # type: ignore[arg-type]  # a number

    def choice(self, key: str, default: _Choice) -> _Choice:
        """Return one of the members of the default's enumeration."""
        value = self._values.get(key)
        if value is None:
            return default
        kind = type(default)
        if not isinstance(value, str) or value not in set(kind):
            raise self.wrong(key, expected=", ".join(kind))
        return kind(value)

    def scalars(self, key: str) -> dict[str, Scalar]:
        """Return a mapping from strings to strings, numbers and booleans."""
        value = self._values.get(key)
        items = {} if value is None else value
        if not isinstance(items, Mapping) or not all(
            isinstance(name, str) and name and isinstance(item, str | int | float)
            for name, item in items.items()
        ):
            raise self.wrong(key, expected="a mapping of names to strings, numbers or booleans")
        return dict(items)

    def mapping(self, key: str) -> dict[str, object]:
        """Return a mapping from strings to anything, which is read by `Settings` again."""
        value = self._values.get(key)
        items = {} if value is None else value
        if not isinstance(items, Mapping) or not all(isinstance(name, str) for name in items):
            raise self.wrong(key, expected="a mapping")
        return dict(items)

    def _path(self, text: str) -> Path:
        return self.base / Path(text).expanduser()


def _shown(value: object) -> str:
    return f"{value!r:.100} ({type(value).__name__})"
