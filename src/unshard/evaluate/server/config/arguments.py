"""Arguments in command lines: `key=value` for both harnesses, placeholders for commands. Pure.

lmms-eval and lm-eval split at commas, but not inside quotes, braces or brackets
(lmms_eval/utils.py, `_smart_comma_split`): an unclosed quote swallows every argument after it, and
a comma adds one.
"""

import math
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from unshard.errors import UsageError
from unshard.evaluate.jobs import OPTIONS
from unshard.evaluate.values import Scalar

PLACEHOLDERS = {"checkpoint", "output", "tasks", "step", "weights", "run"} | OPTIONS
"""The placeholders of a command, in braces: fields of the request, and options of clients."""

LAUNCH_PLACEHOLDERS = {"gpus", "job", "attempt", "run", "step"}  # the placeholders of `launch`
LONGEST_NAME = 200

_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([a-z_]+)\}")
_BRACES = frozenset("{}")
_SEPARATORS = frozenset(",='\"`\\[]{}\n\r")


def is_name(value: object, form: re.Pattern[str]) -> bool:
    """Return whether a value is a string of this form, and not too long."""
    return isinstance(value, str) and len(value) <= LONGEST_NAME and bool(form.fullmatch(value))


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether one of the shell patterns matches a name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def has_separator(text: str) -> bool:
    """Return whether the evaluators' parsers would change or split a value."""
    return not _SEPARATORS.isdisjoint(text) or text != text.strip()


def join_arguments(arguments: Mapping[str, Scalar], *, what: str) -> str:
    """Return `key=value,key=value`; `what` is the subject of an error.

    Raises:
        UsageError: a key or value contains a comma, an equals sign, a quote, a bracket or a new
            line.
    """
    for key, value in arguments.items():
        for part in (key, str(value)):
            if has_separator(part):
                raise UsageError(
                    f"{what}: {key!r} cannot be handed over",
                    expected="no comma, equals sign, quote, bracket, backslash or new line in it, "
                    "and no blank at its ends",
                    found=repr(part),
                )
    return ",".join(f"{key}={value}" for key, value in arguments.items())


def parse_arguments(text: str, *, what: str) -> dict[str, Scalar]:
    """Read `key=value,key=value`; numbers and booleans are converted.

    Raises:
        UsageError: a part is not `key=value`, or a key occurs twice.
    """
    pairs: dict[str, Scalar] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key or key in pairs:
            raise UsageError(
                f"{what} cannot be read",
                expected="key=value, separated by commas, every key once",
                found=repr(part),
            )
        pairs[key] = read_scalar(value)
    return pairs


def read_scalar(text: str) -> Scalar:
    """Return a text as boolean or finite number, if it is one."""
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text


def placeholders_in(command: Iterable[str]) -> set[str]:
    """Return all names in braces; doubled braces are literal."""
    return {name for part in command for name in _PLACEHOLDER.findall(part) if name}


def has_lone_brace(argument: str) -> bool:
    """Return whether a brace is neither doubled nor one of a placeholder's."""
    return not _BRACES.isdisjoint(_PLACEHOLDER.sub("", argument))


def fill(argument: str, values: Mapping[str, str]) -> str:
    """Replace the placeholders of an argument by values, and doubled braces by single ones."""
    return _PLACEHOLDER.sub(lambda match: values[match[1]] if match[1] else match[0][0], argument)
