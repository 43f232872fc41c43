"""What every client has: the server's address, what authenticates the client, and a connection."""

from typing import Protocol, TypedDict

import httpx

from unshard.evaluate.credentials import check_token, split_url

__all__ = ["DEFAULT_URL", "Answer", "Connected", "Credentials", "parse_server"]

DEFAULT_URL = "http://localhost:8000"

Answer = dict[str, object]


class Connected(Protocol):
    """A client with an open connection.

    Attributes:
        base_url: of the server, without a user, a password or a slash at its end.
        client: the connection, which authenticates each request.
    """

    base_url: str
    client: httpx.Client


class Credentials(TypedDict):
    """The arguments of an HTTP client that authenticate its requests."""

    headers: dict[str, str]
    auth: tuple[str, str] | None


def parse_server(url: str, token: str | None) -> tuple[str, Credentials]:
    """Return the address of a server, and the credentials in the URL and the token.

    Raises:
        UsageError: the URL or the token cannot be one. The error does not show token or password.
    """
    base_url, user = split_url(url.rstrip("/"), what="base_url")
    headers = {}
    if token:
        token = token.strip()  # the line break at the end of a file
        check_token(token, what="token")
        headers["Authorization"] = f"Bearer {token}"
    return base_url, Credentials(headers=headers, auth=user)
