"""Who may speak to the server: address, token, host, origin, size. An ASGI layer around everything.

Loopback needs no token. Any other address needs one, unless networks are named that do not. The
Host header must name this server, and a browser's Origin must be it: a page of another site can
reach a loopback server, but cannot forge those.
"""

import hmac
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.responses import JSONResponse

from unshard.errors import UsageError

__all__ = ["Guard", "Rules", "rules_for"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Network = IPv4Network | IPv6Network

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_MAX_BODY = 1 << 20
_MIN_TOKEN = 16
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True)
class Rules:
    """Who may speak to the server.

    Attributes:
        token: what everybody must show; None: nobody needs one.
        free: networks whose addresses need none all the same.
        hosts: names under which the server may be addressed; empty: any.
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
        return Rules(token, free, frozenset(_LOOPBACK))
    if token is None and not free:
        raise UsageError(
            f"--host {host}: others can reach it",
            expected="--token-file, or --allow-unauthenticated CIDR",
            hint="write a long random text into a file that only you can read",
        )
    return Rules(token, free)


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach an address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _token(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8").strip()
        mode = file.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--token-file {file}: cannot be read: {error}") from error
    if len(text) < _MIN_TOKEN or not text.isascii() or not text.isprintable():
        raise UsageError(f"--token-file {file}: a token has at least {_MIN_TOKEN} ASCII characters")
    if mode & 0o077:
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
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {
            key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]
        }
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        await self._app(scope, _bounded(receive, self._rules.max_body), send)

    def _refusal(self, scope: Scope, headers: Mapping[str, str]) -> JSONResponse | None:
        host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        if self._rules.hosts and host not in self._rules.hosts:
            return _refused(403, f"Host {host!r} is not this server")
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers.get("host"):
            return _refused(403, f"Origin {origin!r} is not this server")
        if not self._is_known(scope, headers.get("authorization", "")):
            response = _refused(401, "a token is needed: Authorization: Bearer TOKEN")
            response.headers["WWW-Authenticate"] = 'Basic realm="unshard", charset="UTF-8"'
            return response
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > self._rules.max_body:
            return _refused(413, f"at most {self._rules.max_body} bytes")
        if scope["method"] not in _SAFE and int(length) and not _is_json(headers):
            return _refused(415, "Content-Type must be application/json")
        return None

    def _is_known(self, scope: Scope, authorization: str) -> bool:
        if self._rules.token is None and not self._rules.free:
            return True
        if self._is_free(scope.get("client")):
            return True
        if self._rules.token is None:
            return False
        shown = _shown_token(authorization)
        return hmac.compare_digest(shown.encode(), self._rules.token.encode())

    def _is_free(self, client: object) -> bool:
        if not self._rules.free or not isinstance(client, tuple | list) or not client:
            return False
        try:
            address = ip_address(str(client[0]))
        except ValueError:
            return False
        return any(address in network for network in self._rules.free)


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


def _is_json(headers: Mapping[str, str]) -> bool:
    """Tell whether a body is JSON: other kinds a browser sends to other sites without asking."""
    return headers.get("content-type", "").partition(";")[0].strip() == "application/json"


def _refused(status: int, message: str) -> JSONResponse:
    error = {"type": "Refused", "code": status, "message": message}
    return JSONResponse({"detail": message, "error": error}, status)


def _bounded(receive: Receive, limit: int) -> Receive:
    """Return `receive`, which ends the connection where a body without a length grows too long."""
    seen = 0

    async def take() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        return {"type": "http.disconnect"} if seen > limit else message

    return take
