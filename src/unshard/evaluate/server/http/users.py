"""The users of a server: their names, roles and tokens, and the sessions of their browsers.

A file has one token, whose holder may do everything, or a line `NAME ROLE TOKEN` for each user.

A browser shows a token by the cookie that it got when its user logged in. The cookie has the time
at which it ends, and a code of it made with the token, but not the token: other servers of the same
host get it, too, because cookies do not distinguish ports. It is valid until then, also for the
next server with the same token; another token ends all of them.
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

LASTS_S = 30 * 86400
"""How long a browser stays logged in, seconds."""

_SHORTEST = 16
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}", re.ASCII)


class Role(StrEnum):
    """What a user may do: look; submit, and change the own jobs; everything."""

    VIEWER = "viewer"
    OWNER = "owner"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class User:
    """Who sent a request; one without a name is not distinguished from others without one."""

    name: str = ""
    role: Role = Role.OPERATOR
    token: str = field(default="", repr=False)

    def may_change(self, owner: str) -> bool:
        """Return whether this user may cancel, retry or hide a job that a user submitted."""
        return self.role is Role.OPERATOR or (self.role is Role.OWNER and owner == self.name)


def read_users(file: Path, *, what: str) -> tuple[User, ...]:
    """Return the users in a file, which errors call `what`.

    Raises:
        UsageError: it cannot be read, or used. The error shows no token.
    """
    text = read_text(file, what=what)
    lines = {
        number: line.split()
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.lstrip().startswith("#")
    }
    # One line of three words is a user, whose role may be misspelt: not the token of an operator.
    if len(text.splitlines()) < 2 and all(len(line) != 3 for line in lines.values()) and lines:
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
    """Return the user whose token is shown: as Bearer, as the password of Basic, by a cookie."""
    kind, _, value = headers.get("authorization", "").partition(" ")
    shown = value.strip() if kind.lower() == "bearer" else ""
    if kind.lower() == "basic":
        with suppress(Base64Error, UnicodeDecodeError, ValueError):
            shown = b64decode(value, validate=True).decode().partition(":")[2]
    cookies = headers.get("cookie", "")
    by_token = user_with(users, shown)
    return by_token or next((one for one in users if shows_session(one.token, cookies)), None)


def user_with(users: Iterable[User], token: str) -> User | None:
    """Return the user of a token."""
    found = None
    for user in users:  # all of them, whichever it is
        if hmac.compare_digest(token.encode(), user.token.encode()):
            found = user
    return found


def cookie_name(token: str) -> str:
    """Return the name of the cookie: another for each token, so that servers do not share one."""
    return f"unshard_{_code(token, 'name')[:8]}"


def make_session(token: str) -> str:
    """Return the value of a cookie that is valid from now on."""
    end = str(int(time.time()) + LASTS_S)
    return f"{end}.{_code(token, end)}"


def shows_session(token: str, cookies: str) -> bool:
    """Return whether the header `Cookie` has a valid session."""
    # Not by `http.cookies`, which stops at a value that it does not expect: other programs of this
    # host set cookies, too, and browsers send them all.
    pairs = (cookie.strip().partition("=") for cookie in cookies.split(";"))
    values = {name: value for name, _, value in pairs}
    end, _, code = values.get(cookie_name(token), "").partition(".")
    is_time = end.isascii() and end.isdecimal() and len(end) < 16
    is_ours = hmac.compare_digest(code.encode(), _code(token, end).encode())
    return is_ours and is_time and time.time() < int(end)


def _code(token: str, what: str) -> str:
    return hmac.new(token.encode(), f"unshard page: {what}".encode(), hashlib.sha256).hexdigest()
