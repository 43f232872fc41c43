"""Logging in to the page with the server's token, and out."""

import hmac

from fastapi import APIRouter, HTTPException, Response
from fastapi.responses import HTMLResponse
from pydantic import BaseModel, Field
from starlette.requests import HTTPConnection

from unshard.evaluate.server.http.page.rendering import HEADERS, render
from unshard.evaluate.server.http.security import LOG_IN, Rules
from unshard.evaluate.server.http.sessions import LASTS_S, cookie_name, make_session

router = APIRouter(include_in_schema=False)


class Shown(BaseModel):
    """What the form sends."""

    token: str = Field(max_length=4096)


@router.get(LOG_IN)
async def log_in_form() -> HTMLResponse:
    """Show the form."""
    return render("log_in.html", {"title": "Log in"})


@router.post(LOG_IN)
async def log_in(connection: HTTPConnection, shown: Shown) -> Response:
    """Give the browser a cookie if it has the token."""
    rules: Rules = connection.app.state.rules
    token = rules.token
    if token is None:
        raise HTTPException(400, "this server needs no token")
    if not hmac.compare_digest(shown.token.strip().encode(), token.encode()):
        raise HTTPException(401, "this token is not the server's")
    response = Response(status_code=204, headers=HEADERS)
    name, value = cookie_name(token), make_session(token)
    response.set_cookie(name, value, max_age=LASTS_S, httponly=True, samesite="strict")
    return response


@router.post("/view/log-out")
async def log_out(connection: HTTPConnection) -> Response:
    """Take the cookie back."""
    rules: Rules = connection.app.state.rules
    response = Response(status_code=204, headers=HEADERS)
    if rules.token is not None:
        response.delete_cookie(cookie_name(rules.token), httponly=True, samesite="strict")
    return response
