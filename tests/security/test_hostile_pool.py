"""A store that anybody may send anything: it answers who is well-behaved, before and after."""

from __future__ import annotations

import socket
import struct
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheflow.pool import Kind, messages
from cacheflow.pool.frames import PREFIX_BYTES, decode_prefix, encode_frame
from cacheflow.storage_backends.pool import lane
from cacheflow.storage_backends.pool.target import ANSWER
from cacheflow.testing.objects import make_object
from cacheflow.testing.store_process import StoreProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

STORED: Final = make_object(1)
HELLO: Final = messages.Hello(client="odd", token=b"", offers=(("tcp", b""),))


class Client:
    """A blocking client that says what it likes."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10.0)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.socket.close()

    def ask(self, message: messages.Message, kind: Kind, number: int = 1) -> messages.Message:
        self.socket.sendall(message.frame(kind, number))
        kind, is_reply, got, size = decode_prefix(self._exactly(PREFIX_BYTES))
        assert (is_reply, got) == (True, number)
        return messages.REPLIES[kind].parse(self._exactly(size))

    def hello(self) -> messages.HelloReply:
        reply = self.ask(HELLO, Kind.HELLO)
        assert isinstance(reply, messages.HelloReply)
        self.hello_reply = reply
        return reply

    def throw(self, data: bytes) -> None:
        """Send and take whatever comes until the store hangs up or says nothing more."""
        self.socket.settimeout(0.05)
        with suppress(OSError):
            self.socket.sendall(data)
            while self.socket.recv(1 << 16):
                pass

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.socket.recv(size - len(data))
            assert part, "the store hung up"
            data += part
        return data


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path_factory.mktemp("store") / "log", arena="1MiB") as store:
        yield store


@pytest.fixture(scope="module")
def good(store: StoreProcess) -> Iterator[Client]:
    """Somebody who was there all the time, with an object in the store."""
    with Client(store.port) as client:
        client.hello()
        yield client


def check(good: Client) -> None:
    """The store answers, and nothing has come of what was thrown at it."""
    reply = good.ask(messages.Stat(), Kind.STAT)
    assert isinstance(reply, messages.StatReply)
    assert reply.objects == 0


_fields: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.binary() | st.text(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """A frame that looks right: a kind that exists, its field names, any values."""
    kind = draw(st.sampled_from([*messages.REQUESTS]))
    names = list(messages.REQUESTS[kind].model_fields)
    fields = {name: draw(_fields) for name in names if draw(st.booleans())}
    is_reply = draw(st.integers(0, 9)) == 0
    return encode_frame(kind, draw(st.integers(0, 2**32 - 1)), fields, is_reply=is_reply)


@settings(max_examples=30)
@given(data=st.binary(min_size=1, max_size=64), greeted=st.booleans())
def test_any_bytes(store: StoreProcess, good: Client, data: bytes, greeted: bool) -> None:
    """Noise, before or after a proper HELLO, ends that connection at most."""
    with Client(store.port) as client:
        if greeted:
            client.hello()
        client.throw(data)
    check(good)


@settings(max_examples=60)
@given(thrown=st.lists(frames(), min_size=1, max_size=4), greeted=st.booleans())
def test_any_frames(store: StoreProcess, good: Client, thrown: list[bytes], greeted: bool) -> None:
    """Well-formed frames of any kind with any values end that connection at most."""
    with Client(store.port) as client:
        if greeted:
            client.hello()
        client.throw(b"".join(thrown))
    check(good)


@settings(max_examples=30)
@given(data=st.data())
def test_any_numbers(store: StoreProcess, good: Client, data: st.DataObject) -> None:
    """Requests with the right types and any numbers in them, slots and generations that are not the
    sender's for instance, change nothing and are answered."""
    number = st.integers(0, 2**63 - 1)
    requests: list[tuple[Kind, messages.Message]] = [
        (
            Kind.RELEASE,
            messages.Release(generations=tuple(data.draw(st.lists(number))), looked_up=False),
        ),
        (Kind.ABORT, messages.Abort(generations=tuple(data.draw(st.lists(number))))),
        (Kind.COMMIT, messages.Commit(slots=((data.draw(number), data.draw(number)),))),
        (Kind.SCAN, messages.Scan(after=data.draw(number))),
        (Kind.ALLOC, messages.Alloc(headers=(data.draw(st.binary(max_size=99)),))),
        (Kind.LOOKUP, messages.Lookup(chunks=(bytes(32),), known=(data.draw(number),), lease=True)),
    ]
    with Client(store.port) as client:
        client.hello()
        for kind, request in requests:
            reply = client.ask(request, kind)
            if isinstance(reply, messages.ErrorReply):  # of a scan that nobody has begun
                assert (kind, reply.code) == (Kind.SCAN, "failed")
            else:
                assert type(reply) is messages.REPLIES[kind]
    check(good)


