r"""Render templates: everything is escaped, and browsers may run our own scripts only.

Names, errors and logs come from clients and evaluators. Jinja escapes markup in every value, and
control characters are shown as `\x1b`. The policy of the answers allows no script or style inside
a document, and nothing from another host.
"""

import hashlib
import re
import time
from base64 import b64encode
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from http import HTTPStatus
from pathlib import Path

from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from unshard import __version__
from unshard.console import human_size
from unshard.errors import printable

_HERE = Path(__file__).parent
_ADDRESS = re.compile(r'\b(href|src|action|data-source|data-csv)="/')
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
"""The headers of the page's answers."""

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
    """Return a digest of a static file for its address, so that browsers may cache the file."""
    return hashlib.sha256(STATIC[name][0]).hexdigest()[:12]


def render(
    template: str, values: Mapping[str, object], status: int = 200, *, root: str
) -> HTMLResponse:
    """Return a template with values as an answer; its own addresses begin at `root`.

    A pattern finds the addresses in the markup. It matches no value, because quotes are escaped.
    """
    text = _environment().get_template(template).render({"root": root, **values})
    text = _ADDRESS.sub(rf'\1="{root}/', text) if root else text
    return HTMLResponse(text, status, headers=HEADERS)


def attached(name: str, suffix: str) -> dict[str, str]:
    """Return the headers of a file to save, with a name of safe characters."""
    safe = re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII)[:100].strip("-.") or "unshard"
    return {**HEADERS, "Content-Disposition": f'attachment; filename="{safe}{suffix}"'}


def render_file(template: str, title: str, data: str, *, left_out: int) -> Response:
    """Return a self-contained document to save, with the plots of `data`, which is JSON.

    Its policy allows only the scripts in it, by their digests. `left_out` is the number of plots
    that did not fit.
    """
    scripts = [STATIC[name][0] for name in ("uPlot.iife.min.js", "plots.js")]
    styles = [STATIC[name][0] for name in ("page.css", "uPlot.min.css")]
    digests = [b64encode(hashlib.sha256(script).digest()).decode() for script in scripts]
    text = (
        _environment()
        .get_template(template)
        .render(
            title=title,
            left_out=left_out,
            allowed=" ".join(f"'sha256-{digest}'" for digest in digests),
            when=time.time(),
            data=Markup(data.replace("<", "\\u003c")),  # noqa: S704  (no text can end its element)
            licence=STATIC["uPlot.LICENSE"][0].decode(),
            scripts=[Markup(script.decode()) for script in scripts],  # noqa: S704  (our own)
            styles=[Markup(style.decode()) for style in styles],  # noqa: S704  (our own)
        )
    )
    return HTMLResponse(text, headers=attached(title, ".html"))


def show_error(
    status: int,
    message: str,
    parts: Mapping[str, str],
    root: str,
    headers: Mapping[str, str] | None = None,
) -> HTMLResponse:
    """Return an error as a view; `parts` are expected, found and hint."""
    parts = {name: text for name, text in parts.items() if text}
    title = HTTPStatus(status).phrase.capitalize()
    values = {"title": title, "message": message, "parts": parts}
    answer = render("error.html", values, status, root=root)
    answer.headers.update(headers or {})
    return answer


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
    environment.filters |= {
        "plural": _plural,
        "when": _when,
        "size": human_size,
        "number": lambda value, digits=6: f"{value:.{digits}g}",
        "short": lambda job_id: job_id[:8],
        "middle": _middle,
    }
    environment.globals |= {"static": _static, "version": __version__}
    return environment


def _finalize(value: object) -> object:
    """Return a value without control characters; a dash for None."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value)
    return "–" if value is None else value  # noqa: RUF001  (a dash)


def _static(name: str) -> str:
    return f"/view/static/{name}?v={version_of(name)}"


def _when(seconds: float | None) -> object:
    """Return a time since the epoch as an element, which `page.js` shows as local time."""
    if seconds is None:
        return None
    at = datetime.fromtimestamp(seconds, UTC)
    element = Markup('<time datetime="{}">{} UTC</time>')
    return element.format(at.isoformat(timespec="milliseconds"), at.strftime("%Y-%m-%d %H:%M"))


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _middle(text: str, length: int = 60) -> str:
    """Cut the middle of a long name: the names of runs often differ at their ends."""
    return text if len(text) <= length else f"{text[: length - 26]}…{text[-25:]}"
