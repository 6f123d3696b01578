"""``/metrics``: as an ASGI app inside a host application, or on a port of its own.

Either way the text is made from one instance's registry, never from the library's global one, and
in a thread: fifty tiers are some 25 ms of work that an event loop should not do.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, TypeAlias

from cacheflow.errors import ConfigError
from cacheflow.metrics.exposition import Exposition

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, MutableMapping

    from cacheflow.metrics.prometheus import PrometheusObserver

    _Message: TypeAlias = MutableMapping[str, Any]
    _Receive: TypeAlias = Callable[[], Awaitable[_Message]]
    _Send: TypeAlias = Callable[[_Message], Awaitable[None]]

__all__ = ["metrics_app", "serve_metrics"]

_log = logging.getLogger(__name__)
_SECONDS = 10.0
"""A scraper that neither asks nor reads for so long is left."""


def metrics_app(
    observer: PrometheusObserver,
) -> Callable[[_Message, _Receive, _Send], Awaitable[None]]:
    """An ASGI application that answers every path with ``observer``'s series: mount it."""
    page = Exposition(observer.registry)

    async def app(scope: _Message, receive: _Receive, send: _Send) -> None:
        status, text, headers = await asyncio.to_thread(_answer, page, _accepted(scope))
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": text})

    return app


@contextmanager
def serve_metrics(
    observer: PrometheusObserver, port: int = 0, host: str = "127.0.0.1"
) -> Iterator[int]:
    """Serve ``/metrics`` from a thread of its own while the block runs; gives the port.

    Raises:
        ConfigError: the address cannot be used; says which and why.
    """
    handler = partial(_Handler, Exposition(observer.registry))
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        server = _server(family)((str(address[0]), port), handler)
    except OSError as error:
        raise ConfigError(
            f"metrics endpoint {host}:{port} cannot be opened: {error.strerror}"
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="cacheflow-metrics", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _server(family: int) -> type[ThreadingHTTPServer]:
    """A server class for addresses of ``family``; a thread a connection, none waited for."""

    class Server(ThreadingHTTPServer):
        address_family = family
        block_on_close = False

        def handle_error(self, request: object, client_address: object) -> None:
            _log.debug("a scrape from %s broke off", client_address, exc_info=True)

    return Server


class _Handler(BaseHTTPRequestHandler):
    """Answers every path."""

    timeout = _SECONDS

    def __init__(self, page: Exposition, *args: Any) -> None:
        self._page = page
        super().__init__(*args)

    def do_GET(self) -> None:
        accepted = self.headers.get("Accept-Encoding", "")
        status, text, headers = _answer(self._page, accepted)
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(text))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not worth a line each."""


def _answer(page: Exposition, accepted: str) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers."""
    try:
        text, headers = page.answer(accepted)
    except Exception:  # a host's own collector may raise anything
        _log.exception("the metrics page could not be made")
        return 500, b"see the log\n", {"Content-Type": "text/plain"}
    return 200, text, headers


def _accepted(scope: _Message) -> str:
    return ",".join(
        value.decode("latin-1") for name, value in scope["headers"] if name == b"accept-encoding"
    )
