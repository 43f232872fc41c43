"""The options of `follow` as one value."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from pathlib import Path

from unshard.api.following.commands import command_of
from unshard.api.options import MergeOptions
from unshard.errors import UsageError
from unshard.read.format import EVERY_ROLE
from unshard.stores.remote_path import RemotePath, as_given
from unshard.write.hub import check_repo

_TIME = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """The options of `follow`, which explains each.

    Raises:
        UsageError: a value is invalid.
    """

    newest: bool = False
    keep: int | None = None
    exec: str | Sequence[str] | None = None
    retry: int = 0
    until: int | None = None
    idle: float | str | None = None
    interval: float = 5.0

    def __post_init__(self) -> None:
        for name in ("keep", "until", "retry", "interval"):
            value, kind = getattr(self, name), Real if name == "interval" else int
            if not isinstance(value, kind) and (value is not None or name == "retry"):
                raise UsageError(f"{name}: {value!r} is not a number")
        for name, value, least in (("keep", self.keep, 1), ("retry", self.retry, 0)):
            if value is not None and value < least:
                raise UsageError(f"⟦--{name} {value}⟧: at least {least} is needed")
        if not (isfinite(self.interval) and self.interval > 0):
            raise UsageError(f"⟦--interval {self.interval}⟧: seconds above 0 are needed")
        if self.exec is not None:
            object.__setattr__(self, "exec", command_of(self.exec))
        if self.idle is not None:
            object.__setattr__(self, "idle", seconds_of(self.idle))


def seconds_of(time: float | str) -> float:
    """Return the seconds of a time such as "90", "90s", "30m", "2h" or "1d"."""
    match = _TIME.fullmatch(str(time))
    if match is None:
        raise UsageError(f"⟦--idle {time}⟧: is not a time", expected="30m, 2h, 90s")
    return float(match[1]) * _SECONDS[match[2]]


def check_options(options: MergeOptions, output: Path) -> None:
    """Refuse options that do not fit all steps, and uploads from a store."""
    if options.role == EVERY_ROLE:
        raise UsageError(
            "⟦--follow⟧ follows one model of a step, and ⟦--role all⟧ means several",
            hint="follow each into a directory of its own: ⟦--role actor⟧, ⟦--role critic⟧",
        )
    if options.step is not None:
        raise UsageError(f"⟦--follow⟧ and ⟦--step {options.step}⟧ exclude each other")
    if options.dry_run:
        raise UsageError("⟦--follow⟧ and ⟦--dry-run⟧ exclude each other")
    if options.push_to_hub is None:
        return
    if isinstance(output, RemotePath):
        raise UsageError(
            f"⟦--push-to-hub⟧ needs outputs on a disk, and {as_given(output)} is in an object store"
        )
    check_repo(options.push_to_hub, may_ask=True)
