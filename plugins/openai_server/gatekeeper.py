"""What every HTTP request passes first: a key, a limit on its body, a name, and the counters.

An ASGI middleware around the whole application; it knows no endpoint but ``/v1``, which is what
keys protect.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from cacheflow.plugins.openai_server.errors import ApiError, error_response

if TYPE_CHECKING:
    from collections.abc import Collection

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from cacheflow.plugins.openai_server.metrics import ServerSeries
    from cacheflow.plugins.openai_server.settings import ServerSettings

__all__ = ["Gatekeeper"]

_BODY_SECONDS: Final = 30.0
"""A body must have arrived by then."""
_BYTES_A_TOKEN: Final = 64
"""Text has four or so; even escaped, and between many names of fields, not as many as these."""
_BYTES_BESIDE: Final = 1 << 16
_MORE: Final = 32
"""Requests beside those that run or wait: more would only take memory for their bodies."""
_CLOSED: Final = "the handler is closed"
"""What uvloop says of a connection that was reset, until it has told that it is lost."""
_LOST_SECONDS: Final = 5.0
"""It tells so in the loop's next turn."""
_OTHER: Final = "other"
"""The endpoint of a path that is none: paths of strangers must not become labels."""


class Gatekeeper:
    """``paths``: the endpoints that are counted by name. ``context``: tokens that the model takes;
    a body that no such prompt needs is not read, whatever the settings allow: to parse and
    tokenize it would keep others waiting."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        series: ServerSeries,
        paths: Collection[str],
        context: int,
    ) -> None:
        self._app = app
        self._series = series
        self._paths = frozenset(paths)
        self._most = min(int(settings.max_body_bytes), _BYTES_A_TOKEN * context + _BYTES_BESIDE)
        self._places = settings.max_running + settings.max_waiting + _MORE
        self._inside = 0
        """Requests whose body is in memory, or coming."""
        self._tenants = {
            _digest(key.key.get_secret_value()): key.tenant for key in settings.api_keys
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = uuid.uuid4().hex
        path = scope["path"] if scope["path"] in self._paths else _OTHER
        began = time.monotonic()
        self._inside += 1
        try:
            await self._admit(scope, receive, _noting(state, send))
            if state.get("is_reset"):  # uvicorn takes an end before it knows of that for a mistake
                await _until_lost(receive)
        finally:
            self._inside -= 1
            self._series.requests.labels(path, str(state.get("status", 499))).inc()
            self._series.seconds.labels(path).observe(time.monotonic() - began)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        try:
            scope["state"]["tenant"] = self._tenant(scope["path"], headers)
            if self._inside > self._places and scope["method"] == "POST":
                raise self._too_many()
            body = await self._body(headers, receive)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replaying(body, receive), send)

    def _tenant(self, path: str, headers: dict[bytes, bytes]) -> str:
        if not self._tenants or not path.startswith("/v1"):
            return ""
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        given = _digest(token.strip().decode("utf-8", "replace"))
        tenant = None
        for known, name in self._tenants.items():  # all of them: time tells nothing
            tenant = name if hmac.compare_digest(known, given) else tenant
        if scheme.lower() != b"bearer" or tenant is None:
            raise ApiError(
                401,
                "no such API key: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return tenant

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """All of it; None if the client went away before its end."""
        told = headers.get(b"content-length", b"0")
        if told.isdigit() and int(told) > self._most:
            raise self._too_large()
        parts, size = [], 0
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self._most:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(408, "the body did not arrive in time", code="timeout") from None

    def _too_many(self) -> ApiError:
        self._series.rejected.labels("busy").inc()
        advice = {"Retry-After": "1"}
        text = "too many requests at once; try again in 1 s"
        return ApiError(429, text, code="rate_limit_exceeded", headers=advice)

    def _too_large(self) -> ApiError:
        return ApiError(
            413, f"the body is larger than {self._most} bytes", code="request_too_large"
        )


def _noting(state: dict[str, Any], send: Send) -> Send:
    """``send`` that notes the status, names the request in a header, and sends nothing to a client
    that has gone."""

    async def noting(message: Message) -> None:
        if message["type"] == "http.response.start":
            state.setdefault("status", message["status"])
            name = (b"x-request-id", state["request_id"].encode())
            message = {**message, "headers": [*message.get("headers", ()), name]}
        try:
            await send(message)
        except RuntimeError as error:
            if _CLOSED not in str(error):
                raise
            state["is_reset"] = True  # the client has gone: what waits for that is told next

    return noting


async def _until_lost(receive: Receive) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(_LOST_SECONDS):
            while (await receive())["type"] != "http.disconnect":
                pass


def _replaying(body: bytes, receive: Receive) -> Receive:
    """``receive`` that begins with ``body``, whole."""
    told = False

    async def replaying() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replaying


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
