"""Who may speak to the server: address, token, host, origin, size. An ASGI layer around everything.

A server on loopback needs no token. Any other needs one, or networks that are free of it; if there
is no token, clients on loopback are free, too. Who shows no token must name this server in the Host
header, and a browser's Origin must always be it: a page of another site can reach the server
through a name of its own (DNS rebinding), but it cannot forge those. An address as Host is no such
name. What proxies say about clients is not believed.
"""

import hmac
import socket
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.responses import JSONResponse

from unshard.errors import UsageError
from unshard.evaluate.credentials import read_token

__all__ = ["Guard", "Rules", "rules_for"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Network = IPv4Network | IPv6Network

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_LOOPBACK_NETWORKS = ("127.0.0.0/8", "::1/128")
_MAX_BODY = 1 << 20
_DRAINED = 16  # so many times as much is read and thrown away, that the client reads the refusal
_MIN_TOKEN = 16
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True)
class Rules:
    """Who may speak to the server.

    Attributes:
        token: what everybody must show; None: nobody needs one.
        free: networks whose addresses need none all the same.
        hosts: names under which those without a token may address the server; addresses always.
        max_body: bytes of a request.
    """

    token: str | None
    free: tuple[Network, ...] = ()
    hosts: frozenset[str] = frozenset()
    max_body: int = _MAX_BODY


def rules_for(
    host: str, token_file: Path | None, allow_unauthenticated: tuple[str, ...] = ()
) -> Rules:
    """Return the rules for an address to listen on.

    Raises:
        UsageError: it is not loopback, and there is neither a token nor a network named; or the
            token is too short, or its file readable by others.
    """
    token = None if token_file is None else _token(token_file)
    try:
        free = tuple(ip_network(one) for one in allow_unauthenticated)
    except ValueError as error:
        raise UsageError(f"--allow-unauthenticated: {error}") from error
    if is_loopback(host):
        return Rules(token, free if token else (), frozenset(_LOOPBACK))
    if token is None and not free:
        raise UsageError(
            f"--host {host}: others can reach it",
            expected="--token-file, or --allow-unauthenticated CIDR",
            hint="write a long random text into a file that only you can read",
        )
    if token is None:
        free += tuple(map(ip_network, _LOOPBACK_NETWORKS))
    name = socket.gethostname().lower()
    names = {host.lower(), name, name.partition(".")[0], socket.getfqdn().lower(), *_LOOPBACK}
    return Rules(token, free, frozenset(names))


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach an address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _token(file: Path) -> str:
    text = read_token(file, what=f"--token-file {file}")
    if len(text) < _MIN_TOKEN:
        raise UsageError(f"--token-file {file}: a token has at least {_MIN_TOKEN} ASCII characters")
    if file.expanduser().stat().st_mode & 0o077:
        raise UsageError(f"--token-file {file}: others may read it", hint=f"chmod 600 {file}")
    return text


class Guard:
    """Lets through what the rules allow; answers everything else itself.

    Args:
        app: what is guarded.
        rules: who may speak to it.
    """

    def __init__(self, app: App, rules: Rules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection; the application gets a body only when all of it is there."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = {
            key.decode("latin-1").lower(): value.decode("latin-1")
            for key, value in scope["headers"]
        }
        refusal = self._refusal(scope, headers)
        body = b""
        if refusal is None and (scope["method"] not in _SAFE or "content-type" in headers):
            found = await _read(receive, self._rules.max_body)
            body = found or b""
            refusal = self._too_large() if found is None else _not_json(body, headers)
        if refusal is None:
            await self._app(scope, _replayed(body, receive), send)
        else:
            await refusal(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Mapping[str, str]) -> JSONResponse | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._shows_token(headers.get("authorization", "")):
            if self._needs_token(scope.get("client")):
                why = (
                    "this token is not the server's" if "authorization" in headers else "none came"
                )
                response = _refused(
                    401, f"a token is needed, and {why}: Authorization: Bearer TOKEN"
                )
                response.headers["WWW-Authenticate"] = 'Basic realm="unshard", charset="UTF-8"'
                return response
            if not self._is_own_name(_host_in(f"//{host}")):
                return _refused(403, f"Host {host!r:.200} is not this server")
        if origin is not None and _netloc_in(origin) != host.lower():
            return _refused(403, f"Origin {origin!r:.200} is not this server")
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdecimal() and len(length) < 20):
            return self._too_large()
        if int(length) > _DRAINED * self._rules.max_body:
            return self._too_large()
        return None

    def _too_large(self) -> JSONResponse:
        return _refused(413, f"the body is too large: at most {self._rules.max_body} bytes")

    def _shows_token(self, authorization: str) -> bool:
        if self._rules.token is None:
            return False
        return hmac.compare_digest(_shown_token(authorization).encode(), self._rules.token.encode())

    def _needs_token(self, client: object) -> bool:
        is_open = self._rules.token is None and not self._rules.free
        return not is_open and not self._is_free(client)

    def _is_own_name(self, name: str) -> bool:
        return name in self._rules.hosts or _address(name) is not None

    def _is_free(self, client: object) -> bool:
        if not self._rules.free or not isinstance(client, tuple | list) or not client:
            return False
        address = _address(str(client[0]))
        return address is not None and any(address in network for network in self._rules.free)


def _address(text: str) -> IPv4Address | IPv6Address | None:
    """Return an address, of IPv4 where IPv6 only wraps it; None for a name."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def _host_in(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""


def _netloc_in(url: str) -> str:
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:
        return ""


def _shown_token(authorization: str) -> str:
    """Return the token that a header shows: Bearer, or as the password of Basic."""
    kind, _, value = authorization.partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    if kind.lower() != "basic":
        return ""
    try:
        return b64decode(value, validate=True).decode().partition(":")[2]
    except (Base64Error, UnicodeDecodeError, ValueError):
        return ""


def _not_json(body: bytes, headers: Mapping[str, str]) -> JSONResponse | None:
    """Refuse a body that is not JSON: other kinds a browser sends to other sites without asking."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if not body or kind == "application/json":
        return None
    return _refused(415, "Content-Type must be application/json")


def _refused(status: int, message: str) -> JSONResponse:
    stated = {"expected": "", "found": "", "hint": ""}
    error = {"type": "Refused", "code": status, "message": message, **stated}
    return JSONResponse({"detail": message, "error": error}, status)


async def _read(receive: Receive, limit: int) -> bytes | None:
    """Return a body; None if it is too large, or its sender went away."""
    kept, seen, is_more = bytearray(), 0, True
    while is_more:
        message = await receive()
        if message["type"] != "http.request":
            return None
        part, is_more = message.get("body", b""), message.get("more_body", False)
        seen += len(part)
        if seen <= limit:
            kept += part
        elif seen > _DRAINED * limit:
            return None
    return bytes(kept) if seen <= limit else None


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body that was read already, and then what follows."""
    is_given = False

    async def take() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return take
