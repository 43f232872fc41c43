"""Steps that must not be interrupted: Ctrl-C, SIGTERM and SIGHUP wait until they are done.

Python runs signal handlers in the main thread only; elsewhere there is nothing to hold back.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["uninterrupted"]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C, SIGTERM and SIGHUP; a signal takes effect at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    try:
        # one inside the other: a signal between two of them still puts the outer ones back
        with (
            _held_back(signal.SIGINT, came),
            _held_back(signal.SIGTERM, came),
            _held_back(signal.SIGHUP, came),
        ):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


@contextmanager
def _held_back(number: int, came: list[int]) -> Iterator[None]:
    def hold_back(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    before = signal.getsignal(number)
    if before in {None, signal.SIG_IGN}:  # None: not Python's, and cannot be put back
        yield
        return
    try:
        signal.signal(number, hold_back)
        yield
    finally:
        signal.signal(number, before)
