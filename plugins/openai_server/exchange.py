"""Answers on the wire: whole or as server-sent events, given up when their client has gone.

Both are ASGI applications. Each runs the work of its request as a task of its own, beside a watch
on the connection; whatever ends first, the other is cancelled and waited for.
"""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final

from starlette.responses import Response

from cacheflow.plugins.openai_server.errors import (
    INTERNAL,
    ApiError,
    error_response,
    from_core,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine

    from pydantic import BaseModel
    from starlette.types import Message, Receive, Scope, Send

__all__ = ["GONE", "Events", "Whole", "frame"]

GONE: Final = 499
"""What is counted, and never sent, for a client that has gone (nginx's number)."""

_STALLED_SECONDS: Final = 30.0
"""A client that takes nothing of its answer for as long has gone: it would hold a place of the
engine that others wait for."""
_log = logging.getLogger("cacheflow.server")
_TOO_LONG: Final = "the request took longer than this server allows"


class _Watched(Response, ABC):
    """A response whose work is bounded in time and ends with the connection."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_disconnect(receive))
        send = _watched(send, gone)
        work = asyncio.ensure_future(self._work(scope, receive, send))
        try:
            await asyncio.wait(
                {work, gone}, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if work.done():
                await work
            elif gone.done():
                scope["state"]["status"] = GONE
            else:
                work.cancel()
                await asyncio.wait([work])
                error = ApiError(504, _TOO_LONG, code="timeout")
                work = asyncio.ensure_future(self._fail(error, scope, receive, send))
                await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    await work
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.wait([work, gone])

    @abstractmethod
    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the client; may be cancelled."""

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        await error_response(error)(scope, receive, send)


class Whole(_Watched):
    """A JSON document, made by ``make`` while the client waits."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, BaseModel]], seconds: float) -> None:
        super().__init__(seconds)
        self._make = make

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            document = await self._make()
        except Exception as error:  # whatever it is, the client is answered; the log has the trace
            await self._fail(_told(error), scope, receive, send)
            return
        body = document.model_dump_json()
        await Response(body, media_type="application/json")(scope, receive, send)


class Events(_Watched):
    """Server-sent events, made by ``make`` as :func:`frame` writes them.

    The first is waited for before the status is sent, so that a request that cannot be answered
    gets an error's status and not a broken stream.
    """

    def __init__(self, make: Callable[[], AsyncGenerator[str, None]], seconds: float) -> None:
        super().__init__(seconds)
        self._make = make
        self._begun = False

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._make()) as events:
                async for event in events:
                    if not self._begun:
                        await send(_start())
                        self._begun = True
                    await send(_part(event))
        except Exception as error:  # whatever it is, the client is told; the log has the trace
            await self._fail(_told(error), scope, receive, send)
        else:
            await send(_part("", more=False))

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._begun:
            await super()._fail(error, scope, receive, send)
            return
        scope["state"]["status"] = error.status
        await send(_part(frame(json.dumps(error.body())), more=False))


def frame(data: str, name: str = "") -> str:
    """One server-sent event; ``data`` is one line."""
    return f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n"


def _told(error: Exception) -> ApiError:
    told = from_core(error)
    if told.status == INTERNAL:
        _log.error("a request failed", exc_info=error)
    return told


def _start() -> dict[str, Any]:
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _part(text: str, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


def _watched(send: Send, gone: asyncio.Future[None]) -> Send:
    """``send`` that ends ``gone`` when the client does not read on."""
    loop = asyncio.get_running_loop()

    async def watched(message: Message) -> None:
        timer = loop.call_later(_STALLED_SECONDS, gone.cancel)
        try:
            await send(message)
        finally:
            timer.cancel()

    return watched


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
