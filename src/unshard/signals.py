"""Signals that end a command: Ctrl-C, SIGTERM and SIGHUP.

Only commands install these handlers, never a process that imports the package. While a command
imports modules, there is nothing to clean up and an exception could leave an import half done, so a
signal ends the process at once. After `raise_them`, a signal raises an exception, and unfinished
output is removed. This module imports little, because its imports run before the handlers exist.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_INTERRUPTED = 128 + signal.SIGINT
_STDERR = 2


class Interrupted(KeyboardInterrupt):
    """A signal (its `number`) asked the process to end; cleaned up as after Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def end_at_once() -> None:
    """Until `raise_them`, end the process at a signal, with a message and no cleanup.

    Signals that are ignored (nohup, background jobs of a shell) stay ignored.
    """
    for number in _ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end)


def raise_them() -> None:
    """Raise `Interrupted` at a signal from now on; do nothing if the process is not a command."""
    for number in _ENDING:
        if signal.getsignal(number) is _end:
            signal.signal(number, _raise)


@contextmanager
def ending_softly(ask: Callable[[], object]) -> Iterator[None]:
    """Let the first SIGTERM only call `ask`; the next raises. No effect outside commands."""
    if signal.getsignal(signal.SIGTERM) is not _raise:
        yield
        return

    def first(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, _raise)
        ask()

    signal.signal(signal.SIGTERM, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, _raise)


def ignore() -> None:
    """Ignore signals from now on, because the outcome is settled."""
    for number in _ENDING:
        if signal.getsignal(number) in (_end, _raise):
            signal.signal(number, _ignore)


def ignore_for_good() -> None:
    """Ignore signals while the interpreter exits, so that the exit code stays.

    The interpreter removes handlers written in Python on exit, but keeps SIG_IGN.
    """
    for number in _ENDING:
        if signal.getsignal(number) in (_end, _raise, _ignore):
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C, SIGTERM and SIGHUP until the context ends, for steps that must stay whole.

    Python runs signal handlers in the main thread only, so other threads need no delay.
    """
    import threading  # imported here, after the handlers exist

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    try:
        # nested, so that a signal between two of them still restores the outer handlers
        with (
            _held_back(signal.SIGINT, received),
            _held_back(signal.SIGTERM, received),
            _held_back(signal.SIGHUP, received),
        ):
            yield
    finally:
        if received:
            signal.raise_signal(received[0])


@contextmanager
def _held_back(number: int, received: list[int]) -> Iterator[None]:
    before = signal.getsignal(number)
    if before in {None, signal.SIG_IGN}:  # None: a handler of C code, which cannot be restored
        yield
        return
    try:
        signal.signal(number, lambda number, _frame: received.append(number))
        yield
    finally:
        signal.signal(number, before)


def exit_code(error: BaseException) -> int:
    """Return 128 + the number of the signal that caused an interruption."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, Interrupted):
            return 128 + cause.number
        cause = cause.__cause__
    return _INTERRUPTED


def message(error: KeyboardInterrupt) -> str:
    """Return the error's own message, or that no partial output is left."""
    return str(error) or f"{how(error)}: no partial output left"


def how(error: BaseException) -> str:
    """Return "interrupted" after Ctrl-C, else "ended by" and the name of the signal."""
    return _how(exit_code(error) - 128)


def _how(number: int) -> str:
    return "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"


def _end(number: int, _frame: FrameType | None) -> None:
    try:
        os.write(_STDERR, f"{_how(number)}: no partial output left\n".encode())
    finally:
        os._exit(128 + number)


def _raise(number: int, _frame: FrameType | None) -> None:
    raise Interrupted(number)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    pass
