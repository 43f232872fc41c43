"""The connections to one database: one per thread."""

import sqlite3
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unshard.evaluate.server.store.schema import connect

__all__ = ["Connections"]


class _Held:
    """A connection that is closed with the thread it belongs to."""

    def __init__(self, path: Path) -> None:
        self.connection = connect(path)

    def __del__(self) -> None:
        connection = getattr(self, "connection", None)
        if connection is not None:
            connection.close()


class Connections:
    """The connections to a database, which is made if it is missing; for any number of threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._local = threading.local()
        self._all: weakref.WeakSet[_Held] = weakref.WeakSet()
        path.parent.mkdir(parents=True, exist_ok=True)
        _ = self.own

    @property
    def own(self) -> sqlite3.Connection:
        """Return the connection of this thread."""
        held: _Held | None = getattr(self._local, "held", None)
        if held is None:
            held = self._local.held = _Held(self._path)
            self._all.add(held)
        return held.connection

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Begin a transaction that writes, and commit it; an exception rolls it back."""
        with self.own as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection

    def close(self) -> None:
        """Close the connections of all threads, none of which may use them any more."""
        for held in list(self._all):
            held.connection.close()
        self._local = threading.local()
