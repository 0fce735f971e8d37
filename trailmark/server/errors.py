"""What a client is told when something is wrong: OpenAI's shape, and nothing of the server or of another client."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

logger = logging.getLogger("trailmark.server")

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
_SAYINGS = {404: "There is nothing at this address.", 405: "This address does not take this method."}
_LONGEST = 500  # characters of a message


class RequestError(Exception):
    """A request that cannot be answered, and what its client is told.

    Args:
        status: of HTTP.
        message: written here, never the text of an error of a lower floor: those name paths.
        param: the field of the request that is wrong.
        code: a word for programs.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        message = self.message if len(self.message) <= _LONGEST else f"{self.message[:_LONGEST]}..."
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}.get(self.status)
        return JSONResponse(self.body(), self.status, headers)


def invalid(error: ValidationError | RequestValidationError) -> RequestError:
    """What pydantic refused first."""
    first = error.errors()[0]
    param = _path(first["loc"])
    if first["type"] == "extra_forbidden":
        return RequestError(
            400, f"Unrecognized request argument supplied: {param}", param, "unknown_parameter"
        )
    message = str(first["msg"]).removeprefix("Value error, ")
    return RequestError(400, f"{param or 'body'}: {message}", param, "invalid_value")


def _path(location: Sequence[int | str]) -> str | None:
    return ".".join(str(part)[:80] for part in location) or None


def internal(error: BaseException) -> RequestError:
    """The server's own mistake, whose details stay in its log."""
    logger.error("A request failed.", exc_info=error)
    return RequestError(500, "The server failed at this request. Its log says why.", code="internal_error")


def answer_errors(app: FastAPI) -> None:
    """Have every error of the application answered in this shape."""

    def known(request: Request, error: Any) -> JSONResponse:
        return error.response()

    def malformed(request: Request, error: Any) -> JSONResponse:
        return invalid(error).response()

    def of_http(request: Request, error: Any) -> JSONResponse:
        return RequestError(error.status_code, _SAYINGS.get(error.status_code, "It was refused.")).response()

    def unknown(request: Request, error: Exception) -> JSONResponse:
        return RequestError(
            500, "The server failed at this request. Its log says why.", code="internal_error"
        ).response()

    app.add_exception_handler(RequestError, known)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(Exception, unknown)  # uvicorn logs it
