"""Signals that end a command: Ctrl-C, SIGTERM and SIGHUP.

Only a process that is a command has these handlers, never one that imports the package. While it
imports there is nothing to clean up, and much that must not be torn apart, so a signal ends it at
once. From `raise_them` on, a signal becomes an exception, and whatever is being made is removed.
This module imports little: what it imports is imported before there are handlers.
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
    """A signal asked the process to end; it is cleaned up as after Ctrl-C.

    Args:
        number: the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def end_at_once() -> None:
    """End the process at a signal, with a message and nothing else, until `raise_them`.

    Signals that are ignored (nohup, jobs in the background of a shell) stay so.
    """
    for number in _ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end)


def raise_them() -> None:
    """Raise `Interrupted` at a signal from now on; change nothing in a process of others."""
    for number in _ENDING:
        if signal.getsignal(number) is _end:
            signal.signal(number, _raise)


@contextmanager
def ending_softly(ask: Callable[[], object]) -> Iterator[None]:
    """Have the first SIGTERM call `ask` only; the next one raises. Elsewhere change nothing."""
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
    """Let signals change nothing any more: the outcome is settled."""
    for number in _ENDING:
        if signal.getsignal(number) in (_end, _raise):
            signal.signal(number, _ignore)


def ignore_for_good() -> None:
    """Let signals change nothing while the interpreter ends, and not the exit code.

    As it ends it takes handlers written in Python away, and leaves ignored signals ignored.
    """
    for number in _ENDING:
        if signal.getsignal(number) in (_end, _raise, _ignore):
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C, SIGTERM and SIGHUP from steps that they must not tear apart, to their end.

    Python runs signal handlers in the main thread only; elsewhere there is nothing to hold back.
    """
    import threading  # not before there are handlers

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
    before = signal.getsignal(number)
    if before in {None, signal.SIG_IGN}:  # None: not Python's, and cannot be put back
        yield
        return
    try:
        signal.signal(number, lambda number, _frame: came.append(number))
        yield
    finally:
        signal.signal(number, before)


def exit_code(error: BaseException) -> int:
    """Return 128 and the number of the signal that an interruption, or its cause, is due to."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, Interrupted):
            return 128 + cause.number
        cause = cause.__cause__
    return _INTERRUPTED


def message(error: KeyboardInterrupt) -> str:
    """Return the error's own message, or that nothing was left half done."""
    return str(error) or f"{how(error)}: nothing was left half done"


def how(error: BaseException) -> str:
    """Return what ended the work: "interrupted", or the name of the signal."""
    return _how(exit_code(error) - 128)


def _how(number: int) -> str:
    return "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"


def _end(number: int, _frame: FrameType | None) -> None:
    try:
        os.write(_STDERR, f"{_how(number)}: nothing was left half done\n".encode())
    finally:
        os._exit(128 + number)


def _raise(number: int, _frame: FrameType | None) -> None:
    raise Interrupted(number)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    pass
