"""How many connections there are, and how long one may be silent: whoever it is, token or not.

A connection without a request costs a file descriptor, and a server without descriptors can start
no evaluator and open no database.
"""

import asyncio
import resource
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

__all__ = ["BoundedProtocol", "raise_file_limit"]

_MOST = 512
_SILENT_S = 10.0
_FILES = 65536


class BoundedProtocol(H11Protocol):
    """uvicorn's, but a whole head of a request must come within 10 s, bytes in between or not.

    Above 512 connections the one that has waited longest for its request is dropped, or the new one
    if all are being answered.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Make room for a connection, and wait for its request."""
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > _MOST:
            waiting = [one for one in self.connections if isinstance(one, BoundedProtocol)]
            min(waiting, key=BoundedProtocol.patience).drop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Begin to answer, if the request is there."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:  # type: ignore[redundant-expr]  # None at first
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._wait()
        super().on_response_complete()

    def patience(self) -> float:
        """Return when it is dropped if nothing comes; never, while it is answered."""
        return self._deadline.when() if self._deadline else float("inf")

    def _wait(self) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(_SILENT_S, self.drop)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def drop(self) -> None:
        """Close it at once."""
        self.connections.discard(self)
        self.transport.abort()


def raise_file_limit() -> None:
    """Let this process open as many files as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
