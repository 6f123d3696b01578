"""A server process: address, engine, tiers and application, opened in order, closed in reverse.

The first SIGTERM or SIGINT drains: no new requests, those under way end (or are cancelled after
``drain_seconds``), their KV is stored, the process ends. A second one does not wait.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import uvicorn

from cacheflow.errors import ConfigError
from cacheflow.metrics import PrometheusObserver, watch
from cacheflow.plugins.openai_server.app import create_app
from cacheflow.plugins.openai_server.connections import connections
from cacheflow.plugins.openai_server.listening import (
    addresses_of,
    bound,
    cannot_listen,
    url_of,
)
from cacheflow.plugins.openai_server.metrics import ServerSeries
from cacheflow.plugins.openai_server.service import Service
from cacheflow.plugins.openai_server.settings import ServerSettings
from cacheflow.plugins.openai_server.template import Words
from cacheflow.registry import load_engine
from cacheflow.session import CacheFlow
from cacheflow.settings import Settings
from cacheflow.tiers import try_tiers

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Iterator, Mapping
    from pathlib import Path

    from cacheflow.abc import Engine

__all__ = ["opened_service", "serve", "server_of"]

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_CLOSE_SECONDS: Final = 2
"""Cancelled requests have as long to tell their clients."""
_log = logging.getLogger("cacheflow.server")


async def serve(
    model: Path | None,
    *,
    engine: str = "transformers",
    engine_options: Mapping[str, Any] | None = None,
    settings: Settings | None = None,
    server: Mapping[str, Any] | None = None,
) -> None:
    """Serve the model in the folder ``model`` (None: the engine's small one) until a signal ends
    it.

    ``server``: server settings by name; the rest comes from the environment.

    Raises:
        ConfigError: the model, a setting or the address cannot be used; says which and why.
    """
    options = ServerSettings(**(server or {}))
    addresses = await addresses_of(options.host, options.port)
    async with AsyncExitStack() as stack:
        sockets = stack.enter_context(bound(options.host, options.port, addresses))
        settings = settings or Settings()
        await try_tiers(settings)
        factory = cast("Any", await asyncio.to_thread(load_engine, engine))
        if model is None and not hasattr(factory, "small_model"):
            raise ConfigError(f"engine {engine!r} brings no model along: give --model")
        if model is None:
            _log.info("no model given: the engine's small one, which is downloaded once")
        folder = model if model else cast("Path", await asyncio.to_thread(factory.small_model))
        _log.info("loading the model in %s", folder)  # which may take minutes
        opened = await factory.open_model(folder, **(engine_options or {}))
        stack.push_async_callback(opened.aclose)
        name = options.model_name or await asyncio.to_thread(_folder_name, folder)
        service = await stack.enter_async_context(opened_service(opened, name, settings, options))
        tiers = ", ".join(f"{tier.name} ({tier.backend})" for tier in settings.tiers)
        if tiers:
            _log.info("model %s; tiers: %s", name, tiers)
        else:
            _log.warning("model %s; no tier: what leaves memory is computed again (--store)", name)
        await _listen(service, sockets)


@asynccontextmanager
async def opened_service(
    engine: Engine, model: str, settings: Settings, server: ServerSettings
) -> AsyncIterator[Service]:
    """A service over ``engine``, with its tiers and series; for :func:`create_app`, or a host
    application's own server.

    Raises:
        ConfigError: the model has no chat template, or a setting cannot be used.
    """
    observer = PrometheusObserver()
    if engine.chat is None:
        raise ConfigError(f"model {model!r}: no tokenizer with a chat template in its folder")
    words = await asyncio.to_thread(Words, engine.chat)
    try:
        async with CacheFlow.open(settings, engine=engine, observer=observer) as flow:
            with watch(observer, flow.restorer, sessions=flow, model=model, policy=settings.policy):
                yield Service(flow, words, server, model, ServerSeries(observer.registry))
                await flow.flush(settings.flush_seconds)
    finally:
        words.aclose()


def _folder_name(model: Path) -> str:
    return model.expanduser().resolve().name


class _Server(uvicorn.Server):
    """Signals are ours, and so may be the sockets."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            for each in sockets or ():  # here: of a loop not everyone hears that it failed
                each.listen(self.config.backlog)
        except OSError as error:  # somebody else listens where both had bound
            raise cannot_listen(self.config.host, self.config.port, error) from None
        await super().startup(sockets)
        for each in sockets or ():  # of its own uvicorn tells
            _log.info("running on %s", url_of(each))


async def _listen(service: Service, sockets: list[socket.socket]) -> None:
    server = server_of(service)
    stop = asyncio.Event()
    with _on_signals(stop, server):
        draining = asyncio.create_task(_drain(service, server, stop))
        try:
            await server.serve(sockets)
        finally:
            draining.cancel()
            await asyncio.wait([draining])


def server_of(service: Service) -> uvicorn.Server:
    """What listens for ``service``, not started; signals are its caller's."""
    settings = service.settings
    config = uvicorn.Config(
        create_app(service),
        http=connections(settings, service.series),
        host=settings.host,
        port=settings.port,
        log_level=settings.log_level,
        access_log=settings.log_level == "debug",
        timeout_graceful_shutdown=_CLOSE_SECONDS,
        lifespan="off",
    )
    return _Server(config)


async def _drain(service: Service, server: uvicorn.Server, stop: asyncio.Event) -> None:
    await stop.wait()
    _log.info("draining: %d running, %d waiting", *_load(service))
    if not await service.admission.drain(service.settings.drain_seconds):
        _log.warning("cancelled after drain_seconds: %d running, %d waiting", *_load(service))
    server.should_exit = True


def _load(service: Service) -> tuple[int, int]:
    return service.admission.running, service.admission.waiting


@contextmanager
def _on_signals(stop: asyncio.Event, server: uvicorn.Server) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def told() -> None:
        server.should_exit |= stop.is_set()
        stop.set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, told)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
