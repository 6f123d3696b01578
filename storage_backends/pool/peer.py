"""One store as a client sees it: a connection that is kept, and whether it is fit to be asked.

UP: asked. SUSPECT: something went wrong or came too late; it is asked nothing but how it is, until
it answers. DOWN: there is no connection; one is tried again and again, ever more seldom. Nobody
waits for a store that is not UP. A new connection is a new HELLO and a new link, so a store that
was restarted is as good as new.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, TypeVar

from cacheflow.errors import BackendError
from cacheflow.pool import messages
from cacheflow.storage_backends.pool.channel import Channel, Refused
from cacheflow.storage_backends.pool.places import Place, Places
from cacheflow.storage_backends.pool.ways import Ways

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from ssl import SSLContext

    from cacheflow.pool import Link, Transport
    from cacheflow.storage_backends.pool.settings import Address, PoolOptions

__all__ = ["Peer", "PeerState"]

R = TypeVar("R", bound="messages.Message")
_log = logging.getLogger(__name__)
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 2.0
"""Seconds between two attempts to connect."""
_BATCH: Final = 256


class PeerState(StrEnum):
    """Whether a store is asked."""

    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"


class Peer:
    """The store called ``name``. :meth:`start` begins, :meth:`aclose` must follow."""

    def __init__(
        self,
        name: str,
        address: Address,
        client: str,
        token: bytes,
        transports: Mapping[str, Transport],
        tls: SSLContext | None,
        options: PoolOptions,
    ) -> None:
        self.name = name
        self.state = PeerState.DOWN
        self.hello: messages.HelloReply | None = None
        """What the store said of itself last."""
        self.refused: Refused | None = None
        """Why it does not take us."""
        self.reason = ""
        """Why it could not be reached when that was last tried."""
        self.link: Link | None = None
        self.tried = asyncio.Event()
        """Set once it has been tried to connect."""
        self._address = address
        self._client = client
        self._token = token
        self._transports = transports
        self._tls = tls
        self._options = options
        self._channel: Channel | None = None
        self._doubted = asyncio.Event()
        self._fault = ""
        """How a transfer over the link failed."""
        self._ways = Ways(transports)
        self._has_delivered = False
        """Something has come or gone over the link."""
        self._releases: list[int] = []
        self.places = Places(self._give_back)
        """What lookups have leased."""
        self._task: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        """Whether it may be asked."""
        return self.state is PeerState.UP

    @property
    def takes_device_memory(self) -> bool:
        """Whether the transport in use does."""
        if self.hello is None:
            return False
        return self._transports[self.hello.transport].takes_device_memory

    def start(self) -> None:
        """Connect, and stay connected."""
        self._task = asyncio.create_task(self._run())

    async def aclose(self) -> None:
        """Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        await self._lose("closed")

    async def ask(
        self,
        request: messages.Message,
        reply: type[R],
        late: Callable[[R], None] | None = None,
        *,
        is_work: bool = False,
    ) -> R:
        """An answer of the store; see :meth:`Channel.ask`. ``is_work``: it may have to use its
        disk, to evict or to hash for it, and gets the time of a transfer.

        Raises:
            BackendError: it is not UP, does not answer in time (then it is SUSPECT), or refuses.
        """
        channel = self._channel
        if channel is None or not self.is_up:
            raise BackendError(
                f"the store is {self.state}", operation="ask", context=self.name, is_temporary=True
            )
        options = self._options
        seconds = options.transfer_seconds if is_work else options.request_seconds
        try:
            return await channel.ask(request, reply, seconds, late)
        except Refused:
            raise
        except BackendError:
            self._suspect(channel)
            raise

    def connection(self) -> tuple[Channel, Link]:
        """That which is in use now, and its link.

        Raises:
            BackendError: there is none.
        """
        if self._channel is None or self.link is None:
            reason = "there is no connection"
            raise BackendError(reason, operation="ask", context=self.name, is_temporary=True)
        return self._channel, self.link

    def delivered(self, link: Link) -> None:
        """A transfer over ``link`` ended well."""
        if self.link is link:
            self._has_delivered = True

    def suspect_link(self, link: Link, error: BackendError) -> None:
        """A transfer over ``link`` failed: it is made anew, if the store answers at all."""
        if self.link is link and self._channel is not None:
            self._fault = f"a transfer failed ({error})"
            self._suspect(self._channel)

    # -- leases --------------------------------------------------------------------------------

    def place(self, slot: tuple[int, int, int], link: Link | None, asked: float) -> Place:
        """What the store answered when it was ``asked`` over the connection that ``link`` belongs
        to: offset, bytes and generation of a slot that it leased."""
        return Place.leased(slot, link, asked, self.lease_seconds)

    def _give_back(self, place: Place) -> None:
        if self._channel is not None and self.link is place.link:  # else it ended with its own
            generations = (place.generation,)
            self._channel.tell(messages.Release(generations=generations, looked_up=True))

    @property
    def lease_seconds(self) -> float:
        """How long a lease lasts."""
        return self.hello.lease_ms / 1000 if self.hello is not None else 0.0

    def release(self, generation: int, link: Link | None) -> None:
        """One lease is not needed any more, of the connection that ``link`` belongs to. Said soon,
        with others."""
        if link is not self.link:
            return  # it ended with its connection
        if not self._releases:
            asyncio.get_running_loop().call_soon(self._send_releases, self._channel)
        self._releases.append(generation)

    def abort(self, generations: list[int]) -> None:
        """These slots will not be filled."""
        if self._channel is not None and generations:
            self._channel.tell(messages.Abort(generations=tuple(generations)))

    def _send_releases(self, channel: Channel | None) -> None:
        releases, self._releases = self._releases, []
        if channel is None or channel is not self._channel:
            return  # leases ended with the connection they were given on
        for at in range(0, len(releases), _BATCH):
            generations = tuple(releases[at : at + _BATCH])
            channel.tell(messages.Release(generations=generations, looked_up=False))

    # -- the connection ------------------------------------------------------------------------

    async def _run(self) -> None:
        pause = _FIRST_PAUSE
        while True:
            try:
                await self._connect()
            except Exception as error:  # of transports, too, which may be anybody's
                self._not_connected(error)
                await self._lose(str(error))
            else:
                pause = _FIRST_PAUSE
                await self._stay()
                continue
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _connect(self) -> None:
        options = self._options
        async with asyncio.timeout(options.connect_seconds):
            channel = await Channel.connect(self.name, self._address, self._tls)
        self._channel = channel
        names = self._ways.offered(time.monotonic())
        offers = tuple((name, self._transports[name].hello()) for name in names)
        hello = messages.Hello(client=self._client, token=self._token, offers=offers)
        answer = await channel.ask(hello, messages.HelloReply, options.connect_seconds)
        transport = self._transports.get(answer.transport)
        if transport is None:
            reason = f"it chose transport {answer.transport}, which was not offered"
            raise BackendError(reason, operation="hello", context=self.name)
        try:
            async with asyncio.timeout(options.connect_seconds):
                self.link = await transport.connect(self.name, self._address[0], answer.answer)
        except (BackendError, TimeoutError):
            self._no_way(answer.transport, delivered=False)
            raise
        self._has_delivered = False
        self.hello, self.refused, self.reason = answer, None, ""
        self._doubted.clear()
        self._fault = ""
        self._become(PeerState.UP)
        self.tried.set()
        _log.info("store %s: up, transport %s", self.name, answer.transport)

    def _no_way(self, transport: str, *, delivered: bool) -> None:
        if self._ways.failed(transport, time.monotonic(), delivered=delivered):
            _log.warning("store %s: nothing comes over %s: trying others", self.name, transport)

    def _not_connected(self, error: Exception) -> None:
        is_news = not self.tried.is_set() or self.state is not PeerState.DOWN
        self.refused = error if isinstance(error, Refused) else None
        self.reason = reason = str(error) or type(error).__name__
        _log.log(
            logging.WARNING if is_news else logging.DEBUG,
            "store %s: cannot be reached: %s",
            self.name,
            reason,
        )
        self.tried.set()

    async def _stay(self) -> None:
        """Until the connection is over; what is suspected is looked into."""
        channel = self._channel
        assert channel is not None
        while True:
            doubted = asyncio.create_task(self._doubted.wait())
            ways: list[asyncio.Future[Any]] = [doubted, channel.ended]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                doubted.cancel()
            if not self._fault and (channel.ended.done() or not await self._answers(channel)):
                await self._lose("it does not answer any more")
                return
            if self._fault:  # perhaps of while it was asked
                await self._lose(self._fault)
                return
            self._doubted.clear()
            self._become(PeerState.UP)

    async def _answers(self, channel: Channel) -> bool:
        try:
            await channel.ask(messages.Stat(), messages.StatReply, self._options.request_seconds)
        except BackendError:
            return False
        return True

    def _suspect(self, channel: Channel) -> None:
        if channel is self._channel and self.is_up:
            self._become(PeerState.SUSPECT)
            self._doubted.set()

    async def _lose(self, reason: str) -> None:
        channel, self._channel = self._channel, None
        link, self.link = self.link, None
        self.places.clear()
        if self.state is not PeerState.DOWN:
            _log.warning("store %s: down: %s", self.name, reason)
            self._become(PeerState.DOWN)
        if link is not None:
            if self._fault and self.hello is not None:
                self._no_way(self.hello.transport, delivered=self._has_delivered)
            link.close()
        if channel is not None:
            with suppress(BackendError):
                await channel.aclose()

    def _become(self, state: PeerState) -> None:
        self.state = state
