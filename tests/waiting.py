"""Waiting for what other processes and threads do: for a condition, and for no time.

The limit is there for what hangs. No test is about it, so it may be generous: a machine that does
other things, too, takes many times as long as an idle one.
"""

import time
from collections.abc import Callable

__all__ = ["LIMIT_S", "wait_until"]

LIMIT_S = 600.0


def wait_until(condition: Callable[[], object], what: str = "") -> None:
    """Wait until something holds; `what` is named if it never does."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"still not: {what}"
        time.sleep(0.01)
