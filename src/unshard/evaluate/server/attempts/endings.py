"""How an attempt can end. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unshard.evaluate.server.evaluators.unknown_tasks import UnknownTasksError

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
    """It did not work; `may_retry`: it could another time; `unknown`: what it does not know."""

    error: str
    may_retry: bool
    unknown: UnknownTasksError | None = None


@dataclass(frozen=True, slots=True)
class Postponed:
    """It could not be begun or merged, for something that may pass: no space, a killed worker."""

    why: str


@dataclass(frozen=True, slots=True)
class Killed:
    """A signal that the server did not send ended its evaluator; the kernel sends one, too."""

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
    """It came to no end, through no fault of its own."""

    why: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Nobody wants it any more; its processes are gone."""


@dataclass(frozen=True, slots=True)
class Left:
    """It goes on without this server; the next one adopts it."""


Outcome = Completed | Failed | Killed | Died | Postponed | Expired | Lost | Cancelled | Left
