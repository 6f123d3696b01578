"""Where the stores are: named, by DNS, in etcd; and lists that change or cannot be had."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from cacheflow.errors import BackendError
from cacheflow.storage_backends.pool.discovery import discovery
from cacheflow.storage_backends.pool.members import Members
from cacheflow.storage_backends.pool.settings import PoolOptions, parse_address
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cacheflow.storage_backends.pool.settings import Address


async def test_named_stores_are_what_they_are_called() -> None:
    """Each under its name with its port, the default one where none is given; nothing changes."""
    found = await discovery(PoolOptions(peers=("a", "b:1", "[::1]:2")))
    assert not found.changes
    assert await found.find() == {"a:7411": ("a", 7411), "b:1": ("b", 1), "::1:2": ("::1", 2)}
    await found.aclose()


async def test_every_address_of_a_name_is_a_store() -> None:
    """DNS: each address once, with the port; a name that cannot be resolved is temporary trouble,
    and so is a server that does not answer."""
    found = await discovery(PoolOptions(dns="stores.example:99"))
    assert found.changes
    answers = [(socket.AF_INET, 1, 6, "", (host, 99)) for host in ("10.0.0.2", "10.0.0.1")]
    loop = asyncio.get_running_loop()
    resolving = mock.AsyncMock(return_value=[*answers, answers[0]])
    with mock.patch.object(type(loop), "getaddrinfo", resolving):
        expected = {f"10.0.0.{n}:99": (f"10.0.0.{n}", 99) for n in (1, 2)}
        assert await found.find() == expected
        for trouble in (socket.gaierror(-2, "Name or service not known"), TimeoutError()):
            resolving.side_effect = trouble
            with pytest.raises(BackendError, match=r"stores\.example cannot be resolved") as caught:
                await found.find()
            assert caught.value.is_temporary
    await found.aclose()


async def test_a_resolver_that_hangs_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question takes a thread until it is answered: the next look waits for the same one."""
    monkeypatch.setattr("cacheflow.storage_backends.pool.discovery._RESOLVE_SECONDS", 0.02)
    found, loop = await discovery(PoolOptions(dns="stores.example:99")), asyncio.get_running_loop()
    answered = asyncio.Event()

    async def resolving(*args: object, **options: object) -> list[Any]:
        await answered.wait()
        return [(socket.AF_INET, 1, 6, "", ("10.0.0.1", 99))]

    with mock.patch.object(type(loop), "getaddrinfo", side_effect=resolving) as asked:
        for _ in range(3):
            with pytest.raises(BackendError, match=r"stores\.example cannot be resolved"):
                await found.find()
        answered.set()
        monkeypatch.undo()
        assert await found.find() == {"10.0.0.1:99": ("10.0.0.1", 99)}
        assert asked.call_count == 1
        await found.find()
    assert asked.call_count == 2
    await found.aclose()


async def test_localhost_is_found_by_the_real_resolver() -> None:
    """Not all of it is scripted."""
    found = await discovery(PoolOptions(dns="localhost:7"))
    assert set(await found.find()) & {"127.0.0.1:7", "::1:7"}
    await found.aclose()


async def test_what_announces_no_store_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    """etcd: entries that are no announcement are named in the log, the others are used."""
    found = await discovery(PoolOptions(etcd="http://registry:2379"))
    good = json.dumps({"address": "a:1"})
    bad = {"1": "{", "2": "[]", "3": "{}", "4": json.dumps({"address": "a:x"})}
    with mock.patch("cacheflow.pool.Etcd.list", mock.AsyncMock(return_value={"0": good, **bad})):
        assert await found.find() == {"a:1": ("a", 1)}
    assert [f"etcd: {key} does not" in caplog.text for key in bad] == [True] * 4
    await found.aclose()


@pytest.mark.parametrize("text", ["", ":1", "a:", "a:0", "a:65536", "a:-1", "[]:1", "a:1 "])
def test_no_address(text: str) -> None:
    """What is no host and port says so."""
    with pytest.raises(ValueError, match="is not host:port"):
        parse_address(text)


class Listed:
    """A discovery whose answers the test gives."""

    changes = True

    def __init__(self, *names: str) -> None:
        self.answer: Mapping[str, Address] | BackendError = dict.fromkeys(names, ("x", 1))
        self.asked = asyncio.Event()

    async def find(self) -> Mapping[str, Address]:
        self.asked.set()
        if isinstance(self.answer, BackendError):
            raise self.answer
        return self.answer

    async def aclose(self) -> None:
        """Nothing is open."""


class Silent:
    """A peer that is there and nothing else; ``b`` is closed when it may be."""

    refused = None
    is_up = True

    def __init__(self, name: str, address: Address) -> None:
        self.name = name
        self.tried = asyncio.Event()
        self.tried.set()
        self.is_closed = False
        self.closing, self.again, self.may_close = (asyncio.Event() for _ in range(3))
        if name != "b":
            self.may_close.set()

    def start(self) -> None:
        """It is."""

    async def aclose(self) -> None:
        (self.again if self.closing.is_set() else self.closing).set()
        await self.may_close.wait()
        self.is_closed = True


async def test_a_list_that_cannot_be_had_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Stores known stay known while the registry fails or is empty; a new list is followed: who is
    gone is closed, who is new is asked."""
    listed = Listed("a", "b")
    make: Any = Silent
    options = PoolOptions(dns="x", discovery_seconds=0.001)
    members = Members(listed, options, make)
    await members.open()
    b: Any = members.peers["b"]
    away: list[Any] = [BackendError("the registry is away", operation="discover"), {}]
    for trouble in away:
        listed.answer = trouble
        for _ in range(3):
            listed.asked.clear()
            async with asyncio.timeout(20):
                await listed.asked.wait()
        assert set(members.peers) == set(members.placement.names) == {"a", "b"}
    assert "the registry is away" in caplog.text
    assert "those known are kept" in caplog.text
    listed.answer = {"a": ("x", 1), "c": ("x", 1)}
    await until(lambda: members.placement.names == ("a", "c"))
    assert set(members.peers) == {"a", "c"}
    b.may_close.set()
    await members.aclose()
    assert b.is_closed
    assert not members.peers


async def test_a_store_that_is_leaving_is_closed_with_the_rest() -> None:
    """Closing in the moment in which a store that left the list is being closed: it is closed."""
    listed = Listed("a", "b")
    make: Any = Silent
    members = Members(listed, PoolOptions(dns="x", discovery_seconds=0.001), make)
    await members.open()
    b: Any = members.peers["b"]
    listed.answer = {"a": ("x", 1)}
    await b.closing.wait()
    closing = asyncio.create_task(members.aclose())
    await b.again.wait()
    b.may_close.set()
    await closing
    assert b.is_closed
