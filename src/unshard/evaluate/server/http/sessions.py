"""Who has logged in to the page: a cookie that proves that its browser once had the token.

The cookie has the time at which it ends, and a code of it made with the token, but not the token:
other servers of the same host get it, too, because cookies do not distinguish ports. It is valid
until then, also for the next server with the same token; another token ends all of them.
"""

import hashlib
import hmac
import time
from http.cookies import CookieError, SimpleCookie

LASTS_S = 30 * 86400
"""How long a browser stays logged in, seconds."""


def cookie_name(token: str) -> str:
    """Return the name of the cookie: another for each token, so that servers do not share one."""
    return f"unshard_{_code(token, 'name')[:8]}"


def make_session(token: str) -> str:
    """Return the value of a cookie that is valid from now on."""
    end = str(int(time.time()) + LASTS_S)
    return f"{end}.{_code(token, end)}"


def shows_session(token: str, cookies: str) -> bool:
    """Return whether the header `Cookie` has a valid session."""
    try:
        found = SimpleCookie(cookies).get(cookie_name(token))
    except CookieError:
        return False
    if found is None:
        return False
    end, _, code = found.value.partition(".")
    is_time = end.isascii() and end.isdecimal() and len(end) < 16
    is_ours = hmac.compare_digest(code.encode(), _code(token, end).encode())
    return is_ours and is_time and time.time() < int(end)


def _code(token: str, what: str) -> str:
    return hmac.new(token.encode(), f"unshard page: {what}".encode(), hashlib.sha256).hexdigest()
