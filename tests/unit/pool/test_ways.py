"""Which transports a store is offered."""

from __future__ import annotations

from cacheflow.storage_backends.pool.ways import Ways


def test_the_best_first() -> None:
    """All of them, in the order given, until something goes wrong."""
    assert Ways(["nixl", "tcp"]).offered(0.0) == ["nixl", "tcp"]


def test_two_fruitless_links_set_a_transport_aside() -> None:
    """For a minute; then it is offered again, and one more chance is not enough to lose it."""
    ways = Ways(["nixl", "tcp"])
    assert not ways.failed("nixl", 1.0)
    assert ways.offered(1.0) == ["nixl", "tcp"]
    assert ways.failed("nixl", 2.0)
    assert ways.offered(2.0) == ways.offered(61.9) == ["tcp"]
    assert ways.offered(62.0) == ["nixl", "tcp"]
    assert not ways.failed("nixl", 63.0)
    assert ways.offered(63.0) == ["nixl", "tcp"]


def test_what_has_delivered_is_not_set_aside() -> None:
    """However often stores die under a link that was of use."""
    ways = Ways(["nixl", "tcp"])
    ways.failed("nixl", 0.0)
    for second in range(10):
        assert not ways.failed("nixl", float(second), delivered=True)
    assert not ways.failed("nixl", 10.0)
    assert ways.offered(10.0) == ["nixl", "tcp"]


def test_something_is_always_offered() -> None:
    """With every transport set aside all are tried; of a single one nothing is made."""
    ways = Ways(["nixl", "tcp"])
    for name in ("nixl", "nixl", "tcp", "tcp"):
        ways.failed(name, 0.0)
    assert ways.offered(1.0) == ["nixl", "tcp"]
    only = Ways(["tcp"])
    assert [only.failed("tcp", 0.0) for _ in range(4)] == [False] * 4
    assert only.offered(1.0) == ["tcp"]
