"""What travels over a lane of the tcp transport, on a real pair of sockets."""

from __future__ import annotations

import hashlib
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from cacheflow.errors import IntegrityError
from cacheflow.storage_backends.pool import lane
from cacheflow.storage_backends.pool.lane import Operation, Status

if TYPE_CHECKING:
    from collections.abc import Iterator

DATA = hashlib.shake_256(b"data").digest(300_000)


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The client's end and the store's."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for each in (ours, theirs):
            lane.prepare(each, 10.0)
        yield ours, theirs


def test_what_goes_before_bytes_is_whole_cache_lines() -> None:
    """The kernel copies what follows a record to where the record ends: never askew."""
    sizes = [
        len(lane.greeting(bytes(lane.SECRET_BYTES))),
        len(lane.pack_request(Operation.WRITE, 1, 2, 3)),
        len(lane.pack_reply(Status.OK, 1)),
    ]
    assert [size % 64 for size in sizes] == [0, 0, 0]


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 10_000])
def test_a_reply_in_pieces_is_put_together(cut: int) -> None:
    """Wherever a call comes back with less than everything (here: a limit that passes while the
    rest is not sent yet): the status, and the bytes where they belong."""
    stream = lane.pack_reply(Status.OK, len(DATA)) + DATA
    view = memoryview(bytearray(len(DATA)))
    with pair() as (ours, theirs):
        theirs.sendall(stream[:cut])
        receive = lane.receive

        def rest_comes(connection: socket.socket, part: memoryview) -> None:
            if sender.ident is None:
                sender.start()
                lane.prepare(ours, 10.0)
            receive(connection, part)

        sender = threading.Thread(target=theirs.sendall, args=(stream[cut:],))
        lane.prepare(ours, 0.05)
        with mock.patch.object(lane, "receive", rest_comes):
            assert lane.receive_reply(ours, view) is Status.OK
        sender.join()
    assert view == DATA


def test_a_denial_touches_nothing() -> None:
    """A lane that ends with a denial: its status, and the memory is as it was."""
    with pair() as (ours, theirs):
        lane.send(theirs, lane.pack_reply(Status.DENIED, 0))
        theirs.shutdown(socket.SHUT_WR)
        view = memoryview(bytearray(b"\xee" * 1000))
        assert lane.receive_reply(ours, view) is Status.DENIED
        assert view == b"\xee" * 1000


def test_what_is_no_reply_is_an_error() -> None:
    """Other bytes, another length, an end in the middle, nothing at all for too long."""
    whole = lane.pack_reply(Status.OK, 1000)
    for stream, error in [
        (b"X" + whole[1:] + bytes(1000), IntegrityError),
        (lane.pack_reply(Status.OK, 999) + bytes(1000), IntegrityError),
        (whole[:10], ConnectionError),
        (whole + bytes(999), ConnectionError),
        (b"", ConnectionError),
    ]:
        with pair() as (ours, theirs):
            theirs.sendall(stream)
            theirs.shutdown(socket.SHUT_WR)
            with pytest.raises(error):
                lane.receive_reply(ours, memoryview(bytearray(1000)))
    with pair() as (ours, theirs):
        lane.prepare(ours, 0.01)
        with pytest.raises(TimeoutError):
            lane.receive_reply(ours, memoryview(bytearray(10)))
