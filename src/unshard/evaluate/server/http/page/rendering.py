r"""Templates become answers: everything is escaped, and a browser is told to run our scripts only.

Names, errors and logs come from clients and evaluators. Jinja escapes markup in every value, and
control characters are shown as `\x1b`. The policy of the answers allows no script or style inside
a document, and nothing from another host.
"""

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from unshard import __version__
from unshard.errors import printable
from unshard.showing import human_size

_HERE = Path(__file__).parent
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
    " form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""What a browser may do with an answer of the page."""

STATIC = {
    name: ((_HERE / "static" / name).read_bytes(), kind)
    for name, kind in {
        "icon.svg": "image/svg+xml",
        "page.css": "text/css; charset=utf-8",
        "page.js": "text/javascript; charset=utf-8",
        "plots.js": "text/javascript; charset=utf-8",
        "uPlot.LICENSE": "text/plain; charset=utf-8",
        "uPlot.iife.min.js": "text/javascript; charset=utf-8",
        "uPlot.min.css": "text/css; charset=utf-8",
    }.items()
}
"""The files that the page loads, each with its media type."""


@cache
def version_of(name: str) -> str:
    """Return a digest of a static file, which its address has, so that browsers may keep it."""
    return hashlib.sha256(STATIC[name][0]).hexdigest()[:12]


def render(template: str, values: Mapping[str, object], status: int = 200) -> HTMLResponse:
    """Return a template with values as an answer."""
    text = _environment().get_template(template).render(values)
    return HTMLResponse(text, status, headers=HEADERS)


def show_error(status: int, message: str, parts: Mapping[str, str]) -> HTMLResponse:
    """Return an error for people; `parts` says what was expected and found, and what to do."""
    given = {name: text for name, text in parts.items() if text}
    values = {"title": "Not shown", "message": message, "parts": given}
    return render("error.html", values, status)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalize,
    )
    environment.filters |= {"when": _when, "size": human_size, "number": _number, "short": _short}
    environment.globals |= {"static": _static, "version": __version__}
    return environment


def _finalize(value: object) -> object:
    """Return what is shown of a value: a dash for nothing, and no control characters."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value)
    return "–" if value is None else value  # noqa: RUF001  (a dash)


def _static(name: str) -> str:
    return f"/view/static/{name}?v={version_of(name)}"


def _when(seconds: float | None) -> object:
    """Return a time since the epoch as an element that a script shows as local time."""
    if seconds is None:
        return None
    time = datetime.fromtimestamp(seconds, UTC)
    element = Markup('<time datetime="{}">{} UTC</time>')
    return element.format(time.isoformat(timespec="milliseconds"), time.strftime("%Y-%m-%d %H:%M"))


def _number(value: float) -> str:
    return f"{value:.6g}"


def _short(job_id: str) -> str:
    return job_id[:8]
