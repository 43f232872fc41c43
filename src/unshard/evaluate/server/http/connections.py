"""Bounds on the number of connections, on silent ones, and on answers that clients do not read.

They apply to every client, with a token or without. A connection without a request costs a file
descriptor, and a server without descriptors can neither start an evaluator nor open its database.
An answer that its client does not read costs memory.
"""

import asyncio
import resource
from typing import TYPE_CHECKING, Any

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from unshard.evaluate.server.health import RETRY_AFTER_S
from unshard.evaluate.server.http.security import refused

if TYPE_CHECKING:
    from uvicorn._types import (
        ASGIReceiveCallable,
        ASGISendCallable,
        ASGISendEvent,
        HTTPResponseBodyEvent,
        Scope,
    )

_MOST = 512
_SILENT_S = 10.0
_FILES = 65536
_PIECE = 1 << 16  # bytes of an answer that are handed to the kernel at once
_UNREAD = 64 << 20  # bytes of all answers that wait for their clients


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol, with bounds.

    A request must be complete within 10 s, and a client must read each 64 KiB of an answer within
    10 s. Above 512 connections, the connection that has waited longest for its client is dropped;
    if all are being answered, it is the new one. While unread answers exceed 64 MiB, the connection
    that has waited longest for its client to read is dropped.
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
        self._whole_app = self.app
        self.app = self._answer
        self.unread = 0  # bytes of the answer that the kernel has not taken yet

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Make room for a connection, and wait for its request."""
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > _MOST:
            self._drop_slowest(self._others())

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Stop the clock once the whole request has arrived."""
        super().handle_events()
        if self._is_the_servers_turn():
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._wait()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Wait for the client to read."""
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        """Continue the answer, or wait for the next request."""
        super().resume_writing()
        if self._is_the_servers_turn():
            self._stop_waiting()
        else:
            self._wait()

    def _is_the_servers_turn(self) -> bool:
        """Return whether the client has done all that it can."""
        if self.cycle is None or self.flow.write_paused:  # type: ignore[redundant-expr]  # None at first
            return False
        return not (self.cycle.more_body or self.cycle.response_complete)

    async def _answer(
        self, scope: "Scope", receive: "ASGIReceiveCallable", send: "ASGISendCallable"
    ) -> None:
        """Answer a request; a large body is sent piece by piece, as fast as it is read."""
        has_begun = False

        async def send_in_pieces(message: "ASGISendEvent") -> None:
            nonlocal has_begun
            has_begun = True
            body = message.get("body", b"") if message["type"] == "http.response.body" else b""
            if len(body) <= _PIECE:
                await send(message)
                return
            self._make_room(len(body))
            for start in range(0, len(body), _PIECE):
                part = body[start : start + _PIECE]
                is_more = start + len(part) < len(body) or bool(message.get("more_body"))
                piece: HTTPResponseBodyEvent
                piece = {"type": "http.response.body", "body": part, "more_body": is_more}
                self.unread = len(body) - start
                await send(piece)
            self.unread = 0

        try:
            await self._whole_app(scope, receive, send_in_pieces)
        except asyncio.CancelledError:
            # The server ends. uvicorn would answer 500, and log a mistake of the application.
            if not has_begun:
                away = refused(503, "the server is stopping")
                away.headers["Retry-After"] = str(RETRY_AFTER_S)
                await away(scope, receive, send)  # type: ignore[arg-type]  # starlette's types
            else:
                self.drop()
                await asyncio.sleep(0)  # until uvicorn knows that nobody waits for the rest
        finally:
            self.unread = 0

    def _make_room(self, size: int) -> None:
        """Drop the slowest readers until an answer of `size` bytes fits."""
        unread = [one for one in self._others() if one.unread and one is not self]
        size += sum(one.unread for one in unread)
        while unread and size > _UNREAD:
            size -= self._drop_slowest(unread)

    def _others(self) -> "list[BoundedProtocol]":
        return [one for one in self.connections if isinstance(one, BoundedProtocol)]

    def _drop_slowest(self, among: "list[BoundedProtocol]") -> int:
        """Drop the connection that has waited longest; return how many bytes were unread."""
        slowest = min(among, key=BoundedProtocol.patience)
        among.remove(slowest)
        slowest.drop()
        return slowest.unread

    def patience(self) -> float:
        """Return the time at which it is dropped; infinity while the server is answering."""
        return self._deadline.when() if self._deadline else float("inf")

    def _wait(self) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(_SILENT_S, self.drop)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def drop(self) -> None:
        """Close the connection at once."""
        self.connections.discard(self)
        self.transport.abort()


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit, at most 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
