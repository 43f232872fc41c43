"""The application: both protocols, errors as JSON, and the guard around them.

/openapi.json describes it. FastAPI's pages /docs and /redoc are not served: they load scripts from
another site, which a cluster without internet access cannot reach.
"""

import logging
import sqlite3
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteError

from unshard._version import __version__
from unshard.errors import UnshardError, UsageError
from unshard.evaluate.server.health import RETRY_AFTER_S, UnhealthyError
from unshard.evaluate.server.http import lmms, v1
from unshard.evaluate.server.http.security import Guard, Rules
from unshard.evaluate.server.http.v1_views import ErrorBody, ErrorFields, error_body
from unshard.evaluate.server.service import Service
from unshard.evaluate.server.telling import one_line

__all__ = ["make_app"]

_V1 = "/api/"
_log = logging.getLogger(__name__)


def make_app(service: Service, rules: Rules) -> FastAPI:
    """Return the application of a server.

    Args:
        service: what the server does.
        rules: which requests are served.
    """
    app = FastAPI(
        title="unshard eval",
        description="Evaluate checkpoints while training goes on.",
        version=__version__,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    app.include_router(v1.router)
    app.include_router(lmms.router)
    app.add_exception_handler(UnshardError, _on_error)
    app.add_exception_handler(UnhealthyError, _on_unhealthy)
    app.add_exception_handler(sqlite3.OperationalError, _on_database)
    app.add_exception_handler(StarletteError, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(Exception, _on_mistake)
    app.add_middleware(Guard, rules=rules)
    if rules.token is not None:
        _declare_token(app)
    return app


def _declare_token(app: FastAPI) -> None:
    """Describe in /openapi.json how a token is given; `Guard` checks it."""
    spec = app.openapi()
    schemes = {kind: {"type": "http", "scheme": kind} for kind in ("bearer", "basic")}
    spec.setdefault("components", {})["securitySchemes"] = schemes
    spec["security"] = [{kind: []} for kind in schemes]


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    """Answer with one of our errors, as a bad request."""
    return _answer_error(request, error, 400)


async def _on_unhealthy(request: Request, error: Exception) -> JSONResponse:
    """Answer that the request may be repeated later."""
    return _answer_error(request, error, 503, {"Retry-After": str(RETRY_AFTER_S)})


async def _on_database(request: Request, error: Exception) -> JSONResponse:
    """Answer when the database is locked, or its disk is full; the log has the error."""
    _log.warning("the database of jobs does not answer: %s", error)
    why = UnhealthyError("the server's database does not answer", found=str(error))
    return await _on_unhealthy(request, why)


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, StarletteError):
        raise error
    fields = ErrorFields(type="HTTPError", code=error.status_code, message=error.detail)
    return _answer(request, fields, error.status_code, getattr(error, "headers", None))


async def _on_mistake(request: Request, _error: Exception) -> JSONResponse:
    """Answer after a mistake of ours; the log has the traceback."""
    message = "the server made a mistake: its log says which"
    return _answer(request, ErrorFields(type="HTTPError", code=500, message=message), 500)


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, RequestValidationError):
        raise error
    problems = [f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in error.errors()[:8]]
    message = "; ".join(f"{one:.300}" for one in problems).encode("ascii", "backslashreplace")
    why = one_line(message.decode())
    _log.info("refused: %s %s: %s", request.method, one_line(request.url.path), why)
    fields = ErrorFields(type="UsageError", code=UsageError.exit_code, message=message.decode())
    return _answer(request, fields, 400 if _is_ours(request) else 422)


def _is_ours(request: Request) -> bool:
    return request.url.path.startswith(_V1)


def _answer_error(
    request: Request, error: Exception, status: int, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return one of our errors in the form of the request's protocol."""
    if not isinstance(error, UnshardError):
        raise error
    body: dict[str, object] = {"detail": str(error)}
    if _is_ours(request):
        body = error_body(error).model_dump()
    return JSONResponse(body, status, headers=headers)


def _answer(
    request: Request, fields: ErrorFields, status: int, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return an error in the form of the request's protocol."""
    body: dict[str, object] = {"detail": fields.message}
    if _is_ours(request):
        body = ErrorBody(error=fields).model_dump()
    return JSONResponse(body, status, headers=headers)
