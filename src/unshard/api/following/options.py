"""The options of following a run as one value."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from unshard.api.following.commands import command_of
from unshard.errors import UsageError

_TIME = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """How a run is followed; `follow` explains each.

    Raises:
        UsageError: a value is not one of this option.
    """

    newest: bool = False
    keep: int | None = None
    exec: str | Sequence[str] | None = None
    retry: int = 0
    until: int | None = None
    idle: float | str | None = None
    interval: float = 5.0

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise UsageError(f"⟦--keep {self.keep}⟧: at least 1 is needed")
        if self.retry < 0:
            raise UsageError(f"⟦--retry {self.retry}⟧: at least 0 is needed")
        if not (isfinite(self.interval) and self.interval > 0):
            raise UsageError(f"⟦--interval {self.interval}⟧: seconds above 0 are needed")
        if self.exec is not None:
            object.__setattr__(self, "exec", command_of(self.exec))
        if self.idle is not None:
            object.__setattr__(self, "idle", seconds_of(self.idle))


def seconds_of(given: float | str) -> float:
    """Return a time in seconds, which may be given as "90", "90s", "30m", "2h" or "1d"."""
    found = _TIME.fullmatch(str(given))
    if found is None:
        raise UsageError(f"⟦--idle {given}⟧: is not a time", expected="30m, 2h, 90s")
    return float(found[1]) * _SECONDS[found[2]]
