"""The application: both protocols and the page, errors as JSON, and access control.

/openapi.json describes it. FastAPI's pages /docs and /redoc are not served, because they load
scripts from another site, which a cluster without internet access cannot reach.
"""

import logging
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.routing import Match, Route

from unshard import __version__
from unshard.errors import StoreError, UnshardError, UsageError, how_to_install
from unshard.evaluate.logs import one_line
from unshard.evaluate.server.health import RETRY_AFTER_S, UnhealthyError
from unshard.evaluate.server.http import lmms, v1
from unshard.evaluate.server.http.answers import ErrorBody, ErrorFields
from unshard.evaluate.server.http.page import answers, routes, runs
from unshard.evaluate.server.http.page.rendering import show_error
from unshard.evaluate.server.http.security import Guard, Rules
from unshard.evaluate.server.service import Service

_log = logging.getLogger(__name__)


def make_app(service: Service, rules: Rules) -> FastAPI:
    """Return the application of a server; `rules` control access."""
    app = FastAPI(
        title="unshard eval",
        description="Evaluate checkpoints while training continues.",
        version=__version__,
        docs_url=None,
        redirect_slashes=False,  # to the Host of the request, without the path of a proxy
        redoc_url=None,
        servers=[{"url": rules.root}] if rules.root else None,
    )
    app.state.service = service
    app.state.rules = rules
    app.state.streams = Counter()
    for module in (v1, lmms, routes, runs, answers):
        app.include_router(module.router)
    for kind, handler in {
        UnshardError: _on_error,
        UnhealthyError: _on_unhealthy,
        StoreError: _on_unhealthy,
        sqlite3.OperationalError: _on_database,
        HTTPException: _on_http_error,
        RequestValidationError: _on_invalid,
        Exception: _on_internal_error,
    }.items():
        app.add_exception_handler(kind, handler)
    app.add_middleware(Guard, rules=rules, show_error=show_error)
    _add_metrics(app, service)
    if rules.users:  # described in /openapi.json, checked by `Guard`
        spec = app.openapi()
        schemes = {kind: {"type": "http", "scheme": kind} for kind in ("bearer", "basic")}
        spec.setdefault("components", {})["securitySchemes"] = schemes
        spec["security"] = [{kind: []} for kind in schemes]
    return app


def _add_metrics(app: FastAPI, service: Service) -> None:
    """Add /metrics; without prometheus_client its error has the command to install it."""
    meter = None
    if find_spec("prometheus_client") is not None:
        from unshard.evaluate.server.http.metrics import CountedRequests, Meter

        meter = Meter(service)
        app.add_middleware(CountedRequests, meter=meter)  # outermost, to count refused requests too

    text = {"text/plain": {"schema": {"type": "string"}}}
    failures = {"model": lmms.Problem}
    answers: dict[int | str, dict[str, Any]] = {
        200: {"description": "Prometheus' text", "content": text},
        "4XX": failures,
        501: failures,
    }

    @app.get("/metrics", response_class=Response, responses=answers)
    def metrics() -> Response:
        """Report the server's state as Prometheus' text."""
        if meter is None:
            hint = how_to_install("prometheus_client", "serve")
            raise HTTPException(501, f"/metrics: not installed: prometheus_client; {hint}")
        return Response(meter.write(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _on_error(connection: HTTPConnection, error: Exception) -> Response:
    """Answer a bad request with one of our errors."""
    return _answer_error(connection, error, 400)


async def _on_unhealthy(connection: HTTPConnection, error: Exception) -> Response:
    """Answer that the client may repeat the request later."""
    return _answer_error(connection, error, 503, {"Retry-After": str(RETRY_AFTER_S)})


async def _on_database(connection: HTTPConnection, error: Exception) -> Response:
    """Log and answer that the database is locked, or its disk is full."""
    _log.warning("the database of jobs does not answer: %s", error)
    why = UnhealthyError("the server's database does not answer", found=str(error))
    return await _on_unhealthy(connection, why)


async def _on_http_error(connection: HTTPConnection, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    fields = ErrorFields(type="HTTPError", code=error.status_code, message=error.detail)
    headers = error.headers
    if error.status_code == 405:  # starlette allows only the methods of one of the path's routes
        headers = {**(headers or {}), "Allow": ", ".join(_allowed_methods(connection))}
    return _answer(connection, fields, error.status_code, headers=headers)


def _routes_of(app: object) -> Iterator[Route]:
    """Yield the routes of an application or a router; FastAPI wraps the routers it includes."""
    for route in getattr(app, "routes", ()):
        if isinstance(route, Route):
            yield route
        else:
            yield from _routes_of(getattr(route, "original_router", None))


def _allowed_methods(connection: HTTPConnection) -> list[str]:
    """Return the methods of all routes of a request's path, in alphabetical order."""
    routes = _routes_of(connection.app)
    matching = [route for route in routes if route.matches(connection.scope)[0] is not Match.NONE]
    methods = {method for route in matching for method in route.methods or ()}
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))  # see `Guard`


async def _on_internal_error(connection: HTTPConnection, _error: Exception) -> Response:
    """Answer after an unexpected exception; the log has the traceback."""
    message = "internal error of the server: its log has the traceback"
    return _answer(connection, ErrorFields(type="HTTPError", code=500, message=message), 500)


async def _on_invalid(connection: HTTPConnection, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    problems: dict[str, str] = {}  # the first one of each field: of alternatives, each has one
    for one in error.errors()[:8]:
        # Pydantic names the alternatives of a type like `literal['']`.
        place = [str(part) for part in one["loc"][1:] if "[" not in str(part)]
        problems.setdefault(".".join(place), one["msg"].replace("Input should", "should"))
    text = "; ".join(f"{f'{place}: {why}':.300}" for place, why in problems.items())
    message = text.encode("ascii", "backslashreplace").decode()
    request = f"{connection.scope['method']} {one_line(connection.url.path)}"
    _log.info("refused: %s: %s", request, one_line(message))
    fields = ErrorFields(type="UsageError", code=UsageError.exit_code, message=message)
    return _answer(connection, fields, 400 if _is_ours(connection) else 422)


def _is_ours(connection: HTTPConnection) -> bool:
    return connection.url.path.startswith("/api/")


def _is_view(connection: HTTPConnection) -> bool:
    """Return whether a browser requests a view of the page."""
    path, accepted = connection.url.path, connection.headers.get("accept", "")
    return (path == "/" or path.startswith("/view/")) and "text/html" in accepted


def _answer_error(
    connection: HTTPConnection,
    error: Exception,
    status: int,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return one of our errors with all its parts, in the form of the request's protocol."""
    if not isinstance(error, UnshardError):
        raise error
    fields = ErrorFields.of(error)
    return _answer(connection, fields, status, detail=str(error), headers=headers)


def _answer(
    connection: HTTPConnection,
    fields: ErrorFields,
    status: int,
    *,
    detail: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return an error in the form of the request's protocol; lmms-eval's has only `detail`."""
    if _is_view(connection):
        parts = {"expected": fields.expected, "found": fields.found, "hint": fields.hint}
        rules: Rules = connection.app.state.rules
        return show_error(status, fields.message, parts, rules.root, headers)
    body: dict[str, object] = {"detail": fields.message if detail is None else detail}
    if _is_ours(connection):
        body = ErrorBody(error=fields).model_dump()
    return JSONResponse(body, status, headers=headers)
