"""Progress events, the same for terminal, JSON, server and callbacks; `console` displays them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unshard.errors import as_message, printable
from unshard.fronts import PYTHON, reword_warning


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage begins, which will write `total_bytes` (0: unknown).

    A stage without a name ends the one before it.
    """

    name: str
    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Chosen:
    """The chosen checkpoint, and which others were skipped; comes before anything is written."""

    message: str

    def __post_init__(self) -> None:
        """Make the message `printable`: paths may contain any character."""
        object.__setattr__(self, "message", printable(self.message))


@dataclass(frozen=True, slots=True)
class Advanced:
    """`written_bytes` more bytes of the current stage's total have been written."""

    written_bytes: int


@dataclass(frozen=True, slots=True)
class Warned:
    """Something the user should know; it does not stop the work.

    Attributes:
        text: a `printable` sentence, with the options of `unshard merge`.
    """

    text: str

    def __post_init__(self) -> None:
        """Make the text `printable`: it may quote names with any character."""
        object.__setattr__(self, "text", as_message(self.text))

    @property
    def message(self) -> str:
        """The text with Python's keywords instead of options."""
        return reword_warning(self.text, PYTHON)


Event = Stage | Chosen | Advanced | Warned


Listener = Callable[[Event], None]
"""Called with every event, from one thread at a time; must not raise."""


def ignore(_event: Event, /) -> None:
    """Take an event and do nothing."""


def warn(listener: Listener, notes: Sequence[str]) -> list[str]:
    """Give notes to the listener, and return them."""
    for note in notes:
        listener(Warned(note))
    return list(notes)
