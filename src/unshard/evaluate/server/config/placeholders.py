"""The placeholders in the command of a profile. Pure."""

import re
from collections.abc import Iterable, Mapping

from unshard.evaluate.jobs import OPTIONS

__all__ = ["PLACEHOLDERS", "fill", "placeholders_in"]

PLACEHOLDERS = {"checkpoint", "output", "tasks", "step", "weights", "run"} | OPTIONS
"""What a command may name in braces: what is evaluated, and the options that clients choose."""

_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([a-z_]+)\}")


def placeholders_in(command: Iterable[str]) -> set[str]:
    """Return the names in braces, known ones or not; doubled braces are braces."""
    return {name for part in command for name in _PLACEHOLDER.findall(part) if name}


def fill(argument: str, values: Mapping[str, str]) -> str:
    """Return an argument of a command with values in the places of its placeholders."""
    return _PLACEHOLDER.sub(
        lambda found: values[found[1]] if found[1] else found[0][0],
        argument,
    )
