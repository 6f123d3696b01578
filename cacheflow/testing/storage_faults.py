"""Conformance: cancellation, holds, atomicity and closing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import pytest

from cacheflow.errors import ClosedError
from cacheflow.memory import InFlight
from cacheflow.testing.objects import aligned_buffer, make_object
from cacheflow.testing.storage_harness import (
    PATIENCE,
    BackendHarness,
    idle,
    load_all,
    step_and_cancel,
    store_all,
)
from cacheflow.types import Read, TransferStatus

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cacheflow.abc import StorageBackend
    from cacheflow.testing.objects import StoredObject

__all__ = ["FaultTests"]

_STEPS: Final = (*range(12), 16, 24, 40, 80, 160, 320)
"""Turns of the loop after which work is cancelled: every await, then ever deeper into the I/O."""


class FaultTests(BackendHarness):
    """The doc line of each test is the rule it checks."""

    async def test_cancelled_stores(self, tmp_path: Path) -> None:
        """A store cancelled at any await leaves each object whole or absent, no hold and nothing
        temporary; the store goes on working."""
        async with self.opened(tmp_path) as backend:
            for number, steps in enumerate(_STEPS):
                objects = [make_object(10 * number + each) for each in range(3)]
                hold = InFlight()
                writes = [each.write(hold=hold) for each in objects]
                await step_and_cancel(backend.store(writes), steps)
                await idle(hold)
                for each in objects:
                    await self._assert_whole_or_absent(backend, each)
                assert not await self.leftovers(backend)
                await store_all(backend, *objects)

    async def test_cancelled_replacement(self, tmp_path: Path) -> None:
        """A replacement cancelled at any await leaves the old object or the new one."""
        versions = [make_object(1, version) for version in range(len(_STEPS) + 1)]
        async with self.opened(tmp_path) as backend:
            await store_all(backend, versions[0])
            for number, steps in enumerate(_STEPS):
                hold = InFlight()
                write = versions[number + 1].write(hold=hold)
                await step_and_cancel(backend.store([write]), steps)
                await idle(hold)
                assert await self.bytes_of(backend, versions[0]) in {v.data for v in versions}
                [[info]] = await backend.lookup([versions[0].key.chunk])
                assert info in [each.info for each in versions]

    async def test_cancelled_loads(self, tmp_path: Path) -> None:
        """A load cancelled at any await releases every hold, queued reads included."""
        objects = [make_object(number) for number in range(8)]
        async with self.opened(tmp_path) as backend:
            await store_all(backend, *objects)
            for steps in _STEPS:
                hold = InFlight()
                reads = _whole_reads(objects, hold)
                await step_and_cancel(load_all(backend, reads), steps)
                await idle(hold)
            for each in objects:
                assert await self.bytes_of(backend, each) == each.data

    async def test_leaving_a_load_early(self, tmp_path: Path) -> None:
        """Closing the iterator after the first result abandons the rest; all holds are released."""
        objects = [make_object(number) for number in range(8)]
        async with self.opened(tmp_path) as backend:
            await store_all(backend, *objects)
            hold = InFlight()
            results: Any = backend.load(_whole_reads(objects, hold))
            first = await anext(results)
            assert first.status is TransferStatus.OK
            await results.aclose()
            await idle(hold)

    async def test_holds_are_taken_before_the_first_await(self, tmp_path: Path) -> None:
        """After the first step of a load or a store every buffer of the batch is held."""
        objects = [make_object(number) for number in range(8)]
        async with self.opened(tmp_path) as backend:
            with self.pause(backend):
                hold = InFlight()
                writes = [each.write(hold=hold) for each in objects]
                store = asyncio.ensure_future(backend.store(writes))
                await asyncio.sleep(0)
                assert hold.in_flight >= len(objects)
            await store
            assert hold.in_flight == 0
            with self.pause(backend):
                load = asyncio.ensure_future(load_all(backend, _whole_reads(objects, hold)))
                await asyncio.sleep(0)
                assert hold.in_flight >= len(objects)
            await load
            assert hold.in_flight == 0

    async def test_a_hold_lasts_as_long_as_the_read(self, tmp_path: Path) -> None:
        """Cancelling a load does not release a buffer that running I/O may still write; I/O that
        cancelling ends holds nothing any more."""
        stored = make_object(1)
        async with self.opened(tmp_path) as backend:
            await store_all(backend, stored)
            hold = InFlight()
            with self.pause(backend) as pause:
                load = asyncio.ensure_future(load_all(backend, _whole_reads([stored], hold)))
                await pause.until_began()
                load.cancel()
                await asyncio.wait([load], timeout=PATIENCE)
                assert load.cancelled()
                assert hold.in_flight == (0 if pause.abortable else 1)
            await idle(hold)

    async def test_a_hold_lasts_as_long_as_the_write(self, tmp_path: Path) -> None:
        """Cancelling a store does not release memory that running I/O may still read; I/O that
        cancelling ends holds nothing any more."""
        stored = make_object(1)
        async with self.opened(tmp_path) as backend:
            hold = InFlight()
            with self.pause(backend) as pause:
                store = asyncio.ensure_future(backend.store([stored.write(hold=hold)]))
                await pause.until_began()
                store.cancel()
                await asyncio.wait([store], timeout=PATIENCE)
                assert store.cancelled()
                assert (hold.in_flight > 0) is not pause.abortable
            await idle(hold)
            await self._assert_whole_or_absent(backend, stored)

    async def test_an_object_is_invisible_until_complete(self, tmp_path: Path) -> None:
        """While an object is being written nobody sees it, or they see the one it replaces."""
        old, new, fresh = make_object(1), make_object(1, version=1), make_object(2)
        async with self.opened(tmp_path) as backend:
            await store_all(backend, old)
            with self.pause(backend) as pause:
                store = asyncio.ensure_future(backend.store([new.write(), fresh.write()]))
                await pause.until_began()
                found = await backend.lookup([old.key.chunk, fresh.key.chunk])
                assert found == [[old.info], []]
                assert [info async for info in backend.scan()] == [old.info]
                assert await self.raw_get(backend, fresh.key) is None
                assert await self.raw_get(backend, old.key) == old.data
            await store
            found = await backend.lookup([old.key.chunk, fresh.key.chunk])
            assert found == [[new.info], [fresh.info]]

    async def test_replacing_under_readers(self, tmp_path: Path) -> None:
        """Readers of an object that is replaced over and over get one version, never a mixture."""
        versions = [make_object(1, version) for version in range(12)]
        allowed = {each.data for each in versions}
        async with self.opened(tmp_path) as backend:
            await store_all(backend, versions[0])

            async def read() -> None:
                for _ in range(12):
                    assert await self.bytes_of(backend, versions[0]) in allowed

            async with asyncio.TaskGroup() as group:
                for _ in range(4):
                    group.create_task(read())
                for each in versions:
                    await store_all(backend, each)
            assert await self.bytes_of(backend, versions[-1]) == versions[-1].data

    async def test_deleting_under_readers(self, tmp_path: Path) -> None:
        """A read that runs while its object is deleted gives the old bytes or MISSING."""
        stored = make_object(1)
        async with self.opened(tmp_path) as backend:
            await store_all(backend, stored)
            [read] = _whole_reads([stored], InFlight())
            with self.pause(backend) as pause:
                load = asyncio.ensure_future(load_all(backend, [read]))
                await pause.until_began()
                assert await backend.delete([stored.key]) == [True]
                assert await backend.lookup([stored.key.chunk]) == [[]]
            [result] = await load
            if result.status is TransferStatus.OK:
                assert bytes(read.buffer.view or b"") == stored.data
            else:
                assert result.status is TransferStatus.MISSING

    async def test_closed_is_closed(self, tmp_path: Path) -> None:
        """After closing (twice does no harm) every method raises ClosedError and holds nothing."""
        stored, hold = make_object(1), InFlight()
        backend = await self.open_backend(tmp_path)
        await store_all(backend, stored)
        await backend.aclose()
        await backend.aclose()
        calls = [
            backend.lookup([stored.key.chunk]),
            load_all(backend, _whole_reads([stored], hold)),
            backend.store([stored.write(hold=hold)]),
            backend.delete([stored.key]),
            _list(backend),
            backend.used_bytes(),
        ]
        for call in calls:
            with pytest.raises(ClosedError):
                await call
        assert hold.in_flight == 0

    async def test_closing_is_bounded(self, tmp_path: Path) -> None:
        """Closing ends soon with I/O hung: whoever awaits it gets ClosedError, what was queued is
        let go, and hung buffers stay held until their I/O ends."""
        objects = [make_object(number) for number in range(40)]
        backend = await self.open_backend(tmp_path)
        try:
            await store_all(backend, *objects)
            hold = InFlight()
            with self.pause(backend) as pause:
                load = asyncio.ensure_future(load_all(backend, _whole_reads(objects, hold)))
                await pause.until_began()
                await asyncio.wait_for(backend.aclose(), 10.0)
                await asyncio.wait([load], timeout=PATIENCE)
                assert isinstance(load.exception(), ClosedError)
                assert (hold.in_flight > 0) is not pause.abortable
                assert hold.in_flight < len(objects)
            await idle(hold)
        finally:
            await backend.aclose()

    async def _assert_whole_or_absent(self, backend: StorageBackend, stored: StoredObject) -> None:
        raw = await self.raw_get(backend, stored.key)
        [found] = await backend.lookup([stored.key.chunk])
        if raw is None and found:  # cancelling does not call back what a server was asked for
            raw = await self.raw_get(backend, stored.key)
        if raw is None:
            assert not found
        else:
            assert raw == stored.data
            assert list(found) == [stored.info]


def _whole_reads(objects: Sequence[StoredObject], hold: InFlight) -> list[Read]:
    return [Read(each.key, 0, aligned_buffer(len(each.data), hold)) for each in objects]


async def _list(backend: StorageBackend) -> list[object]:
    return [info async for info in backend.scan()]
