"""Orders arrive, in order, and a wait for them ends when it should."""

from __future__ import annotations

import threading
import time

from cacheflow.storage_backends.nixl.orders import Orders


def test_first_in_first_out() -> None:
    """All there are at once, in order; none is taken twice; those that come later are next."""
    orders: Orders[int] = Orders()
    for number in range(3):
        orders.put(number)
    assert orders.take(None) == [0, 1, 2]
    orders.put(3)
    assert orders.take(0.0) == [3]
    assert orders.take(0.0) == []


def test_an_order_ends_the_wait() -> None:
    """Whoever waits without a deadline is woken."""
    orders: Orders[str] = Orders()
    taken: list[str] = []

    def take() -> None:
        while not taken:
            taken.extend(orders.take(None))

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    orders.put("wake")
    thread.join(10)
    assert taken == ["wake"]


def test_a_short_wait_is_never_for_ever() -> None:
    """As with CPython's SimpleQueue, which waits without a deadline once the one it had has passed
    while it looked: there some thousand of these are enough."""

    def wait() -> None:
        for _ in range(5_000):
            orders: Orders[None] = Orders()
            orders.put(None)
            orders.take(None)  # what rang for it rings still
            orders.take(1e-9)
            orders.take(1e-9)

    threads = [threading.Thread(target=wait, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    give_up = time.monotonic() + 30
    for thread in threads:
        thread.join(max(0.0, give_up - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads)
