"""Steps that must not be interrupted: Ctrl-C and SIGTERM wait until they are done.

Python runs signal handlers in the main thread only; elsewhere there is nothing to hold back.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["uninterrupted"]

_HELD_BACK = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C and SIGTERM; what came meanwhile takes effect at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def hold_back(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    before = {}
    for number in _HELD_BACK:
        handler = signal.getsignal(number)
        if handler not in {None, signal.SIG_IGN}:  # None: not Python's, and cannot be put back
            before[number] = handler
            signal.signal(number, hold_back)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
