"""How an attempt can end. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unshard.evaluate.server.evaluators.work import UnknownTasksError

__all__ = [
    "Cancelled",
    "Completed",
    "Died",
    "Expired",
    "Failed",
    "Killed",
    "Left",
    "Lost",
    "Outcome",
    "Postponed",
]


@dataclass(frozen=True, slots=True)
class Completed:
    """It measured something."""

    metrics: Mapping[str, float]
    results: Path | None


@dataclass(frozen=True, slots=True)
class Failed:
    """It did not work; `may_retry`: it might another time; `unknown`: tasks the evaluator lacks."""

    error: str
    may_retry: bool
    unknown: UnknownTasksError | None = None


@dataclass(frozen=True, slots=True)
class Postponed:
    """It could not begin or merge, for a reason that may pass: no space, a killed worker."""

    why: str


@dataclass(frozen=True, slots=True)
class Killed:
    """A signal ended its evaluator that the server did not send, but perhaps the kernel."""

    why: str


@dataclass(frozen=True, slots=True)
class Died:
    """Its processes ended together with the server that ran it; it may have ended the server."""

    why: str


@dataclass(frozen=True, slots=True)
class Expired:
    """The checkpoint is gone."""

    why: str


@dataclass(frozen=True, slots=True)
class Lost:
    """It did not end, for a reason outside of it."""

    why: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Its result is not wanted any more; its processes are gone."""


@dataclass(frozen=True, slots=True)
class Left:
    """It continues without this server; the next one adopts it."""


Outcome = Completed | Failed | Killed | Died | Postponed | Expired | Lost | Cancelled | Left
