"""``/metrics``: as an ASGI app inside a host application, or on a port of its own.

Either way the text is made from one instance's registry, never from the library's global one.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import make_asgi_app, start_http_server

from cacheflow.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cacheflow.metrics.prometheus import PrometheusObserver

__all__ = ["metrics_app", "serve_metrics"]


def metrics_app(observer: PrometheusObserver) -> Callable[..., object]:
    """An ASGI application that answers every path with ``observer``'s series: mount it."""
    app: Callable[..., object] = make_asgi_app(registry=observer.registry)
    return app


@contextmanager
def serve_metrics(
    observer: PrometheusObserver, port: int = 0, host: str = "127.0.0.1"
) -> Iterator[int]:
    """Serve ``/metrics`` from a thread of its own while the block runs; gives the port.

    Raises:
        ConfigError: the address cannot be used; says which and why.
    """
    try:
        server, thread = start_http_server(port, host, registry=observer.registry)
    except OSError as error:
        raise ConfigError(
            f"metrics endpoint {host}:{port} cannot be opened: {error.strerror}"
        ) from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
