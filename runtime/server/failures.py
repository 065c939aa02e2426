"""What goes wrong, as the API of the route says it: status, body and headers."""

from __future__ import annotations

import math
from typing import Any

from starlette.responses import JSONResponse

from deepinfer.errors import RequestError

_OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}


class HttpFailure(Exception):
    """A request that ends with an error status.

    Attributes:
        status: of the answer. ``message``: one sentence. ``code``: a word for programs. ``param``: the field that is
            at fault. ``retry_after``: seconds after which another try makes sense.
    """

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None,
                 retry_after: float | None = None) -> None:
        self.status, self.message, self.code, self.param, self.retry_after = status, message, code, param, retry_after
        super().__init__(message)


def unavailable(reason: str, retry_after: float = 1.0) -> HttpFailure:
    """The engine cannot take the request now."""
    return HttpFailure(503, f"The engine is not available: {reason}.", code="engine_unavailable",
                       retry_after=retry_after)


def of_request(error: RequestError) -> HttpFailure:
    """A mistake of the client."""
    return HttpFailure(error.http_status, getattr(error, "message", str(error)), code="invalid_request_error")


def is_messages(path: str) -> bool:
    """Whether a route belongs to the Messages API, whose errors look different."""
    return path.startswith("/anthropic/") or path.startswith("/v1/messages")


def error_body(path: str, failure: HttpFailure, request_id: str | None) -> dict[str, Any]:
    """The JSON of an error in the form of the route's API."""
    if is_messages(path):
        kind = _ANTHROPIC_TYPES.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": failure.message}, "request_id": request_id}
    usual = "invalid_request_error" if failure.status < 500 else "server_error"
    kind = _OPENAI_TYPES.get(failure.status, usual)
    return {"error": {"message": failure.message, "type": kind, "param": failure.param, "code": failure.code or kind}}


def error_response(path: str, failure: HttpFailure, request_id: str | None) -> JSONResponse:
    """The whole answer; the request id is added to the headers of every response elsewhere."""
    headers = {}
    if failure.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(failure.retry_after)))
    if failure.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(path, failure, request_id), failure.status, headers)
