"""Connections that bring no request do not stay: how many there are, and how long one may wait.

Sits under uvicorn's own protocol, whichever of its parsers is installed, and over its transport.
Once the head of a request is there the connection is uvicorn's; between requests it is both's.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final, cast

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from cacheflow.plugins.openai_server.errors import ApiError

if TYPE_CHECKING:
    from cacheflow.plugins.openai_server.metrics import ServerSeries
    from cacheflow.plugins.openai_server.settings import ServerSettings

__all__ = ["connections"]

_MOST_HEAD: Final = 1 << 16
"""Bytes of a request line and headers."""
_STALLED_SECONDS: Final = 60.0
"""A client that takes nothing of what is sent to it for as long is cut off."""


def connections(settings: ServerSettings, series: ServerSeries) -> type[asyncio.Protocol]:
    """What uvicorn is to make of each connection (its option ``http``)."""
    limits = {"settings": settings, "series": series}
    return type("Connection", (_Bounded, AutoHTTPProtocol), limits)


class _Bounded(asyncio.Protocol):
    """Mixed into a protocol of uvicorn, of which it reads ``cycle`` (the request under way) and
    ``connections`` (all that are open)."""

    settings: ServerSettings
    series: ServerSeries
    cycle: Any
    connections: set[_Bounded]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._link: asyncio.Transport | None = None
        self._opened = 0.0
        self._head = 0
        """Bytes of a request that has not begun."""
        self._timer: asyncio.TimerHandle | None = None
        """Until the head of a request has to be there."""
        self._stalled: asyncio.TimerHandle | None = None

    @property
    def is_serving(self) -> bool:
        """Whether a request is under way."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        loop = asyncio.get_running_loop()
        self._link, self._opened = cast("asyncio.Transport", transport), loop.time()
        self._wait_for_head()
        if len(self.connections) > self.settings.max_connections:
            idle = [each for each in self.connections if each is not self and each.is_waiting]
            if idle:
                min(idle, key=lambda each: each._opened).end("connections")
            else:
                self.end("connections", 503, "too many connections; try again in 1 s")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.is_serving:
            self._forget_timer()
            return
        self._head += len(data)
        if self._head > _MOST_HEAD:
            self.end("head_too_large", 431, f"the headers are larger than {_MOST_HEAD} bytes")
        elif self._timer is None:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Its buffer is full: the client has to take some of it in time."""
        super().pause_writing()
        loop = asyncio.get_running_loop()
        self._stalled = loop.call_later(_STALLED_SECONDS, self._cut_off)

    def resume_writing(self) -> None:
        """The client reads on."""
        stalled, self._stalled = self._stalled, None
        if stalled is not None:
            stalled.cancel()
            super().resume_writing()

    @property
    def is_waiting(self) -> bool:
        """Whether nobody would miss it: open, and no request under way."""
        return not self.is_serving and self._link is not None and not self._link.is_closing()

    def end(self, reason: str, status: int = 0, text: str = "") -> None:
        """Close it, because of ``reason``; ``status``, ``text``: what the client is told, if
        anything."""
        if self._link is None or self._link.is_closing():
            return
        self.series.rejected.labels(reason).inc()
        self._forget_timer()
        if status:
            body = json.dumps(ApiError(status, text, code=reason).body()).encode()
            head = f"HTTP/1.1 {status} -\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
            self._link.write(head.encode() + body)
        self._link.close()

    def _wait_for_head(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.settings.header_seconds, self._too_late)

    def _too_late(self) -> None:
        self._timer = None
        if not self.is_serving:
            told = (408, "the request did not arrive in time") if self._head else (0, "")
            self.end("slow_head", *told)

    def _forget_timer(self) -> None:
        timer, self._timer, self._head = self._timer, None, 0
        if timer is not None:
            timer.cancel()

    def _cut_off(self) -> None:
        if self._link is not None:
            self.series.rejected.labels("stalled").inc()
            self._link.abort()
