"""Tokens, and URLs with one: read, checked, and never shown.

The HTTP library refuses a header with a line break, and its error shows the whole token; it shows a
password in a URL that cannot be parsed, or that the server refuses, too.
"""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from unshard.errors import UsageError


def read_token(file: Path, *, what: str) -> str:
    """Return the token in a file, which errors call `what`, without white space around it."""
    text = read_text(file, what=what)
    check_token(text, what=what)
    return text


def read_text(file: Path, *, what: str) -> str:
    """Return what is in a file, which errors call `what`, without white space around it."""
    try:
        return file.expanduser().read_bytes().decode("latin-1").strip()
    except OSError as error:
        raise UsageError(f"{what}: cannot be read", found=error.strerror or str(error)) from error


def check_token(text: str, *, what: str) -> None:
    """Raise UsageError, which does not show the text, unless a text can be sent as a token."""
    if text and text.isascii() and text.isprintable():
        return
    wrong = "several lines" if "\n" in text else "a character that is not printable ASCII"
    raise UsageError(
        f"{what}: not a token",
        expected="one line of printable ASCII characters",
        found=wrong if text else "nothing",
    )


def split_url(url: str, *, what: str) -> tuple[str, tuple[str, str] | None]:
    """Return the URL of a server without user and password, and these, if the URL has them.

    Raises:
        UsageError: it is not `http(s)://[USER:PASSWORD@]HOST:PORT`; the error does not show what
            may be a password.
    """
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_one = False
    if not is_one or not url.isprintable():
        shown = repr(without_password(url))[:100]
        raise UsageError(what, expected="http://HOST:PORT or https://HOST:PORT", found=shown)
    if "@" in f"{parts.path}{parts.query}{parts.fragment}":  # perhaps the rest of a password
        raise UsageError(
            f"{what}: an @ after the host and port",
            expected="http://HOST:PORT or http://USER:PASSWORD@HOST:PORT",
            found=repr(without_password(url))[:100],
            hint="in a password write / as %2F, ? as %3F, # as %23 and @ as %40",
        )
    given, _, place = parts.netloc.rpartition("@")
    bare = parts._replace(netloc=place).geturl()
    user, _, password = given.partition(":")
    return bare, (unquote(user), unquote(password)) if given else None


def without_password(url: str) -> str:
    """Return a URL, which may be malformed, with `***` in place of user and password."""
    before, at, place = url.rpartition("@")
    scheme, slashes, _ = before.partition("//")
    return f"{scheme if slashes else ''}{slashes}***@{place}" if at else url
