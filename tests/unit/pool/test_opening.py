"""A store or a client of the pool whose opening is cancelled leaves nothing open."""

from __future__ import annotations

import asyncio
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.errors import ConfigError
from cacheflow.metrics import serve_metrics
from cacheflow.pool import server as stores
from cacheflow.storage_backends.pool import PoolBackend
from cacheflow.storage_backends.pool import backend as clients
from cacheflow.storage_backends.pool import target as targets
from tests.cancelling import Held, cancelled_during
from tests.unit.pool.storing import serving

if TYPE_CHECKING:
    from collections.abc import Iterator


async def serve(**settings: Any) -> None:
    async with serving(**settings):
        pass


async def test_a_socket_that_is_bound_for_nobody_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the tcp transport, made on a thread."""
    made: list[socket.socket] = []

    def listen(host: str, port: int) -> socket.socket:
        made.append(socket.create_server((host, port)))
        return made[0]

    held = Held(listen)
    monkeypatch.setattr(targets, "_listen", held)
    await cancelled_during(serve(), held)
    assert made[0].fileno() == -1


async def test_a_metrics_page_that_is_served_for_nobody_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has a port and a thread of its own."""
    told: list[str] = []
    held = Held(lambda: None)

    @contextmanager
    def slow(*arguments: Any) -> Iterator[int]:
        held()
        with serve_metrics(*arguments) as port:
            told.append("open")
            yield port
        told.append("closed")

    monkeypatch.setattr(stores, "serve_metrics", slow)
    await cancelled_during(serve(metrics_port=0), held)
    assert told == ["open", "closed"]


class Recorder:
    """A transport that is only opened and closed."""

    def __init__(self) -> None:
        self.closed = 0

    async def open_transport(self, tls: object) -> Recorder:
        return self

    async def aclose(self) -> None:
        self.closed += 1


async def test_transports_that_are_opened_for_nobody_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stores are looked for when transports are open; that can take long, and be given up."""
    transport, asked = Recorder(), asyncio.Event()

    async def never(options: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(clients, "load_transport", lambda name: transport)
    monkeypatch.setattr(clients, "discovery", never)
    options = {"peers": ["localhost:1"], "transports": ["any"]}
    opening = asyncio.create_task(PoolBackend.open(options))
    await asyncio.wait_for(asked.wait(), 20)
    opening.cancel()
    await asyncio.wait([opening])
    assert opening.cancelled()
    assert transport.closed == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arena": 1 << 60}, "store setting arena: cannot have"),
        ({"tenant_quota": 1 << 16}, "store setting tenant_quota: .*greater than or equal"),
        ({"spill": "/proc/nowhere"}, "store setting spill: .*cannot be made"),
        ({"etcd": "ftp://x", "advertise": "a:1"}, "store setting etcd: write it as http://"),
        ({"etcd": "http://u:hunter2@x", "advertise": "a:1"}, "etcd: must hold no credentials"),
        ({"etcd": "http://x", "advertise": "a"}, "store setting advertise: write it as host:port"),
        ({"etcd": "http://x", "advertise": "a:x"}, "store setting advertise: write it as"),
    ],
)
async def test_what_cannot_be_used_is_named(settings: dict[str, Any], message: str) -> None:
    """By its setting, before anybody is let in or told."""
    with pytest.raises(ConfigError, match=message) as raised:
        await serve(**settings)
    assert "hunter2" not in str(raised.value)
