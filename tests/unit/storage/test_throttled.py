"""The throttled link: exact pacing in virtual time, sharing, abandonment."""

from __future__ import annotations

import asyncio
import selectors
from typing import TYPE_CHECKING, Any

import pytest

from cacheflow.errors import ConfigError
from cacheflow.storage_backends.throttled import Link, ThrottledBackend
from cacheflow.testing.objects import aligned_buffer, load_one, make_object, object_key
from cacheflow.testing.storage import MemoryBackend
from cacheflow.types import Read, TransferStatus

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from cacheflow.types import ObjectKey, TransferResult

KIB, MIB = 1 << 10, 1 << 20


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time stands still while anything is ready, and else jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__(_Jumping(self))
        self.now = 1000.0

    def time(self) -> float:
        return self.now


class _Jumping(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing can ever happen"
        self.loop.now += timeout
        return super().select(0)


def run(work: Coroutine[object, object, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work)


def now() -> float:
    return asyncio.get_running_loop().time()


def behind(link: Link, nbytes: int) -> tuple[ThrottledBackend, ObjectKey]:
    """A backend behind ``link`` that holds one object of ``nbytes``."""
    inner = MemoryBackend()
    key = object_key(1)
    inner.objects[key] = bytearray(nbytes)
    return ThrottledBackend(inner, link), key


async def load(backend: ThrottledBackend, *reads: Read) -> list[tuple[float, TransferResult]]:
    start = now()
    return [(now() - start, result) async for result in backend.load(reads)]


@pytest.mark.parametrize("bandwidth", [2e6, 25e6, 200e6])
@pytest.mark.parametrize("nbytes", [100 * KIB, MIB, 8 * MIB])
def test_sustained_throughput_is_nominal(bandwidth: float, nbytes: int) -> None:
    """Two users who keep the link busy get together what it is worth, for any size and speed."""

    async def user(backend: ThrottledBackend, key: ObjectKey) -> None:
        buffer = aligned_buffer(nbytes)
        for _ in range(20):
            await load(backend, Read(key, 0, buffer))

    async def main() -> None:
        backend, key = behind(Link(bandwidth), nbytes)
        start = now()
        async with asyncio.TaskGroup() as group:
            for _ in range(2):
                group.create_task(user(backend, key))
        assert 40 * nbytes / (now() - start) == pytest.approx(bandwidth, rel=1e-6)

    run(main())


def test_a_read_takes_latency_queue_and_transfer() -> None:
    """A batch is served in its order: each read ends after latency, what was queued before it, and
    its own bytes; the result says so too."""

    async def main() -> None:
        backend, key = behind(Link(1e6, 0.5), 10_000_000)
        sizes = [1_000_000, 2_000_000, 500_000]
        reads = [Read(key, 0, aligned_buffer(size)) for size in sizes]
        ended = await load(backend, *reads)
        assert [at for at, _ in ended] == pytest.approx([1.5, 3.5, 4.0])
        assert [result.request for _, result in ended] == reads
        assert [result.seconds for _, result in ended] == pytest.approx([1.5, 3.5, 4.0])

    run(main())


def test_users_of_one_link_share_it() -> None:
    """Two backends behind one link take turns on it; behind a link each they do not."""

    async def seconds(*links: Link) -> float:
        start = now()
        async with asyncio.TaskGroup() as group:
            for link in links:
                backend, key = behind(link, 1_000_000)
                group.create_task(load(backend, Read(key, 0, aligned_buffer(1_000_000))))
        return now() - start

    async def main() -> None:
        link = Link(1e6)
        assert await seconds(link, link) == pytest.approx(2.0)
        assert await seconds(Link(1e6), Link(1e6)) == pytest.approx(1.0)

    run(main())


def test_directions_are_separate() -> None:
    """Stores are paced, and do not slow loads down."""

    async def main() -> None:
        stored = make_object(1)
        size = len(stored.data)
        backend = ThrottledBackend(MemoryBackend(), Link(size))
        start = now()
        [result] = await backend.store([stored.write()])
        assert now() - start == pytest.approx(1.0)
        assert result.seconds == pytest.approx(1.0)
        start = now()
        await asyncio.gather(
            backend.store([make_object(2).write()]), load_one(backend, stored.key, 0, size)
        )
        assert now() - start == pytest.approx(1.0)

    run(main())


def test_directions_may_share_the_bandwidth() -> None:
    """Where they do a load queues behind the store that came before."""

    async def main() -> None:
        stored = make_object(1)
        size = len(stored.data)
        backend = ThrottledBackend(MemoryBackend(), Link(size, duplex=False))
        await backend.store([stored.write()])
        start = now()
        await asyncio.gather(
            backend.store([make_object(2).write()]), load_one(backend, stored.key, 0, size)
        )
        assert now() - start == pytest.approx(2.0)

    run(main())


def test_an_abandoned_load_leaves_the_queue() -> None:
    """Reads of a cancelled load that had not begun cost the next user nothing; the one on the wire
    goes on to its end."""

    async def main() -> None:
        backend, key = behind(Link(1e6), 1_000_000)
        reads = [Read(key, 0, aligned_buffer(1_000_000)) for _ in range(50)]
        task = asyncio.ensure_future(load(backend, *reads))
        await asyncio.sleep(2.25)
        task.cancel()
        await asyncio.wait([task])
        assert all(read.buffer.hold.in_flight == 0 for read in reads)
        [(seconds, _)] = await load(backend, Read(key, 0, aligned_buffer(1_000_000)))
        assert seconds == pytest.approx(0.75 + 1.0)

    run(main())


def test_an_idle_link_saves_nothing_up() -> None:
    """Time that passes unused is gone: the next read is as slow as the first."""

    async def main() -> None:
        backend, key = behind(Link(1e6), 1_000_000)
        for _ in range(2):
            [(seconds, _)] = await load(backend, Read(key, 0, aligned_buffer(1_000_000)))
            assert seconds == pytest.approx(1.0)
            await asyncio.sleep(30)

    run(main())


def test_a_slow_store_holds_up_only_its_own_read() -> None:
    """The inner store works while the link paces; its slow read does not delay the results of
    others that are there."""

    async def main() -> None:
        backend, key = behind(Link(1e6), 1_000_000)
        slow = asyncio.ensure_future(_slowly(backend, key))
        await asyncio.sleep(0)
        [(seconds, _)] = await load(backend, Read(key, 1, aligned_buffer(500_000)))
        assert seconds == pytest.approx(1.0)
        assert await slow == pytest.approx(7.0)

    async def _slowly(backend: ThrottledBackend, key: ObjectKey) -> float:
        async def wait(read: Read) -> None:
            if read.offset == 0:
                await asyncio.sleep(7)

        assert isinstance(backend.inner, MemoryBackend)
        backend.inner.before_read = wait
        [(seconds, _)] = await load(backend, Read(key, 0, aligned_buffer(500_000)))
        return seconds

    run(main())


def test_a_miss_occupies_nothing() -> None:
    """A read of an absent object gives its place in the queue back."""

    async def main() -> None:
        backend, key = behind(Link(1e6), 1_000_000)
        reads = [Read(key, 0, aligned_buffer(1_000_000))]
        reads += [Read(object_key(9), 0, aligned_buffer(1_000_000)) for _ in range(20)]
        reads += [Read(key, 0, aligned_buffer(1_000_000))]
        ended = await load(backend, *reads)
        statuses = [result.status for _, result in ended]
        assert statuses.count(TransferStatus.MISSING) == 20
        assert ended[-1][0] == pytest.approx(2.0)

    run(main())


def test_lookups_pay_the_latency() -> None:
    """A lookup over a slow link takes its latency, as a request to a remote store does."""

    async def main() -> None:
        backend, _ = behind(Link(0.0, 0.25), 1)
        backend.inner.objects.clear()  # type: ignore[attr-defined]
        start = now()
        assert await backend.lookup([object_key(3).chunk]) == [[]]
        assert now() - start == pytest.approx(0.25)

    run(main())


def test_an_error_of_the_inner_store_comes_through() -> None:
    """What the inner backend raises ends the load, and nothing stays held."""

    async def main() -> None:
        backend, key = behind(Link(1e6), 1000)

        async def broken(read: Read) -> None:
            raise RuntimeError("broken")

        assert isinstance(backend.inner, MemoryBackend)
        backend.inner.before_read = broken
        read = Read(key, 0, aligned_buffer(1000))
        with pytest.raises(RuntimeError, match="broken"):
            await load(backend, read)
        assert read.buffer.hold.in_flight == 0

    run(main())


async def test_options_open_the_inner_backend() -> None:
    """The registry's name and options of the inner backend, bandwidth and latency; what is wrong
    is a ConfigError that names it."""
    options: dict[str, object] = {
        "inner": "dram",
        "inner_options": {"capacity_bytes": 1 << 20},
        "bandwidth": 1e9,
        "latency": 0.001,
    }
    backend = await ThrottledBackend.open(options)
    assert (backend.link.bandwidth, backend.link.latency) == (1e9, 0.001)
    assert backend.inner.name == "dram"
    await backend.aclose()
    for wrong, name in (
        ({"bandwidth": -1}, "bandwidth"),
        ({"latency": float("nan")}, "latency"),
        ({"inner": "no such"}, "no such"),
        ({"inner_options": {"colour": 1}}, "colour"),
        ({"speed": 1}, "speed"),
    ):
        with pytest.raises(ConfigError, match=name):
            await ThrottledBackend.open(options | wrong)


async def test_a_shared_inner_store_is_not_closed() -> None:
    """Links in front of one store can be closed one by one; the store stays open."""
    inner = MemoryBackend()
    await ThrottledBackend(inner, Link()).aclose()
    assert await inner.used_bytes() == 0
