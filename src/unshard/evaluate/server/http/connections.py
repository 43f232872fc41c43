"""Bound the cost of slow clients, by an ASGI layer and a setting of the listening socket.

An answer that its client does not read takes memory, and each connection a file descriptor; without
descriptors a server can neither start an evaluator nor open its database. Connections without a
request are not closed here: the documentation has the settings of a proxy that closes them.
"""

import asyncio
import resource
import socket

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unshard.evaluate.server.health import RETRY_AFTER_S
from unshard.evaluate.server.http.security import Refusal

_SILENT_S = 10.0
_FILES = 65536
_PIECE = 1 << 16  # bytes of an answer that are handed to uvicorn at once
_UNREAD = 64 << 20  # bytes of all answers that wait for their clients


class Bounds:
    """An ASGI layer that sends large bodies piece by piece, as fast as clients read them.

    While 64 MiB wait to be read, further large answers are replaced by status 503.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._unread = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, also when it is cancelled because the server ends."""
        start: Message | None = None  # held back until the size of the body is known
        has_answered = is_refused = False

        async def send_bounded(message: Message) -> None:
            nonlocal start, has_answered, is_refused
            if message["type"] == "http.response.start":
                start = message
                return
            if start is not None:
                begun, start, has_answered = start, None, True
                is_refused = not self._has_room(message)
                if is_refused:
                    await _away("too many answers wait to be read")(scope, receive, send)
                else:
                    await send(begun)
            if not is_refused:
                await self._send_in_pieces(message, send)

        try:
            await self._app(scope, receive, send_bounded)
        except asyncio.CancelledError:
            if not has_answered:  # else uvicorn closes the connection
                await _away("the server is stopping")(scope, receive, send)

    def _has_room(self, message: Message) -> bool:
        size = len(message.get("body", b""))
        return size <= _PIECE or not self._unread or self._unread + size <= _UNREAD

    async def _send_in_pieces(self, message: Message, send: Send) -> None:
        """Send a part of an answer; uvicorn waits with each piece until the last one is read."""
        body = message.get("body", b"")
        if len(body) <= _PIECE:
            await send(message)
            return
        self._unread += len(body)
        try:
            for begin in range(0, len(body), _PIECE):
                is_more = begin + _PIECE < len(body) or message.get("more_body", False)
                piece = {"body": body[begin : begin + _PIECE], "more_body": is_more}
                await send({**message, **piece})
        finally:
            self._unread -= len(body)


def _away(why: str) -> Response:
    return Refusal(503, why, {"Retry-After": str(RETRY_AFTER_S)})


def give_up_silent_readers(listening: socket.socket) -> None:
    """Let the kernel (Linux) close connections whose clients read nothing for 10 s."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it
        limit = int(_SILENT_S * 1000)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit, at most 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