@settings(max_examples=40)
@given(data=st.data())
def test_any_lane(store: StoreProcess, good: Client, data: st.DataObject) -> None:
    """Lanes with a wrong secret, noise, or ranges and generations of nobody, get no byte of the
    arena and put none into it."""
    with Client(store.port) as client:
        answer = client.hello().answer
        port, secret = struct.unpack(f">H{lane.SECRET_BYTES}s", answer)
        greeting = data.draw(st.sampled_from([lane.greeting(secret), lane.greeting(bytes(32))]))
        operation = data.draw(st.sampled_from(list(lane.Operation)))
        numbers = [data.draw(st.integers(0, 2**64 - 1) | st.integers(0, 9)) for _ in range(3)]
        request = lane.pack_request(operation, *numbers)
        noise = data.draw(st.binary(max_size=64))
        thrown = greeting + data.draw(st.sampled_from([request, noise])) + noise
        got = b""
        with (
            socket.create_connection(("127.0.0.1", port), timeout=10.0) as connection,
            suppress(OSError),  # it may hang up at any moment
        ):
            connection.sendall(thrown)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                got += part
        assert got in (b"", lane.pack_reply(lane.Status.DENIED, 0))
    check(good)


def test_a_slow_greeter_is_hung_up_on(store: StoreProcess, good: Client) -> None:
    """Who connects and says nothing, or half a HELLO, is disconnected after three seconds; others
    are served meanwhile."""
    start = time.monotonic()
    with Client(store.port) as silent, Client(store.port) as slow:
        slow.socket.sendall(HELLO.frame(Kind.HELLO, 1)[:20])
        for client in (silent, slow):
            check(good)
            with suppress(ConnectionError):
                assert client.socket.recv(1) == b""
    assert 2.0 < time.monotonic() - start < 9.0


def test_strangers_on_the_data_port_take_little(store: StoreProcess, good: Client) -> None:
    """Who says half of a lane's first words, byte after byte, is cut after five seconds in all, and
    at once where many others come; whoever has something to say is heard meanwhile."""
    start = time.monotonic()
    with ExitStack() as stack:
        [port, secret] = ANSWER.unpack(good.hello_reply.answer)
        strangers = [stack.enter_context(Client(port)) for _ in range(200)]
        late = [stack.enter_context(Client(port)) for _ in range(4)]
        for each in late:
            each.socket.settimeout(0.5)
        lane_of_good = stack.enter_context(Client(port))
        lane_of_good.socket.sendall(lane.greeting(secret))
        lane_of_good.socket.sendall(lane.pack_request(lane.Operation.READ, 1, 0, 0))
        assert lane_of_good.socket.recv(1 << 12) == lane.pack_reply(lane.Status.DENIED, 0)
        cut = 0
        for each in strangers[:100]:
            with suppress(ConnectionError):
                assert each.socket.recv(1) == b""
            cut += 1
        assert cut == 100
        assert time.monotonic() - start < 4.0
        while late:
            for each in list(late):
                try:
                    each.socket.sendall(b"C")
                    if each.socket.recv(1) == b"":
                        late.remove(each)
                except TimeoutError:
                    pass
                except OSError:
                    late.remove(each)
            assert time.monotonic() - start < 20.0
    check(good)


def test_one_client_has_few_lanes(store: StoreProcess, good: Client) -> None:
    """The hundredth is cut."""
    [port, secret] = ANSWER.unpack(good.hello_reply.answer)
    with ExitStack() as stack:
        for _ in range(100):
            client = stack.enter_context(Client(port))
            with suppress(OSError):
                client.socket.sendall(lane.greeting(secret))
        with suppress(ConnectionError):
            assert client.socket.recv(1) == b""
    check(good)


def test_what_one_client_can_take_is_bounded(store: StoreProcess, good: Client) -> None:
    """Headers over their limit are refused, and one client cannot have more than half of the arena
    promised to him."""
    with Client(store.port) as client:
        client.hello()
        huge = msgpack.packb({"headers": [b"\0" * (5 << 20)]})
        client.throw(struct.pack(">2sBBII", b"CF", 1, Kind.ALLOC, 1, len(huge)) + huge)
    with Client(store.port) as client:
        client.hello()
        reply = client.ask(messages.Alloc(headers=(STORED.header,) * 64), Kind.ALLOC)
        assert isinstance(reply, messages.AllocReply)
        granted = [slot for slot in reply.slots if not slot[2]]
        assert len(granted) == (1 << 19) // STORED.info.nbytes
        refused = [slot[2] for slot in reply.slots if slot[2]]
        assert all(reason.startswith("busy") for reason in refused)
    check(good)
