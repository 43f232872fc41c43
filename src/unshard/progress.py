"""What happens while unshard works, as events for terminal, JSON, server and callbacks alike.

This module knows the events, not how they are shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from unshard.errors import printable, told
from unshard.fronts import PYTHON, reword_warning


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage begins; `total_bytes` is what it will write, 0 where that is not known.

    Without a name, nothing is under way until the next one.
    """

    name: str
    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which checkpoint is worked on, and which were passed over; comes before anything is made."""

    message: str

    def __post_init__(self) -> None:
        """A path may have a name that no stream takes."""
        object.__setattr__(self, "message", printable(self.message))


@dataclass(frozen=True, slots=True)
class Advanced:
    """`written_bytes` more bytes of the current stage's total have been written."""

    written_bytes: int


@dataclass(frozen=True, slots=True)
class Warned:
    """Something the user should know; it does not stop the work.

    Attributes:
        text: a sentence, `printable`; it names options as `unshard merge` has them.
    """

    text: str

    def __post_init__(self) -> None:
        """A note may quote a name that no stream takes."""
        object.__setattr__(self, "text", told(self.text))

    @property
    def message(self) -> str:
        """The same in the words of Python."""
        return reword_warning(self.text, PYTHON)


Event = Stage | Chosen | Advanced | Warned


class Listener(Protocol):
    """Called with every event, from one thread at a time; must not raise."""

    def __call__(self, event: Event, /) -> None:
        """Take an event."""


def ignore(_event: Event, /) -> None:
    """Take an event and do nothing."""


def warn(listener: Listener, notes: Sequence[str]) -> list[str]:
    """Give notes to the listener, and return them."""
    for note in notes:
        listener(Warned(note))
    return list(notes)
