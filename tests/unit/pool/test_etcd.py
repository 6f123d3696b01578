"""The etcd client against scripted answers of the gateway: what goes wrong, and what is asked."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections import deque
from typing import TYPE_CHECKING, Any
from unittest import mock

import httpx
import pytest

from cacheflow.errors import BackendError, ConfigError
from cacheflow.pool import Etcd, StoreSettings, etcd
from cacheflow.pool.etcd import Announcement

if TYPE_CHECKING:
    from collections.abc import Callable

URL = "http://registry:2379"


class Gateway:
    """Answers of an etcd server in the order of ``answers``; the last one again and again. One
    that is an exception is raised: the network's."""

    def __init__(self, *answers: object) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.answers = deque(answers)
        self.heard = asyncio.Event()

    def client(self) -> Etcd:
        transport = httpx.MockTransport(self._answer)
        return Etcd(URL + "/", httpx.AsyncClient(transport=transport))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((request.url.path, json.loads(request.content)))
        self.heard.set()
        answer = self.answers.popleft() if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, httpx.Response):
            return answer
        return httpx.Response(200, json=answer)

    async def until_asked(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.asked) < count:
                self.heard.clear()
                await self.heard.wait()

    @property
    def paths(self) -> list[str]:
        return [path.removeprefix("/v3/") for path, _ in self.asked]


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


async def test_a_prefix_is_listed() -> None:
    """All keys from the prefix to the next one after it; a key without a value has an empty one."""
    entries = [{"key": b64("/pool/a"), "value": b64("x")}, {"key": b64("/pool/b")}]
    gateway = Gateway({"kvs": entries}, {})
    client = gateway.client()
    assert await client.list("/pool/") == {"/pool/a": "x", "/pool/b": ""}
    assert gateway.asked == [("/v3/kv/range", {"key": b64("/pool/"), "range_end": b64("/pool0")})]
    assert await client.list("/pool/") == {}
    await client.aclose()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (httpx.ConnectError("refused"), "ConnectError refused"),
        (httpx.ReadTimeout(""), "ReadTimeout"),
        (httpx.Response(503, text="no leader"), "503"),
        (httpx.Response(200, text="<html>"), "JSONDecodeError"),
        (httpx.Response(200, json=[1]), "no object"),
    ],
)
async def test_trouble_is_a_backend_error(answer: object, said: str) -> None:
    """Whatever the network or the server does: one kind of error, that says what, and where."""
    client = Gateway(answer).client()
    with pytest.raises(BackendError, match=said) as caught:
        await client.list("/pool/")
    assert (caught.value.operation, caught.value.context) == ("kv/range", URL)
    await client.aclose()


async def test_without_httpx_the_install_line_is_said() -> None:
    """A missing package is a configuration error."""
    with (
        mock.patch.dict("sys.modules", {"httpx": None}),
        pytest.raises(ConfigError, match=r"cacheflow-kv\[etcd\]"),
    ):
        await Etcd.open(URL)


def announced(gateway: Gateway, ttl: int = 1) -> Announcement:
    """A store at ``a:1`` that announces itself, without pauses."""
    settings = StoreSettings(
        etcd=URL, advertise="a:1", etcd_ttl=ttl, etcd_prefix="/pool/", transports=("tcp",)
    )
    return Announcement(settings, gateway.client())


@pytest.fixture
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time between two calls is not what is tested."""
    sleep = asyncio.sleep

    async def soon(seconds: float) -> None:
        await sleep(0)

    monkeypatch.setattr(etcd, "asyncio", _Asyncio(soon))


class _Asyncio:
    """The module, with another sleep."""

    def __init__(self, sleep: Callable[[float], Any]) -> None:
        self.sleep = sleep

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)


@pytest.mark.usefixtures("_no_pauses")
async def test_a_store_is_announced_kept_and_taken_off() -> None:
    """One key under a lease, renewed as long as the store is there, and revoked at its end."""
    alive = {"result": {"ID": "7", "TTL": "1"}}
    gateway = Gateway({"ID": "7", "TTL": "1"}, {}, alive)
    announcement = announced(gateway)
    announcement.start()
    await gateway.until_asked(4)
    await announcement.aclose()
    await announcement.aclose()
    assert gateway.paths[:4] == ["lease/grant", "kv/put", "lease/keepalive", "lease/keepalive"]
    assert gateway.asked[0][1] == {"TTL": 1}
    value = b64(json.dumps({"address": "a:1"}))
    assert gateway.asked[1][1] == {"key": b64("/pool/a:1"), "value": value, "lease": "7"}
    assert gateway.asked[-1] == ("/v3/lease/revoke", {"ID": "7"})


@pytest.mark.usefixtures("_no_pauses")
async def test_a_lost_lease_is_taken_anew(caplog: pytest.LogCaptureFixture) -> None:
    """A server that forgets the lease (it was cut off for longer than it lasts), or fails for a
    while: the store is announced again, under a new lease."""
    gone, alive = {"result": {"ID": "7"}}, {"result": {"TTL": 1}}
    cut = httpx.ConnectError("refused")
    gateway = Gateway({"ID": "7"}, {}, cut, gone, {"ID": "8"}, {}, alive)
    announcement = announced(gateway)
    announcement.start()
    await gateway.until_asked(7)
    await announcement.aclose()
    assert gateway.paths[:6] == [
        *("lease/grant", "kv/put", "lease/keepalive", "lease/keepalive", "lease/grant", "kv/put")
    ]
    assert gateway.asked[5][1]["lease"] == "8"
    assert "cannot be announced: lease/keepalive: ConnectError refused" in caplog.text


@pytest.mark.usefixtures("_no_pauses")
async def test_a_lease_without_the_key_is_not_kept() -> None:
    """The server fails between the lease and the key: both are asked for again, instead of keeping
    a lease alive under which nobody finds the store."""
    alive = {"result": {"TTL": 1}}
    gateway = Gateway({"ID": "7"}, httpx.ReadTimeout(""), {"ID": "8"}, {}, alive)
    announcement = announced(gateway)
    announcement.start()
    await gateway.until_asked(5)
    await announcement.aclose()
    assert gateway.paths[:5] == [
        *("lease/grant", "kv/put", "lease/grant", "kv/put", "lease/keepalive")
    ]
    assert gateway.asked[3][1]["lease"] == "8"


@pytest.mark.usefixtures("_no_pauses")
async def test_an_answer_of_another_shape_is_trouble_that_passes() -> None:
    """A gateway in between may answer with anything: the store is announced on."""
    gateway = Gateway(
        {"ID": "7"}, {}, {"result": None}, {"result": {"TTL": "soon"}}, {"result": {}}
    )
    announcement = announced(gateway)
    announcement.start()
    await gateway.until_asked(6)
    await announcement.aclose()
    assert gateway.paths[2:6] == [*["lease/keepalive"] * 3, "lease/grant"]


@pytest.mark.usefixtures("_no_pauses")
async def test_a_server_that_is_gone_does_not_hold_up_closing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What cannot be revoked ends by itself."""
    caplog.set_level(logging.CRITICAL)
    gateway = Gateway({"ID": "7"}, {}, httpx.ConnectError("refused"))
    announcement = announced(gateway)
    announcement.start()
    await gateway.until_asked(3)
    async with asyncio.timeout(20):
        await announcement.aclose()
