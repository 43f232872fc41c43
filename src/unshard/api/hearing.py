"""Who hears what happens: the caller's listener, or else Python's warnings and a progress bar."""

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unshard.errors import UnshardWarning
from unshard.progress import Advanced, Event, Listener, Stage, Warned
from unshard.showing import is_notebook, is_terminal, listening

__all__ = ["hearing"]

_PACKAGE = str(Path(__file__).parent.parent)


@contextmanager
def hearing(listener: Listener | None) -> Iterator[Listener]:
    """Yield the caller's listener; without one, what warns and shows how far the work is.

    Warnings are then `UnshardWarning`; the bar is on stderr, if that is a terminal or a notebook.
    """
    if listener is not None:
        yield listener
        return
    with listening(quiet=not (is_terminal() or is_notebook())) as shown:

        def tell(event: Event) -> None:
            match event:
                case Warned():
                    _warn(event.message)
                case Stage() | Advanced():
                    shown(event)

        yield tell


def _warn(message: str) -> None:
    """Warn at the line of the caller's code, outside this package."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UnshardWarning, stacklevel=level)
