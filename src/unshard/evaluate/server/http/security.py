"""Access control by address, token, Host, Origin and size of a request: an ASGI layer.

A server on loopback needs no token. Any other server needs a token, or networks whose clients need
none; without a token, clients on loopback need none either. A request without a token must have
this server, or an address, in its Host header, and a browser's Origin must always be this server: a
page of another site can reach the server under a host name that the site controls (DNS rebinding),
but it cannot forge these headers. Headers in which proxies describe their clients are ignored.
A browser without a token is redirected to the form to log in.

Users have roles (`users`). A viewer only reads; the routes check which jobs an owner may change.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path
from urllib.parse import SplitResult, quote, urlsplit

from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unshard.errors import UsageError
from unshard.evaluate.server.http.users import Role, User, find_user, read_users

Network = IPv4Network | IPv6Network

LOG_IN = "/view/log-in"
LOG_OUT = "/view/log-out"
PAGE_HEADER = "x-unshard-page"
"""A header of the page's own requests: no browser should ask for a password if they are refused."""

_OPEN = (LOG_IN, "/view/static/")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_LOOPBACK_NETWORKS = ("127.0.0.0/8", "::1/128")
_MAX_BODY = 1 << 20
_DRAINED = 16  # times the limit is read and dropped: a client that is sending reads no answer
_BODY_S = 10.0
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_VIEWER = "a viewer cannot change anything: ask for a token with the role owner"
_HOST = (
    "to use another DNS name, or a proxy, start the server with --token-file: a request with a "
    "token may have any Host; without tokens, every client of a proxy counts as a user of this "
    "machine"
)
_ORIGIN = (
    "behind a proxy, forward the Host that browsers send (nginx: proxy_set_header Host $http_host)"
)


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of access.

    Attributes:
        users: every request needs the token of one of them; empty: no request needs a token.
        free: networks whose clients need no token.
        hosts: the Host names that a request without a token may have, besides addresses.
        max_body: the largest body of a request, in bytes.
        root: the path of the server behind a proxy, such as `/eval`.
    """

    users: tuple[User, ...]
    free: tuple[Network, ...] = ()
    hosts: frozenset[str] = frozenset()
    max_body: int = _MAX_BODY
    root: str = ""

    @property
    def anyone(self) -> User:
        """The user of requests that need no token: a viewer, if users have roles."""
        return User(role=Role.VIEWER if any(user.name for user in self.users) else Role.OPERATOR)


def rules_for(
    host: str,
    token_file: Path | None,
    allow_unauthenticated: tuple[str, ...] = (),
    root: str = "",
) -> Rules:
    """Return the rules for an address to listen on.

    Raises:
        UsageError: an address other than loopback needs a token or a network; or the token is too
            short, or other users may read its file.
    """
    users: tuple[User, ...] = ()
    if token_file is not None:
        option = f"--token-file {token_file}"
        users = read_users(token_file, what=option)
        if token_file.expanduser().stat().st_mode & 0o077:
            raise UsageError(f"{option}: others may read it", hint=f"chmod 600 {token_file}")
    try:
        free = tuple(map(ip_network, allow_unauthenticated))
    except ValueError as error:
        raise UsageError(f"--allow-unauthenticated: {error}") from error
    if is_loopback(host):
        return Rules(users, free if users else (), frozenset(_LOOPBACK), root=root)
    if not users and not free:
        raise UsageError(
            f"--host {host}: other machines can reach it, so requests must be authenticated",
            expected="--token-file, or --allow-unauthenticated CIDR",
            hint="write a long random text into a file that only you can read",
        )
    if not users:
        free += tuple(map(ip_network, _LOOPBACK_NETWORKS))
    name = socket.gethostname().lower()
    names = {host.lower(), name, name.partition(".")[0], socket.getfqdn().lower(), *_LOOPBACK}
    return Rules(users, free, frozenset(names), root=root)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class Refusal(JSONResponse):
    """An error in the forms of both protocols, for a request that reaches no endpoint."""

    def __init__(
        self, status: int, message: str, headers: Mapping[str, str] | None = None, hint: str = ""
    ) -> None:
        self.message, self.hint = message, hint
        parts = {"expected": "", "found": "", "hint": hint}
        error = {"type": "Refused", "code": status, "message": message, **parts}
        detail = f"{message}; {hint}" if hint else message
        super().__init__({"detail": detail, "error": error}, status, headers)


class _HeadersSentError(Exception):
    """The answer to HEAD is complete: its body, which may have no end, is not made."""


class Guard:
    """An ASGI layer that refuses requests that the rules do not allow."""

    def __init__(self, app: ASGIApp, rules: Rules, show_error: Callable[..., Response]) -> None:
        self._app = app
        self._rules = rules
        self._show_error = show_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; the application gets it with the complete body."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        if self._rules.root and scope["path"].startswith(f"{self._rules.root}/"):
            scope["path"] = scope["path"].removeprefix(self._rules.root)  # some proxies remove it
        headers = {
            key.decode("latin-1").lower(): value.decode("latin-1")
            for key, value in scope["headers"]
        }
        refusal = self._refusal(scope, headers)
        body = b""
        if refusal is None and (scope["method"] not in _SAFE or "content-type" in headers):
            try:
                async with asyncio.timeout(_BODY_S):
                    read = await _read(receive, self._rules.max_body)
            except TimeoutError:
                refusal = Refusal(408, "the body did not come in time", {"Connection": "close"})
            else:
                body = read or b""
                refusal = self._too_large() if read is None else _not_json(body, headers)
        if refusal is None:
            await self._serve(scope, _replayed(body, receive), send)
            return
        if isinstance(refusal, Refusal) and _is_of_browser(headers):
            more = {name: text for name, text in refusal.headers.items() if "content" not in name}
            refusal = self._show_error(
                refusal.status_code, refusal.message, {"hint": refusal.hint}, self._rules.root, more
            )
        await refusal(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve an allowed request; HEAD as GET, up to the body."""
        if scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        scope["method"] = "GET"

        async def send_headers(message: Message) -> None:
            scope["method"] = "HEAD"  # the server needs it
            if message["type"] == "http.response.body":
                await send({"type": "http.response.body", "body": b""})
                raise _HeadersSentError
            await send(message)

        with suppress(_HeadersSentError):
            await self._app(scope, receive, send_headers)

    def _refusal(self, scope: Scope, headers: Mapping[str, str]) -> Response | None:
        """Return the refusal of a request; an allowed request gets its `user`."""
        host, origin = headers.get("host", ""), headers.get("origin")
        user = find_user(self._rules.users, headers)
        if user is None and not (self._rules.users and scope["path"].startswith(_OPEN)):
            if self._needs_token(scope.get("client")):
                return _ask_for_token(scope, headers, self._rules.root)
            name = (_split(f"//{host}").hostname or "").lower()
            if name not in self._rules.hosts and _address(name) is None:
                return Refusal(403, f"Host {host!r:.200} is not this server", hint=_HOST)
        scope["user"] = user = user or self._rules.anyone
        is_change = scope["method"] not in _SAFE and scope["path"] not in (LOG_IN, LOG_OUT)
        if user.role is Role.VIEWER and is_change:
            who = f"{user.name} is" if user.name else "without a token, you are"
            return Refusal(403, f"{who} a viewer", hint=_VIEWER)
        if origin is not None and _split(origin).netloc.lower() != host.lower():
            return Refusal(403, f"Origin {origin!r:.200} is not this server", hint=_ORIGIN)
        length = headers.get("content-length", "0")
        is_number = length.isascii() and length.isdecimal() and len(length) < 20
        if not is_number or int(length) > _DRAINED * self._rules.max_body:
            return self._too_large()
        return None

    def _too_large(self) -> Refusal:
        return Refusal(413, f"the body is too large: at most {self._rules.max_body} bytes")

    def _needs_token(self, client: object) -> bool:
        if not self._rules.free:
            return bool(self._rules.users)
        address = _address(str(client[0])) if isinstance(client, tuple | list) and client else None
        return address is None or not any(address in network for network in self._rules.free)


