"""Run several requests at a time, in this process's threads for stores."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from itertools import islice
from typing import TypeVar

AT_ONCE = 16
"""How many requests of this process run at a time."""

_AHEAD = 8

_T = TypeVar("_T")
_R = TypeVar("_R")
_Task = Callable[[], None]


class Ongoing:
    """Tasks that wait for a store, at most `most` of them at a time. For one thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._futures: deque[Future[None]] = deque()

    def add(self, task: _Task) -> None:
        """Start a task, if necessary after the end of an earlier task.

        Raises:
            Exception: the error of an earlier task; the others have ended then.
        """
        while len(self._futures) >= self._most:
            self._wait_for_first()
        self._futures.append(submit(task))

    @property
    def is_busy(self) -> bool:
        """Whether tasks may still run."""
        return bool(self._futures)

    def finish(self) -> None:
        """Wait for all tasks.

        Raises:
            Exception: the error of the first task that failed; the others have ended then.
        """
        while self._futures:
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        try:
            self._futures.popleft().result()
        except BaseException:
            for future in self._futures:
                future.cancel()
            while self._futures:
                future = self._futures.popleft()
                if not future.cancelled():
                    future.exception()
            raise


def ahead(function: Callable[[_T], _R], values: Sequence[_T]) -> Iterator[_R]:
    """Yield the results of a function for each value, in order; the next few calls run already.

    Raises:
        Exception: the error of the function for the next value.
    """
    futures: deque[Future[_R]] = deque()
    rest = iter(values)
    try:
        while True:
            more = islice(rest, _AHEAD - len(futures))
            futures.extend(submit(partial(function, value)) for value in more)
            if not futures:
                return
            yield futures.popleft().result()
    finally:
        for future in futures:
            future.cancel()


def all_at_once(tasks: Iterable[_Task]) -> None:
    """Run tasks that wait for a store, several at a time.

    This thread runs a single task itself, and all tasks if it belongs to the pool, which could
    deadlock otherwise.

    Raises:
        Exception: the error of the first task that failed; the others have ended then.
    """
    waiting = list(tasks)
    if len(waiting) == 1 or getattr(_thread, "waits", False):
        for task in waiting:
            task()
        return
    ongoing = Ongoing(AT_ONCE)
    for task in waiting:
        ongoing.add(task)
    ongoing.finish()


def away_from_signals(function: Callable[[], _R]) -> _R:
    """Return the result of a function, which another thread calls if this is the main thread.

    A signal interrupts the wait at once, but might be delayed or lost inside the function.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    return submit(function).result()


_thread = threading.local()


def _begin() -> None:
    _thread.waits = True


_pools: dict[int, ThreadPoolExecutor] = {}
_lock = threading.Lock()


def submit(function: Callable[[], _R]) -> "Future[_R]":
    """Run a function in the pool, with this thread's context, which records the opened files."""
    with _lock:
        pool = _pools.get(os.getpid())
        if pool is None:  # a fork has no threads of its parent
            _pools.clear()
            pool = _pools[os.getpid()] = ThreadPoolExecutor(AT_ONCE, "unshard-store", _begin)
    return pool.submit(copy_context().run, function)
