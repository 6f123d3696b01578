"""Virtual time and modelled links: order of events, serial transfers, shared pipes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheflow.simulation.events import EventLoop
from cacheflow.simulation.links import SerialLink, SharedPipe, Transfer
from cacheflow.types import Load, Span


def transfer(nbytes: int) -> Transfer:
    return Transfer(Load(1, "r", "link", 0, Span(0, 1), (0,), nbytes), ok=True)


def test_events_of_a_moment_happen_in_the_order_asked_for() -> None:
    """Time first, then order; an event in the past happens at once and time never goes back."""
    loop, seen = EventLoop(), []

    def note(name: str) -> None:
        seen.append((name, loop.now()))
        if name == "b":
            loop.at(1.0, note, "late")

    for when, name in ((2.0, "b"), (1.0, "a"), (2.0, "c")):
        loop.at(when, note, name)
    assert loop.step()
    loop.run(limit=1.5)
    assert seen == [("a", 1.0)]
    loop.run()
    assert seen == [("a", 1.0), ("b", 2.0), ("late", 2.0), ("c", 2.0)]
    assert not loop.step()


def test_a_serial_link_queues_and_hides_latency() -> None:
    """Loads follow each other without a gap; each is there one latency after its last byte."""
    loop, ends = EventLoop(), []
    link = SerialLink(loop, 100.0, 0.5)
    for nbytes in (100, 200):
        link.send(transfer(nbytes), lambda t: ends.append((t.start, t.stop, loop.now())))
    loop.run()
    assert ends == [(0.0, 1.0, 1.5), (1.0, 3.0, 3.5)]


def test_a_link_may_drift() -> None:
    """`speed` scales the bandwidth from the moment a load's bytes begin to flow."""
    loop, ends = EventLoop(), []
    link = SerialLink(loop, 100.0, speed=lambda now: 0.5 if now >= 1 else 1.0)
    for _ in range(2):
        link.send(transfer(100), lambda t: ends.append(t.stop))
    loop.run()
    assert ends == [1.0, 3.0]


def test_a_shared_pipe_splits_evenly() -> None:
    """Two nodes that send get half each; when one is done the other has all of it."""
    loop, ends = EventLoop(), []
    pipe = SharedPipe(loop, 100.0)
    for nbytes in (100, 200):
        pipe.port().send(transfer(nbytes), lambda t: ends.append((t.load.nbytes, loop.now())))
    loop.run()
    assert [nbytes for nbytes, _ in ends] == [100, 200]
    assert [when for _, when in ends] == pytest.approx([2.0, 3.0])


def test_a_port_has_its_own_limit() -> None:
    """One node alone gets no more than its own link, with others its share."""
    loop, ends = EventLoop(), []
    pipe = SharedPipe(loop, 100.0, 0.25, port_bandwidth=50.0)
    port = pipe.port()
    port.send(transfer(100), lambda t: ends.append((t.start, t.stop, loop.now())))
    port.send(transfer(50), lambda t: ends.append((t.start, t.stop, loop.now())))
    loop.run()
    assert ends == [pytest.approx((0.0, 2.0, 2.25)), pytest.approx((2.0, 3.0, 3.25))]


@given(
    sends=st.lists(
        st.tuples(st.floats(0, 5), st.integers(0, 3), st.integers(1, 500)), min_size=1, max_size=20
    )
)
def test_a_shared_pipe_is_never_faster_than_its_bandwidth(
    sends: list[tuple[float, int, int]],
) -> None:
    """All bytes arrive, each port in its own order, and no sooner than the pipe could carry them;
    while anything is sent the pipe is not idle."""
    loop, arrived = EventLoop(), []
    pipe = SharedPipe(loop, 100.0)
    ports = [pipe.port() for _ in range(4)]

    def send(what: tuple[int, Transfer]) -> None:
        index, each = what
        ports[index].send(each, lambda t: arrived.append((index, t)))

    asked = [(when, index, transfer(nbytes)) for when, index, nbytes in sends]
    for when, index, each in asked:
        loop.at(when, send, (index, each))
    loop.run()
    assert len(arrived) == len(sends)
    first, total = min(when for when, _, _ in sends), sum(nbytes for _, _, nbytes in sends)
    assert loop.now() >= first + total / 100.0 - 1e-6
    assert loop.now() <= max(when for when, _, _ in sends) + total / 100.0 + 1e-6
    for index in range(4):
        own = [t for i, t in arrived if i == index]
        assert own == [t for _, i, t in sorted(asked, key=lambda s: s[0]) if i == index]


@pytest.mark.parametrize("bandwidth", [0.0, -1.0])
def test_bandwidth_must_be_positive(bandwidth: float) -> None:
    """A link without bandwidth would never deliver."""
    with pytest.raises(ValueError, match="positive"):
        SerialLink(EventLoop(), bandwidth)
    with pytest.raises(ValueError, match="positive"):
        SharedPipe(EventLoop(), bandwidth)