def _address(text: str) -> IPv4Address | IPv6Address | None:
    """Return an address, as IPv4 where IPv6 maps it; None for a name."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def _split(url: str) -> SplitResult:
    """Return the parts of a URL; empty ones if it is malformed."""
    try:
        parts = urlsplit(url)
        _ = parts.hostname  # parsed here, with its errors
    except ValueError:
        return urlsplit("")
    return parts


def _ask_for_token(scope: Scope, headers: Mapping[str, str], root: str) -> Response:
    """Refuse a request without a valid token; redirect a browser that opens a page to the form."""
    if scope["method"] == "GET" and _is_of_browser(headers):
        query = scope.get("query_string", b"").decode("latin-1")
        address = quote(f"{root}{scope['path']}" + (f"?{query}" if query else ""), safe="")
        target = f"{root}{LOG_IN}?next={address}"
        return RedirectResponse(target, 303, {"Cache-Control": "no-store"})
    lacking = "a token is required (Authorization: Bearer TOKEN)"
    response = Refusal(401, "wrong token" if "authorization" in headers else lacking)
    if PAGE_HEADER not in headers:
        response.headers["WWW-Authenticate"] = 'Basic realm="unshard", charset="UTF-8"'
    return response


def _not_json(body: bytes, headers: Mapping[str, str]) -> Refusal | None:
    """Refuse a body that is not JSON: browsers send other types across sites without preflight."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if not body or kind == "application/json":
        return None
    return Refusal(415, "Content-Type must be application/json")


def _is_of_browser(headers: Mapping[str, str]) -> bool:
    """Return whether a browser opens a page, and no script of a page sends the request."""
    return "text/html" in headers.get("accept", "") and PAGE_HEADER not in headers


async def _read(receive: Receive, limit: int) -> bytes | None:
    """Return a body; None if it is too large, or if the client has disconnected."""
    body, seen, is_more = bytearray(), 0, True
    while is_more:
        message = await receive()
        if message["type"] != "http.request":
            return None
        part, is_more = message.get("body", b""), message.get("more_body", False)
        seen += len(part)
        if seen <= limit:
            body += part
        elif seen > _DRAINED * limit:
            return None
    return bytes(body) if seen <= limit else None


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that first returns a body that was already read."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_next() -> Message:
        return messages.pop() if messages else await receive()

    return receive_next
