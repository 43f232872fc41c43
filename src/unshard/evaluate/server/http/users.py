"""The users of a server: their names, roles and tokens, and the sessions of their browsers.

A file has one token, of an operator, or a line `NAME ROLE TOKEN` for each user.

When a user logs in, the browser gets a cookie with the time at which it expires and an HMAC of this
time by the token. The cookie does not have the token, because browsers send it to other servers of
the same host too: cookies do not distinguish ports. It is also valid for the next server with the
same token; a new token ends all sessions.
"""

import hashlib
import hmac
import re
import time
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from unshard.errors import UsageError
from unshard.evaluate.credentials import check_token, read_text

LASTS_S = 30 * 86400  # of a session
_SHORTEST = 16
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}", re.ASCII)


class Role(StrEnum):
    """A user's permissions: read; also submit jobs and change the own ones; everything."""

    VIEWER = "viewer"
    OWNER = "owner"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class User:
    """The user who sent a request; users without a name are not distinguished."""

    name: str = ""
    role: Role = Role.OPERATOR
    token: str = field(default="", repr=False)

    def may_change(self, owner: str) -> bool:
        """Return whether this user may cancel, retry or hide the jobs of `owner`."""
        return self.role is Role.OPERATOR or (self.role is Role.OWNER and owner == self.name)


def read_users(file: Path, *, what: str) -> tuple[User, ...]:
    """Return the users in a file, which errors call `what`.

    Raises:
        UsageError: it cannot be read, or is invalid. The error shows no token.
    """
    text = read_text(file, what=what)
    lines = {
        number: line.split()
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.lstrip().startswith("#")
    }
    # One line of three words is a user, whose role may be misspelt: not the token of an operator.
    is_token = len(text.splitlines()) < 2 and all(len(line) != 3 for line in lines.values())
    if not text or (is_token and lines):
        check_token(text, what=what)
        users = [User(token=text)]
    else:
        wrong = [number for number, line in lines.items() if not _is_user(line)]
        if wrong or not lines:
            roles = "|".join(Role)
            raise UsageError(
                f"{what}: neither a token nor users",
                expected=f"one token, or NAME {roles} TOKEN on each line",
                found=f"line {wrong[0]} is not a user" if wrong else "no line but comments",
            )
        users = [User(name, Role(role), token) for name, role, token in lines.values()]
    if any(len(user.token) < _SHORTEST for user in users):
        raise UsageError(f"{what}: a token has at least {_SHORTEST} ASCII characters")
    for values in ([user.name.casefold() for user in users], [user.token for user in users]):
        if len(set(values)) < len(values):
            raise UsageError(f"{what}: two users have the same name or token")
    return tuple(users)


def _is_user(line: Sequence[str]) -> bool:
    if len(line) != 3 or line[1] not in list(Role) or not _NAME.fullmatch(line[0]):
        return False
    return line[2].isascii() and line[2].isprintable()


def find_user(users: Iterable[User], headers: Mapping[str, str]) -> User | None:
    """Return the user of a request's token: Bearer, the password of Basic, or a cookie."""
    kind, _, value = headers.get("authorization", "").partition(" ")
    token = value.strip() if kind.lower() == "bearer" else ""
    if kind.lower() == "basic":
        with suppress(Base64Error, UnicodeDecodeError, ValueError):
            token = b64decode(value, validate=True).decode().partition(":")[2]
    cookies = headers.get("cookie", "")
    by_token = user_with(users, token)
    return by_token or next((user for user in users if shows_session(user.token, cookies)), None)


def user_with(users: Iterable[User], token: str) -> User | None:
    """Return the user of a token."""
    # All tokens are compared, so that the time does not depend on the user.
    code = token.encode()
    matching = [user for user in users if hmac.compare_digest(code, user.token.encode())]
    return matching[-1] if matching else None


def cookie_name(token: str) -> str:
    """Return the name of a token's cookie; a shared name would make servers replace it."""
    return f"unshard_{_code(token, 'name')[:8]}"


def make_session(token: str) -> str:
    """Return the value of a new cookie."""
    end = str(int(time.time()) + LASTS_S)
    return f"{end}.{_code(token, end)}"


def shows_session(token: str, cookies: str) -> bool:
    """Return whether the header `Cookie` has a valid session."""
    # Not by `http.cookies`, which stops at an invalid value: browsers also send the cookies of
    # other programs of this host.
    pairs = (cookie.strip().partition("=") for cookie in cookies.split(";"))
    values = {name: value for name, _, value in pairs}
    end, _, code = values.get(cookie_name(token), "").partition(".")
    is_time = end.isascii() and end.isdecimal() and len(end) < 16
    is_ours = hmac.compare_digest(code.encode(), _code(token, end).encode())
    return is_ours and is_time and time.time() < int(end)


def _code(token: str, text: str) -> str:
    return hmac.new(token.encode(), f"unshard page: {text}".encode(), hashlib.sha256).hexdigest()
