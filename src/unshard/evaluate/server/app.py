"""The application: both protocols, errors as JSON, the guard around it all."""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteError

from unshard._version import __version__
from unshard.errors import UnshardError
from unshard.evaluate.server import lmms, v1
from unshard.evaluate.server.security import Guard, Rules
from unshard.evaluate.server.service import Service

__all__ = ["make_app"]

_V1 = "/api/"


def make_app(service: Service, rules: Rules) -> FastAPI:
    """Return the application of a server.

    Args:
        service: what it does.
        rules: who may ask for it.
    """
    app = FastAPI(
        title="unshard eval",
        description="Evaluate checkpoints while training goes on.",
        version=__version__,
    )
    app.state.service = service
    app.include_router(v1.router)
    app.include_router(lmms.router)
    app.add_exception_handler(UnshardError, _on_error)
    app.add_exception_handler(StarletteError, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_middleware(Guard, rules=rules)
    return app


async def _on_error(_request: Request, error: Exception) -> JSONResponse:
    """Answer with one of our errors: the request's fault unless it says otherwise."""
    if not isinstance(error, UnshardError):
        raise error
    fields = {
        "type": type(error).__name__,
        "code": error.exit_code,
        "message": error.subject,
        "expected": error.expected,
        "found": error.found,
        "hint": error.hint,
    }
    return JSONResponse({"error": fields}, 400)


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, StarletteError):
        raise error
    body: dict[str, object] = {"detail": error.detail}
    if request.url.path.startswith(_V1):
        body = {"error": {"type": "HTTPError", "code": error.status_code, "message": error.detail}}
    return JSONResponse(body, error.status_code, headers=getattr(error, "headers", None))


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, RequestValidationError):
        raise error
    problems = [f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in error.errors()]
    message = "; ".join(problems[:8])
    if request.url.path.startswith(_V1):
        body: dict[str, object] = {"error": {"type": "UsageError", "code": 2, "message": message}}
        return JSONResponse(body, 400)
    return JSONResponse({"detail": message}, 422)
