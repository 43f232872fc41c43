"""The options of following a run as one value."""

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
        for name in ("keep", "until", "retry", "interval"):
            value, kind = getattr(self, name), Real if name == "interval" else int
            if not isinstance(value, kind) and (value is not None or name == "retry"):
                raise UsageError(f"{name}: {value!r} is not a number")
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


def check_options(options: MergeOptions) -> None:
    """Refuse what does not fit all steps."""
    if options.role == EVERY_ROLE:
        raise UsageError(
            "⟦--follow⟧ follows one model of a step, and ⟦--role all⟧ means several",
            hint="follow each into a directory of its own: ⟦--role actor⟧, ⟦--role critic⟧",
        )
    if options.step is not None:
        raise UsageError(f"⟦--follow⟧ and ⟦--step {options.step}⟧ exclude each other")
    if options.dry_run:
        raise UsageError("⟦--follow⟧ and ⟦--dry-run⟧ exclude each other")


def check_push(repo: str, output: Path) -> None:
    """Refuse a repository to which outputs cannot be uploaded."""
    if isinstance(output, RemotePath):
        raise UsageError(
            f"⟦--push-to-hub⟧ needs outputs on a disk, and {as_given(output)} is in an object store"
        )
    check_repo(repo, may_ask=True)
