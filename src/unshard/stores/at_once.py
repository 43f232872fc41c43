"""Several requests at a time: the threads of this process that wait for stores."""

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
"""How many requests are under way at a time, in this process."""

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
        """Begin a task, if need be after the end of an earlier one.

        Raises:
            Exception: what an earlier one ended with; the others are over then.
        """
        while len(self._futures) >= self._most:
            self._wait_for_first()
        self._futures.append(submit(task))

    @property
    def is_busy(self) -> bool:
        """Whether there are tasks whose end was not waited for."""
        return bool(self._futures)

    def finish(self) -> None:
        """Wait for all tasks.

        Raises:
            Exception: what the first that failed ended with; the others are over then.
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


def ahead(function: Callable[[_T], _R], given: Sequence[_T]) -> Iterator[_R]:
    """Yield what a function returns for each value, in their order; the next few are under way.

    Raises:
        Exception: what the function raised for the value whose turn it is.
    """
    futures: deque[Future[_R]] = deque()
    left = iter(given)
    try:
        while True:
            more = islice(left, _AHEAD - len(futures))
            futures.extend(submit(partial(function, one)) for one in more)
            if not futures:
                return
            yield futures.popleft().result()
    finally:
        for future in futures:
            future.cancel()


def all_at_once(tasks: Iterable[_Task]) -> None:
    """Do tasks that wait for a store, several at a time.

    One alone is done by this thread, and so are all those of a thread that does such a task itself.

    Raises:
        Exception: what the first that failed ended with; the others are over then.
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
    """Return what a function returns; the main thread waits for another one that calls it.

    A signal ends that wait at once, where the function would keep it back, or lose its number.
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
    """Begin a function in the context of this thread: that has what notes the files it opens."""
    return _pool().submit(copy_context().run, function)


def _pool() -> ThreadPoolExecutor:
    """Return the threads of this process; a fork has none of its parent's."""
    with _lock:
        if os.getpid() not in _pools:
            _pools.clear()
            _pools[os.getpid()] = ThreadPoolExecutor(AT_ONCE, "unshard-store", _begin)
        return _pools[os.getpid()]
