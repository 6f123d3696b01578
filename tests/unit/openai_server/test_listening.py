"""The server's address is known to be good, or bad, before any model is loaded."""

from __future__ import annotations

import errno
import re
import socket
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.errors import ConfigError
from cacheflow.plugins.openai_server import listening, serve
from cacheflow.plugins.openai_server.listening import addresses_of, bound, url_of
from cacheflow.plugins.openai_server.serving import server_of
from cacheflow.settings import Settings, TierSettings

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from cacheflow.plugins.openai_server.service import Service

    Serving = Callable[..., AbstractAsyncContextManager[Service]]

LOCAL = "127.0.0.1"


def listener() -> socket.socket:
    made = socket.create_server((LOCAL, 0))
    made.setblocking(False)
    return made


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("no.such.host.invalid", "server setting host: 'no.such.host.invalid' is no address: .*"),
        ("a" * 64 + ".invalid", "server setting host: 'a+.invalid' is no address: .*"),
        ("192.0.2.1", "cannot listen on 192.0.2.1:{port}: Cannot assign requested address"),
        (LOCAL, "cannot listen on 127.0.0.1:{port}: Address already in use; choose another port"),
    ],
)
async def test_a_bad_address_is_told_before_the_model(
    monkeypatch: pytest.MonkeyPatch, host: str, why: str
) -> None:
    """The host is blamed for what the host is, the port for being taken, and no engine is asked
    for, let alone a model."""

    def load(name: str) -> Any:
        raise AssertionError(f"engine {name} is loaded first")

    monkeypatch.setattr("cacheflow.plugins.openai_server.serving.load_engine", load)
    with closing(listener()) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=why.format(port=port)):
            await serve(None, server={"host": host, "port": port})


async def test_a_bad_store_is_told_before_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A tier that cannot be opened is blamed before minutes go into loading a model."""

    def load(name: str) -> Any:
        raise AssertionError(f"engine {name} is loaded first")

    monkeypatch.setattr("cacheflow.plugins.openai_server.serving.load_engine", load)
    (tmp_path / "file").touch()
    tier = TierSettings(name="disk", backend="nvme", options={"path": str(tmp_path / "file")})
    with pytest.raises(ConfigError, match=r"tier 'disk': .*file"):
        await serve(None, settings=Settings(tiers=(tier,)), server={"port": 0})


async def test_a_port_that_may_not_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Permission is told as that, with what to do."""

    def refuse(family: int, address: object) -> socket.socket:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(listening, "_bind", refuse)
    told = "cannot listen on 127.0.0.1:80: Permission denied; choose a port above 1023"
    with pytest.raises(ConfigError, match=told), bound(LOCAL, 80, await addresses_of(LOCAL, 80)):
        pass


async def test_nobody_is_let_in_before_the_server_listens(serving: Serving) -> None:
    """A bound port refuses connections until the server listens at it, and is free afterwards;
    who listens there meanwhile is what a person is told."""
    with bound(LOCAL, 0, await addresses_of(LOCAL, 0)) as [ours]:
        address = ours.getsockname()
        assert url_of(ours) == f"http://{LOCAL}:{address[1]}"
        with closing(socket.socket()) as client:
            assert client.connect_ex(address) == errno.ECONNREFUSED
        with closing(socket.socket()) as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(address)
            other.listen()
            async with serving(host=LOCAL, port=address[1]) as service:
                told = re.escape(f"cannot listen on {LOCAL}:{address[1]}: Address already in use")
                with pytest.raises(ConfigError, match=told):
                    await server_of(service).serve([ours])
    with closing(socket.create_server(address)):
        pass


async def test_a_family_that_is_not_there_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """`localhost` may be ::1 as well: without IPv6 the other address serves, and the server has as
    many sockets as addresses work."""
    real = listening._bind

    def without_ipv6(family: int, address: tuple[object, ...]) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return real(family, address)

    monkeypatch.setattr(listening, "_bind", without_ipv6)
    both = [(socket.AF_INET6, ("::1", 0, 0, 0)), (socket.AF_INET, (LOCAL, 0))]
    with bound("localhost", 0, both) as sockets:
        assert [made.family for made in sockets] == [socket.AF_INET]
    none_left = pytest.raises(ConfigError, match="localhost:0: Cannot assign")
    with none_left, bound("localhost", 0, both[:1]):
        pass
