"""What a client is told when a request is not answered, in the shape that OpenAI's clients parse.

Every such answer is ``{"error": {"message", "type", "param", "code"}}``. Nothing of the server's
inside (paths, traces) is in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.responses import JSONResponse

from cacheflow.errors import CapacityError, ClosedError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from starlette.responses import Response

__all__ = [
    "INTERNAL",
    "ApiError",
    "error_response",
    "from_core",
    "from_validation",
    "unreadable",
    "unsupported",
]

INTERNAL: Final = 500
"""What a client sees of a failure that nobody foresaw."""

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """A request that is not answered; becomes a response of ``status``."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON document; also what a stream that breaks ends with."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, kind),
                "param": self.param,
                "code": self.code,
            }
        }


def error_response(error: ApiError) -> Response:
    """``error`` as an ASGI response."""
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)


def unsupported(param: str, why: str) -> ApiError:
    """The engine cannot do what ``param`` asks for: refused, never ignored."""
    return ApiError(400, f"{param}: {why}", code="unsupported_value", param=param)


def from_core(error: Exception) -> ApiError:
    """What the core raised, as the client is told."""
    match error:
        case ApiError():
            return error
        case ConfigError():
            return ApiError(400, str(error), code="invalid_value")
        case CapacityError():
            return ApiError(
                503,
                "the server has no KV memory left for this request; try again shortly",
                code="out_of_memory",
                headers={"Retry-After": "1"},
            )
        case ClosedError():
            return ApiError(
                503, "the server is shutting down", code="draining", headers={"Retry-After": "5"}
            )
        case _:
            return ApiError(INTERNAL, "the server failed on this request", code="internal_error")


def from_validation(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """What is wrong with a request's body, the first problem by its place in the document."""
    first = problems[0]
    where = [part for part in first.get("loc", ()) if part != "body"]
    if first.get("type") == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")
    param = _path(where)
    if not param and first.get("type") == "model_attributes_type":
        message = "the body has to be a JSON object, of Content-Type application/json"
        return ApiError(400, message, code="invalid_json")
    if first.get("type") == "extra_forbidden":
        message = f"unrecognized request argument: {param}"
        return ApiError(400, message, code="unknown_parameter", param=param)
    if not param and first.get("type") == "missing":
        return ApiError(400, "the body is empty: send a JSON object", code="invalid_json")
    message = str(first.get("msg", "invalid")).removeprefix("Value error, ")
    code = "missing_required_parameter" if first.get("type") == "missing" else "invalid_value"
    return ApiError(400, f"{param or 'body'}: {message}", code=code, param=param or None)


def unreadable(cause: BaseException) -> ApiError:
    """A body whose reading raised ``cause``, which is no syntax error."""
    match cause:
        case UnicodeDecodeError():
            reason = "it is not UTF-8"
        case RecursionError():
            reason = "it is nested too deeply"
        case ValueError():  # Python reads no number of more than 4,300 digits
            reason = "it holds a number that is too long"
        case _:
            reason = "it cannot be read"
    return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")


def _path(where: Sequence[object]) -> str:
    """``messages[1].role``; names of union members, which pydantic puts between, are left out."""
    text = ""
    for part in where:
        if isinstance(part, int):
            text += f"[{part}]"
        elif isinstance(part, str) and part.isidentifier() and part[0].islower():
            text += f".{part}" if text else part
    return text
