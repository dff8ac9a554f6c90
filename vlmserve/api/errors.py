"""OpenAI's error bodies for everything that can go wrong, without internals of the server."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from vlmserve.api.stores.rows import StoreUnavailableError, is_full
from vlmserve.config.plain_problems import did_you_mean, shortened
from vlmserve.frontend.live_requests import RequestAbortedError, RequestTimeoutError
from vlmserve_common.errors import BadRequestError, EngineError, EngineUnavailableError

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
CLIENT_CLOSED_REQUEST = 499
# parts of OpenAI's API that clients know, and that are not here
_ABSENT = re.compile(
    r"/v1/(audio/speech|audio/translations|images|moderations|assistants|threads|realtime|fine_tuning|vector_stores)\b"
)
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ErrorDetail(TypedDict):
    """An error. param: the field that is wrong. code: a word for programs."""

    message: str
    type: Literal[
        "invalid_request_error", "authentication_error", "not_found_error", "rate_limit_error", "server_error"
    ]
    param: str | None
    code: str | None


class Error(TypedDict):
    """The body of every answer with a status from 400 on."""

    error: ErrorDetail


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return {"error": {message, type, param, code}}. The type follows from the HTTP status."""
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def not_found(kind: str, name: str) -> BadRequestError:
    """Return the error (404) of a missing thing, or of another owner's. kind: a word for the thing."""
    return BadRequestError(f"there is no {kind} {shortened(name)!r}", code=f"{kind}_not_found", status=404)


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and body of an exception. Unexpected ones are logged and answered without details."""
    if isinstance(error, BadRequestError):
        return error.status, error_body(error.status, str(error), param=error.param, code=error.code)
    if isinstance(error, StoreUnavailableError):
        return 503, error_body(503, str(error), code="store_unavailable")
    if isinstance(error, EngineUnavailableError):
        return 503, error_body(503, str(error), code="engine_unavailable")
    if isinstance(error, RequestTimeoutError):
        return 504, error_body(504, str(error), code="request_timeout")
    if isinstance(error, RequestAbortedError):
        return CLIENT_CLOSED_REQUEST, error_body(CLIENT_CLOSED_REQUEST, str(error), code="request_aborted")
    if isinstance(error, EngineError):
        return 500, error_body(500, str(error), code="engine_error")
    if is_full(error):
        logger.warning("a request is answered 507: %s", error)
        return 507, error_body(507, "the server's disk is full (setting --file-store-dir)", code="storage_full")
    logger.error("a request failed unexpectedly", exc_info=error)
    return 500, error_body(500, "internal error; the server's log has the details", code="internal_error")


def error_response(error: Exception, *, retry_after_s: Callable[[], int] | None = None) -> Response:
    """Return the response to an exception, with Retry-After if another try makes sense.

    retry_after_s: estimates the seconds for a status of 429. A client that was too slow gets no further request on the
    same connection, since the rest of this one may still arrive on it.
    """
    status, body = describe(error)
    extra: dict[str, str] = {}
    if status in (429, 503):
        estimated = status == 429 and retry_after_s is not None
        extra["Retry-After"] = str(retry_after_s() if estimated else RETRY_AFTER_S)  # type: ignore[misc]
    if status == 408:
        extra["Connection"] = "close"
    return JSONResponse(body, status_code=status, headers=extra)


def _hint(path: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about a path that is not there. known: the paths that are."""
    fixed = [one for one in dict.fromkeys(known) if one and "{" not in one]
    ours = [one.removeprefix("/v1") for one in fixed if one.startswith("/v1/")]
    others = [one for one in fixed if not one.startswith("/v1/")]
    served = f"; served are {', '.join(f'/v1{one}' for one in ours)}, and more that /docs shows"
    absent = _ABSENT.match(path)
    if absent is not None:
        return f"; this version serves no {absent[1]}{served}"
    # "/v1" aside, which any two have in common
    return did_you_mean(path.removeprefix("/v1"), ours, did_you_mean(path, others, served), prefix="/v1")


def install_error_handlers(app: Starlette, retry_after_s: Callable[[], int]) -> None:
    """Answer every failure of `app` in OpenAI's form. retry_after_s: see `error_response`."""

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"there is nothing at {request.url.path} that takes {request.method}"
        if error.status_code == 404:
            message += _hint(request.url.path, [getattr(route, "path", "") for route in app.routes])
        elif error.headers and "allow" in {name.lower() for name in error.headers}:
            message += f"; it takes {', '.join(error.headers.values())}"
        return JSONResponse(error_body(error.status_code, message), error.status_code, headers=error.headers)

    async def on_error(request: Request, error: Exception) -> Response:
        request.state.error_code = getattr(error, "code", None)
        return error_response(error, retry_after_s=retry_after_s)

    async def on_disconnect(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(BadRequestError, on_error)
    app.add_exception_handler(EngineError, on_error)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
