"""Read and check tokens, and URLs with passwords, without showing them.

The HTTP library shows the whole token in its error for a header with a line break, and the password
of a URL that cannot be parsed or that the server refuses.
"""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from unshard.errors import UsageError


def read_token(file: Path, *, what: str) -> str:
    """Return the token in a file, without white space around it; errors call the file `what`."""
    text = read_text(file, what=what)
    check_token(text, what=what)
    return text


def read_text(file: Path, *, what: str) -> str:
    """Return the text in a file, without white space around it; errors call the file `what`."""
    try:
        return file.expanduser().read_bytes().decode("latin-1").strip()
    except OSError as error:
        raise UsageError(f"{what}: cannot be read", found=error.strerror or str(error)) from error


def check_token(text: str, *, what: str) -> None:
    """Raise UsageError unless a text can be sent as a token; the error does not show the text."""
    if not text or not text.isascii() or not text.isprintable():
        wrong = "several lines" if "\n" in text else "a character that is not printable ASCII"
        raise UsageError(
            f"{what}: not a token",
            expected="one line of printable ASCII characters",
            found=wrong if text else "nothing",
        )


def split_url(url: str, *, what: str) -> tuple[str, tuple[str, str] | None]:
    """Return the URL of a server without user and password, and these, if the URL has them.

    Raises:
        UsageError: it is not `http(s)://[USER:PASSWORD@]HOST:PORT`; a password is not shown.
    """
    text = repr(without_password(url))[:100]
    try:
        parts = urlsplit(url)
        is_server = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_server = False
    if not is_server or not url.isprintable():
        expected = "http://HOST:PORT or https://HOST:PORT"
        raise UsageError(f"{what}: not the URL of a server", expected=expected, found=text)
    if "@" in f"{parts.path}{parts.query}{parts.fragment}":  # perhaps the rest of a password
        raise UsageError(
            f"{what}: an @ after the host and port",
            expected="http://HOST:PORT or http://USER:PASSWORD@HOST:PORT",
            found=text,
            hint="in a password write / as %2F, ? as %3F, # as %23 and @ as %40",
        )
    login, _, host = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    bare = parts._replace(netloc=host).geturl()
    return bare, (unquote(user), unquote(password)) if login else None


def without_password(url: str) -> str:
    """Return a URL, which may be malformed, with `***` in place of user and password."""
    before, at, host = url.rpartition("@")
    scheme, slashes, _ = before.partition("//")
    return f"{scheme if slashes else ''}{slashes}***@{host}" if at else url
