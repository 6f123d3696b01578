"""Frames of the pool's side channel: what is said is heard, and nothing else is believed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.errors import IntegrityError
from cacheflow.pool import Frame, Kind, messages, read_frame
from cacheflow.pool.frames import (
    FEW_VALUES,
    FIRST_BODY,
    MAX_BODY,
    PREFIX_BYTES,
    decode_body,
    decode_prefix,
    encode_frame,
)

if TYPE_CHECKING:
    from cacheflow.pool.messages import Message

HELLO = messages.Hello(client="one", token=b"secret", offers=(("nixl", b"\0\xff"), ("tcp", b"")))
EXAMPLES: list[tuple[Kind, Message]] = [
    (Kind.HELLO, HELLO),
    (Kind.LOOKUP, messages.Lookup(chunks=(bytes(32),), known=(1, 2**63 - 1), lease=True)),
    (Kind.LEASE, messages.Lease(names=("a", "b"))),
    (Kind.COMMIT, messages.Commit(slots=((7, 2**64 - 1),))),
    (Kind.ALLOC, messages.Alloc(headers=(b"header",))),
    (Kind.STAT, messages.Stat()),
]


async def heard(data: bytes, most: int = MAX_BODY) -> list[Frame]:
    """All frames of a stream that carries ``data``."""
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    frames = []
    while (frame := await read_frame(reader, most)) is not None:
        frames.append(frame)
    return frames


@pytest.mark.parametrize(("kind", "message"), EXAMPLES)
async def test_round_trip(kind: Kind, message: Message) -> None:
    """A message comes out of its frame as it went in, with its number and direction."""
    [frame] = await heard(message.frame(kind, 77))
    assert (frame.kind, frame.is_reply, frame.number) == (kind, False, 77)
    assert type(message).parse(frame.body) == message
    [reply] = await heard(message.frame(kind, 1, is_reply=True))
    assert reply.is_reply


async def test_every_cut_of_a_stream_is_noticed() -> None:
    """A stream that ends inside a frame is an error; at the border of two it is just the end."""
    data = HELLO.frame(Kind.HELLO, 1)
    for cut in range(len(data)):
        if cut == 0:
            assert await heard(b"") == []
        else:
            with pytest.raises(IntegrityError):
                await heard(data[:cut])
    assert len(await heard(data + data)) == 2


async def test_a_size_over_the_limit_is_refused_before_it_is_read() -> None:
    """What is announced is bounded, more tightly for somebody who has not said who he is."""
    huge = encode_frame(Kind.STAT, 1, {})[: PREFIX_BYTES - 4] + (MAX_BODY + 1).to_bytes(4, "big")
    with pytest.raises(IntegrityError, match="over the limit"):
        await heard(huge)
    large = encode_frame(Kind.HELLO, 1, {"x": bytes(FIRST_BODY)})
    with pytest.raises(IntegrityError, match="over the limit"):
        await heard(large, FIRST_BODY)
    with pytest.raises(ValueError, match="over the limit"):
        encode_frame(Kind.STAT, 1, {"x": bytes(MAX_BODY)})


@given(st.binary(max_size=40))
def test_no_prefix_crashes(data: bytes) -> None:
    """Any bytes are a prefix of this version or an IntegrityError."""
    try:
        kind, _, number, size = decode_prefix(data)
    except IntegrityError:
        return
    assert kind in Kind
    assert number < 1 << 32
    assert size <= MAX_BODY


@given(st.sampled_from(list(messages.REQUESTS.values())), st.binary(max_size=200))
def test_no_bytes_crash(kind: type[Message], data: bytes) -> None:
    """Any bytes are a message of the kind asked for or an IntegrityError."""
    try:
        message = kind.parse(data)
    except IntegrityError:
        return
    assert type(message) is kind


_values: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary()
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@given(st.data())
def test_no_fields_crash(data: st.DataObject) -> None:
    """Well-formed msgpack of any shape, the right field names included, is checked, not believed:
    what passes is what the message declares."""
    kind = data.draw(st.sampled_from([*messages.REQUESTS.values(), *messages.REPLIES.values()]))
    names = st.sampled_from([*kind.model_fields, "another"])
    fields = data.draw(st.dictionaries(names, _values, max_size=6))
    body = msgpack.packb(fields)
    try:
        message = kind.parse(body)
    except IntegrityError:
        return
    assert kind.model_validate(dict(message)) == message
    assert set(fields) == set(kind.model_fields)


@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * 5000 + b"\x01",
        msgpack.packb({"names": [[None] * 200] * 100}),
        msgpack.packb({"names": [None] * (1 << 15)}),
        msgpack.packb({"names": [{}] * 10}),
        msgpack.packb({str(n): n for n in range(100)}),
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc7\x03\x05abc",
        b"\xd6\xff\x00\x00\x00\x00",
        msgpack.packb([1, 2]),
        msgpack.packb({1: 2}),
        msgpack.packb({"a": 1}) + b"\x01",
        b"",
    ],
)
def test_hostile_bodies(body: bytes) -> None:
    """Deep nesting, more values than any request has, sizes that are not there, extension types,
    trailing bytes: all are refused."""
    with pytest.raises(IntegrityError):
        decode_body(body, FEW_VALUES)


def test_errors_repeat_no_value() -> None:
    """A refused field is named; what was in it (a token, say) is not repeated."""
    body = msgpack.packb({"client": "c", "token": "hunter2-hunter2", "offers": []})
    with pytest.raises(IntegrityError, match="token") as caught:
        messages.Hello.parse(body)
    assert "hunter2" not in str(caught.value)
