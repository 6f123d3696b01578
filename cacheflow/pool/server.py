"""The store process: arena, disk, transports and side channel, put together and taken apart.

:func:`running` opens all of it; :meth:`StoreServer.drain` is what SIGTERM asks for.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from itertools import count
from typing import TYPE_CHECKING, Final, cast

from cacheflow.clock import SystemClock
from cacheflow.errors import ConfigError
from cacheflow.metrics import PrometheusObserver, serve_metrics
from cacheflow.pool import messages as m
from cacheflow.pool.directory import Directory, Terms
from cacheflow.pool.etcd import Announcement, Etcd
from cacheflow.pool.metrics import StoreCollector
from cacheflow.pool.session import Session
from cacheflow.pool.slots import Arena
from cacheflow.pool.spill import Spill
from cacheflow.registry import load_transport
from cacheflow.tasks import all_or_nothing
from cacheflow.tiers import Tier

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from cacheflow.pool.settings import StoreSettings
    from cacheflow.pool.transport import Target, TransportKind

__all__ = ["StoreServer", "running"]

_log = logging.getLogger(__name__)
_CLOSE_SECONDS: Final = 5.0


class StoreServer:
    """Made by :func:`running`, which also closes it."""

    def __init__(
        self, settings: StoreSettings, directory: Directory, targets: Mapping[str, Target]
    ) -> None:
        self.settings = settings
        self.directory = directory
        self.targets = targets
        self.instance = secrets.token_bytes(16)
        self.port = 0
        self.metrics_port: int | None = None
        self._sessions: dict[str, Session] = {}
        self._names = count(1)
        self._changes = asyncio.Event()
        self._clock = SystemClock()
        self._since = self._clock.now()
        self._listener: asyncio.Server | None = None
        self._announcement: Announcement | None = None

    async def listen(self, tls: ssl.SSLContext | None) -> None:
        """Take clients from now on.

        Raises:
            ConfigError: the address cannot be used.
        """
        host, port = self.settings.host, self.settings.port
        try:
            self._listener = await asyncio.start_server(self._serve, host, port, ssl=tls)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"store: cannot listen at {host}:{port}: {reason}") from error
        self.port = self._listener.sockets[0].getsockname()[1]
        if self.settings.etcd is not None:
            etcd = await Etcd.open(self.settings.etcd)
            self._announcement = Announcement(self.settings, etcd)
            self._announcement.start()

    def clients(self) -> Counter[str]:
        """Connections by transport."""
        sessions = self._sessions.values()
        return Counter(session.transport for session in sessions if session.transport)

    def stat(self) -> m.StatReply:
        """The answer to STAT."""
        directory = self.directory
        return m.StatReply(
            instance=self.instance,
            uptime=self._clock.now() - self._since,
            objects=directory.objects,
            used_bytes=directory.used_bytes,
            arena_bytes=directory.arena.memory.nbytes,
            arena_used_bytes=directory.tier.catalogue.bytes,
            leases=directory.grants.leases,
            uncommitted=directory.grants.uncommitted,
            clients=len(self._sessions),
            is_draining=directory.is_draining,
        )

    async def drain(self) -> None:
        """Take nothing new, let clients finish what they read and write, catch up with the disk:
        all of it within the time that is set."""
        seconds, directory = self.settings.drain_seconds, self.directory
        directory.is_draining = True
        end = self._clock.now() + seconds
        _log.info("draining: %d clients, at most %g s", len(self._sessions), seconds)
        if self._announcement is not None:
            await self._announcement.aclose()
        if self._listener is not None:
            self._listener.close()
        await self._until(
            lambda: not directory.grants.leases + directory.grants.uncommitted, seconds
        )
        if directory.spill is not None:
            await directory.spill.drain(max(end - self._clock.now(), 0.0))

    async def aclose(self) -> None:
        """Disconnect everybody. Idempotent."""
        if self._announcement is not None:
            await self._announcement.aclose()
        if self._listener is not None:
            self._listener.close()
        for session in list(self._sessions.values()):
            session.end()
        await self._until(lambda: not self._sessions, _CLOSE_SECONDS)

    def changed(self) -> None:
        """A client or a grant has come or gone."""
        self._changes.set()

    async def _until(self, reached: Callable[[], bool], seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not reached():
                    self._changes.clear()
                    await self._changes.wait()

    def overdue(self, name: str) -> None:
        """A client has not committed in time what it was to write."""
        if (session := self._sessions.get(name)) is not None:
            session.cut("it did not commit in time")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._sessions) >= self.settings.max_clients:
            _log.warning("a client is turned away: there are %d", len(self._sessions))
            writer.transport.abort()
            return
        name = f"{self.instance.hex()[:8]}-{next(self._names)}"
        token = self.settings.token.get_secret_value().encode()
        session = Session(name, self.directory, self.targets, token, self.instance, self.stat)
        self._sessions[name] = session
        try:
            await session.serve(reader, writer)
        finally:
            del self._sessions[name]
            self.changed()


@asynccontextmanager
async def running(settings: StoreSettings) -> AsyncIterator[StoreServer]:
    """A store that takes clients while the block runs.

    Raises:
        ConfigError: something of the settings cannot be used here; says what.
        IntegrityError: the folder of the disk tier holds something else.
    """
    tls = await asyncio.to_thread(_server_tls, settings)
    observer = PrometheusObserver()
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        with _about("arena"):
            arena = Arena(settings.arena)
        stack.push_async_callback(arena.aclose)
        tier_settings = settings.arena_tier(arena.memory.nbytes)
        tier = await Tier.over(arena, tier_settings, clock=clock, observer=observer)
        stack.push_async_callback(tier.aclose)
        spill: Spill | None = None
        if (spill_settings := settings.spill_tier()) is not None:
            with _about("spill"):
                spill = await Spill.open(spill_settings, arena, clock, observer)
            stack.push_async_callback(spill.aclose)
        targets: dict[str, Target] = {}
        server: StoreServer

        def busy(grants: int) -> None:
            for target in targets.values():
                target.busy(grants)
            server.changed()

        directory = Directory(
            arena,
            tier,
            spill,
            clock,
            Terms(settings.lease_seconds, settings.fill_seconds),
            busy=busy,
            overdue=lambda client: server.overdue(client),
        )
        stack.push_async_callback(directory.aclose)
        targets |= await _open_targets(settings, directory, tls, stack)
        server = StoreServer(settings, directory, targets)
        stack.push_async_callback(server.aclose)
        observer.registry.register(StoreCollector(server))
        await server.listen(tls)
        if settings.metrics_port is not None:
            metrics = serve_metrics(observer, settings.metrics_port, settings.host)
            entering = asyncio.to_thread(metrics.__enter__)
            server.metrics_port = await all_or_nothing(entering, lambda port: _left(metrics))
            stack.push_async_callback(_left, metrics)
        _log.info(
            "store: port %d, arena of %d bytes (%s pages), transports %s",
            server.port,
            arena.memory.nbytes,
            arena.pages,
            ", ".join(targets),
        )
        yield server


async def _open_targets(
    settings: StoreSettings,
    directory: Directory,
    tls: ssl.SSLContext | None,
    stack: AsyncExitStack,
) -> dict[str, Target]:
    targets: dict[str, Target] = {}
    if not settings.transports:
        raise ConfigError("store setting transports: it is empty; name one (tcp works everywhere)")
    for name in settings.transports:
        try:
            kind = cast("TransportKind", await asyncio.to_thread(load_transport, name))
            target = await kind.open_target(
                directory.arena.memory, directory.grants, settings.host, settings.data_port, tls
            )
        except ConfigError as error:
            _log.warning("transport %s is not offered: %s", name, error)
            continue
        stack.push_async_callback(target.aclose)
        targets[name] = target
    if not targets:
        wanted = ", ".join(settings.transports)
        raise ConfigError(f"store setting transports: none of {wanted} works here")
    return targets


@contextmanager
def _about(setting: str) -> Iterator[None]:
    """What cannot be used meanwhile is said to be of that setting."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"store setting {setting}: {error}") from error


async def _left(context: AbstractContextManager[object]) -> None:
    await asyncio.to_thread(context.__exit__, None, None, None)


def _server_tls(settings: StoreSettings) -> ssl.SSLContext | None:
    if settings.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
        if settings.tls_client_ca is not None:
            context.load_verify_locations(settings.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"store settings tls_*: {error.strerror or error}") from error
    return context
