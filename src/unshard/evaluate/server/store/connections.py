"""The connections to the database of the store: one per thread."""

import sqlite3
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unshard.errors import UsageError
from unshard.evaluate.server.store.schema import migrate, writing

_BUSY_S = 30.0


def connect(path: Path) -> sqlite3.Connection:
    """Open or create the database, and bring its tables up to date as `schema.migrate` does."""
    connection = sqlite3.connect(
        path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
    )
    connection.row_factory = sqlite3.Row
    try:
        migrate(connection, path)  # first: a database that is refused is not written to
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
    except BaseException:
        connection.close()
        raise
    return connection


class _ThreadConnection:
    """A connection that is closed when its thread ends."""

    def __init__(self, path: Path) -> None:
        self.connection = connect(path)

    def __del__(self) -> None:
        connection = getattr(self, "connection", None)
        if connection is not None:
            connection.close()


class Connections:
    """The connections to a database, which is created if it is missing; thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._local = threading.local()
        self._all: weakref.WeakSet[_ThreadConnection] = weakref.WeakSet()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            state = self.texts("PRAGMA quick_check(1)")[0]
        except sqlite3.OperationalError as error:  # a full disk, a directory, a future format
            raise UsageError(f"{path}: cannot be opened", found=str(error)) from error
        except sqlite3.DatabaseError as error:
            state = str(error)
        if state != "ok":
            hint = "restore a copy, or move it elsewhere: the server then begins without its jobs"
            raise UsageError(f"{path}: is damaged", found=state, hint=hint)

    @property
    def own(self) -> sqlite3.Connection:
        """The connection of this thread."""
        if not hasattr(self._local, "held"):
            self._local.held = _ThreadConnection(self._path)
            self._all.add(self._local.held)
        connection: sqlite3.Connection = self._local.held.connection
        return connection

    def rows(self, query: str, *values: str | float | None) -> list[sqlite3.Row]:
        """Return the rows of a query."""
        return self.own.execute(query, values).fetchall()

    def texts(self, query: str, *values: str | float | None) -> list[str]:
        """Return the first column of the rows of a query."""
        return [row[0] for row in self.rows(query, *values)]

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Begin a transaction that writes, and commit it; an exception rolls it back."""
        with writing(self.own):
            yield self.own

    def close(self) -> None:
        """Close the connections of all threads, none of which may use them any more."""
        for held in list(self._all):
            held.connection.close()
        self._local = threading.local()
