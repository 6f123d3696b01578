"""The dram backend beyond the contract: capacity, memory that readers still use, soak."""

from __future__ import annotations

import asyncio
import random

import pytest

from cacheflow.errors import CapacityError, ConfigError
from cacheflow.memory import buffer_from
from cacheflow.storage_backends.dram import DramBackend
from cacheflow.testing.objects import aligned_buffer, make_object
from cacheflow.testing.storage_harness import store_all
from cacheflow.types import Extent, Read, TransferStatus, Write

SIZE = len(make_object(0).data)


async def test_what_does_not_fit_names_the_option() -> None:
    """FULL carries a CapacityError that says how much there is and which option to raise; an
    object larger than everything is FULL as well."""
    for capacity in (SIZE, SIZE // 2):
        backend = await DramBackend.open({"capacity_bytes": capacity})
        writes = [make_object(number).write() for number in range(2)]
        result = (await backend.store(writes))[1]
        assert result.status is TransferStatus.FULL
        assert isinstance(result.error, CapacityError)
        assert "option capacity_bytes" in str(result.error)
        assert all(part.hold.in_flight == 0 for write in writes for part in write.parts)
        await backend.aclose()


async def test_memory_comes_back() -> None:
    """After hundreds of stores, replacements, cancelled loads and deletes the free bytes are what
    they were."""
    backend = await DramBackend.open({"capacity_bytes": 8 * SIZE})
    pick = random.Random(7)
    for round_ in range(300):
        objects = [make_object(pick.randrange(6), pick.randrange(3)) for _ in range(2)]
        await backend.store([each.write() for each in objects])
        load = backend.load([Read(o.key, 0, aligned_buffer(SIZE)) for o in objects])
        if round_ % 3:
            await anext(load)
        await load.aclose()
        if round_ % 2:
            await backend.delete([objects[0].key])
    await backend.delete([make_object(number).key for number in range(6)])
    assert await backend.used_bytes() == 0
    assert await backend._threads.aclose(10.0)  # what was still copying has ended
    await asyncio.sleep(0)
    assert backend._arena.free_bytes == backend._arena.capacity
    await backend.aclose()


async def test_what_is_lent_again_is_what_is_there() -> None:
    """The same range of an object or another one, before and after it was replaced."""
    backend = await DramBackend.open({"capacity_bytes": 8 * SIZE})
    loans = []
    for version in range(3):
        stored = make_object(1, version)
        await backend.store([stored.write()])
        for first, nbytes in ((0, SIZE), (0, SIZE), (512, 100), (0, 100), (512, 100)):
            loan = backend.borrow([Extent(stored.key, first, nbytes)])
            loans.append((loan, stored.data[first : first + nbytes]))
    for loan, data in loans:
        [part] = loan.parts
        assert part.buffer is not None
        assert bytes(part.buffer.view or b"") == data
        assert part.buffer.hold.in_flight
    for loan, _ in loans:
        loan.release()
    buffers = [part.buffer for loan, _ in loans for part in loan.parts]
    assert not any(buffer.hold.in_flight for buffer in buffers if buffer is not None)
    await backend.aclose()


async def test_parts_must_be_the_object() -> None:
    """Parts that are not as long as the object they are said to be are refused at once."""
    backend = await DramBackend.open({"capacity_bytes": 1 << 20})
    stored = make_object(1)
    part = buffer_from(stored.data[:-1])
    with pytest.raises(ValueError, match=str(SIZE)):
        await backend.store([Write(stored.info, (part,))])
    assert part.hold.in_flight == 0
    await store_all(backend, stored)
    await backend.aclose()


async def test_options_are_checked() -> None:
    """Unknown and impossible options are ConfigErrors that name them."""
    for options, name in (({"capacity_bytes": 0}, "capacity_bytes"), ({"size": 1}, "size")):
        with pytest.raises(ConfigError, match=f"'dram', option '{name}'"):
            await DramBackend.open(options)
