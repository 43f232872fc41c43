"""Values of a configuration that a person wrote: what they should be, or an error that says so."""

from collections.abc import Mapping
from math import isfinite
from pathlib import PurePosixPath
from typing import TypeGuard

from unshard.errors import UsageError
from unshard.evaluate.credentials import split_url
from unshard.evaluate.pins.pin import DEFAULT_QUOTA, Quota
from unshard.evaluate.values import Scalar

__all__ = [
    "a_mapping",
    "a_number",
    "a_quota",
    "a_text",
    "a_text_or_whole",
    "a_url",
    "a_whole",
    "an_interval",
    "names",
    "paths",
    "scalars",
]


def a_mapping(given: Mapping[str, object], key: str) -> dict[str, object]:
    """Return a copy of a mapping; an empty one where it is not set."""
    found = given.get(key)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise _wrong(key, "a mapping", found)
    return {str(name): value for name, value in found.items()}


def a_text(given: Mapping[str, object], key: str) -> str | None:
    """Return a text; None where it is not set."""
    found = given.get(key)
    if found is False and key == "eval_strategy":
        return "no"  # YAML 1.1 reads a bare `no` as false
    if found is not None and not isinstance(found, str):
        raise _wrong(key, "text", found)
    return found


def a_url(given: Mapping[str, object], key: str) -> str | None:
    """Return the address of a server; None where it is not set."""
    found = a_text(given, key)
    if found:
        split_url(found, what=_named(key))
    return found


def a_text_or_whole(given: Mapping[str, object], key: str) -> str | int | None:
    """Return a text ("auto") or a whole number; None where it is not set."""
    return a_text(given, key) if isinstance(given.get(key), str) else a_whole(given, key)


def a_whole(given: Mapping[str, object], key: str) -> int | None:
    """Return a whole number that is not negative; None where it is not set."""
    found = given.get(key)
    if found is None:
        return None
    if isinstance(found, float) and found.is_integer():
        found = int(found)
    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
        raise _wrong(key, "a whole number", found)
    return found


def a_number(given: Mapping[str, object], key: str) -> float | int | None:
    """Return a number that is not negative; None where it is not set."""
    found = given.get(key)
    if found is None:
        return None
    if not _is_number(found) or found < 0:
        raise _wrong(key, "a number", found)
    return found


def an_interval(given: Mapping[str, object], key: str) -> float:
    """Return seconds, above 0."""
    found = given.get(key)
    if not _is_number(found) or found <= 0:
        raise _wrong(key, "seconds, above 0", found)
    return found


def names(given: Mapping[str, object], key: str) -> tuple[str, ...]:
    """Return a list of names; a text is a list of one, or of several with commas."""
    found = given.get(key)
    if isinstance(found, str):
        found = [part.strip() for part in found.split(",") if part.strip()]
    if found is None:
        return ()
    if not isinstance(found, list | tuple) or not all(isinstance(one, str) for one in found):
        raise _wrong(key, "a list of names", found)
    return tuple(found)


def paths(given: Mapping[str, object], key: str) -> dict[str, str]:
    """Return a mapping of absolute paths to absolute paths."""
    found = a_mapping(given, key)
    for pair in found.items():
        if not all(isinstance(one, str) and PurePosixPath(one).is_absolute() for one in pair):
            raise _wrong(key, "absolute paths here: what the server calls them", found)
    return {ours: str(theirs) for ours, theirs in found.items()}


def scalars(found: Mapping[str, object], key: str) -> dict[str, Scalar]:
    """Return a mapping of texts, numbers and booleans."""
    kept: dict[str, Scalar] = {}
    for name, value in found.items():
        if not isinstance(value, str | bool) and not _is_number(value):
            raise _wrong(f"{key}.{name}", "a text, a number or a boolean", value)
        kept[name] = value
    return kept


def a_quota(given: Mapping[str, object], key: str) -> Quota:
    """Return a quota of pins: count, bytes; what is not said is the default, null no limit."""
    found = a_mapping(given, key)
    if unknown := found.keys() - {"count", "bytes"}:
        raise _wrong(key, "count, bytes", sorted(unknown))
    count = a_whole(found, "count") if "count" in found else DEFAULT_QUOTA.count
    size = a_number(found, "bytes") if "bytes" in found else DEFAULT_QUOTA.bytes
    return Quota(count, None if size is None else int(size))


def _is_number(found: object) -> TypeGuard[int | float]:
    """Return whether something is a number that JSON can hold."""
    return isinstance(found, int | float) and not isinstance(found, bool) and isfinite(found)


def _wrong(key: str, expected: str, found: object) -> UsageError:
    return UsageError(_named(key), expected=expected, found=repr(found)[:100])


def _named(key: str) -> str:
    return f"{key} of the evaluation"
