r"""Templates become answers: everything is escaped, and a browser is told to run our scripts only.

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
from pathlib import Path

from fastapi.responses import HTMLResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from unshard import __version__
from unshard.errors import printable
from unshard.showing import human_size

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


def render(
    template: str, values: Mapping[str, object], status: int = 200, *, root: str
) -> HTMLResponse:
    """Return a template with values as an answer; its own addresses begin at `root`.

    They are found in the markup. No value can look like one, because quotes are escaped.
    """
    text = _environment().get_template(template).render({"root": root, **values})
    text = _ADDRESS.sub(rf'\1="{root}/', text) if root else text
    return HTMLResponse(text, status, headers=HEADERS)


def render_file(template: str, title: str, data: str) -> Response:
    """Return a document to save, with the plots of some data, which is JSON.

    All that it needs is in it. What runs in it is told by digests, and nothing else may.
    """
    names = ("uPlot.iife.min.js", "plots.js")
    scripts = [STATIC[name][0].decode() for name in names]
    styles = [STATIC[name][0].decode() for name in ("page.css", "uPlot.min.css")]
    digests = [b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
    allowed = " ".join(f"'sha256-{one}'" for one in digests)
    values: dict[str, object] = {"title": title, "allowed": allowed, "when": time.time()}
    # No text of the data can end its element.
    values["data"] = Markup(data.replace("<", "\\u003c"))  # noqa: S704
    values["licence"] = STATIC["uPlot.LICENSE"][0].decode()
    values |= {"scripts": list(map(Markup, scripts)), "styles": list(map(Markup, styles))}
    text = _environment().get_template(template).render(values)
    attached = {"Content-Disposition": 'attachment; filename="runs.html"'}
    return HTMLResponse(text, headers={**HEADERS, **attached})


def show_error(status: int, message: str, parts: Mapping[str, str], *, root: str) -> HTMLResponse:
    """Return an error for people; `parts` says what was expected and found, and what to do."""
    given = {name: text for name, text in parts.items() if text}
    values = {"title": "Not shown", "message": message, "parts": given}
    return render("error.html", values, status, root=root)


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
        "when": _when,
        "size": human_size,
        "number": _number,
        "short": _short,
        "middle": _middle,
    }
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
    at = datetime.fromtimestamp(seconds, UTC)
    element = Markup('<time datetime="{}">{} UTC</time>')
    return element.format(at.isoformat(timespec="milliseconds"), at.strftime("%Y-%m-%d %H:%M"))


def _number(value: float, digits: int = 6) -> str:
    return f"{value:.{digits}g}"


def _middle(text: str, length: int = 60) -> str:
    """Return a long name with its middle left out: runs differ at their ends."""
    return text if len(text) <= length else f"{text[: length - 26]}…{text[-25:]}"


def _short(job_id: str) -> str:
    return job_id[:8]
