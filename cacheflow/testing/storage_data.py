"""Conformance: what is stored is what is read, ranges, batches, misses, damage, accounting."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from cacheflow.memory import buffer_from
from cacheflow.testing.objects import aligned_buffer, load_one, make_object, object_key
from cacheflow.testing.storage_harness import BackendHarness, load_all, store_all
from cacheflow.types import Read, Span, TransferStatus

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["DataTests"]


class DataTests(BackendHarness):
    """The doc line of each test is the rule it checks."""

    async def test_round_trip(self, tmp_path: Path) -> None:
        """A stored object is looked up with the info it was stored with, and read byte for byte."""
        stored = make_object(1)
        async with self.opened(tmp_path) as backend:
            await store_all(backend, stored)
            assert await backend.lookup([stored.key.chunk]) == [[stored.info]]
            assert await self.bytes_of(backend, stored) == stored.data
            assert await self.raw_get(backend, stored.key) == stored.data

    @pytest.mark.parametrize("split", [1, 4096, 5000, 28671])
    async def test_parts_of_any_size_and_alignment(self, tmp_path: Path, split: int) -> None:
        """An object may be given in parts of any length, in memory of any alignment."""
        stored = make_object(1)
        async with self.opened(tmp_path) as backend:
            [result] = await backend.store([stored.write(split=split)])
            assert (result.status, result.nbytes) == (TransferStatus.OK, len(stored.data))
            assert await self.bytes_of(backend, stored) == stored.data

    @pytest.mark.parametrize(
        ("offset", "nbytes"),
        [(0, 4096), (4096, 8192), (8192, 4096), (1, 1), (4095, 2), (123, 5000), (28671, 1)],
    )
    async def test_ranged_reads(self, tmp_path: Path, offset: int, nbytes: int) -> None:
        """Any byte range is read, page-aligned or not, and nothing around the buffer is touched."""
        stored = make_object(1)
        async with self.opened(tmp_path) as backend:
            self._need_ranges(backend.capabilities.ranged_reads)
            await store_all(backend, stored)
            _, data = await load_one(backend, stored.key, offset, nbytes)
            assert data == stored.data[offset : offset + nbytes]
            memory = memoryview(bytearray(b"\xee" * (nbytes + 64)))
            read = Read(stored.key, offset, buffer_from(memory[32 : 32 + nbytes]))
            [result] = await load_all(backend, [read])
            assert (result.status, result.nbytes) == (TransferStatus.OK, nbytes)
            expected = stored.data[offset : offset + nbytes]
            assert bytes(memory) == b"\xee" * 32 + expected + b"\xee" * 32

    async def test_a_miss_is_a_value(self, tmp_path: Path) -> None:
        """Absent objects are an empty lookup, a MISSING read and a False delete: no exception."""
        absent = object_key(1)
        async with self.opened(tmp_path) as backend:
            assert await backend.lookup([absent.chunk]) == [[]]
            result, _ = await load_one(backend, absent, 0, 4096)
            assert (result.status, result.nbytes) == (TransferStatus.MISSING, 0)
            assert await backend.delete([absent]) == [False]
            assert [info async for info in backend.scan()] == []
            assert await backend.used_bytes() == 0

    async def test_reading_over_the_end_is_short(self, tmp_path: Path) -> None:
        """A range that reaches over the end gives SHORT with the bytes there are; one behind the
        end gives SHORT with none."""
        stored = make_object(1)
        size = len(stored.data)
        async with self.opened(tmp_path) as backend:
            self._need_ranges(backend.capabilities.ranged_reads)
            await store_all(backend, stored)
            for offset in (size - 4096, size - 100):
                result, data = await load_one(backend, stored.key, offset, 8192)
                assert result.status is TransferStatus.SHORT
                assert data == stored.data[offset:]
            for offset in (size, size + 4096, 1 << 40):
                result, data = await load_one(backend, stored.key, offset, 4096)
                assert (result.status, data) == (TransferStatus.SHORT, b"")

    async def test_a_negative_offset_is_refused(self, tmp_path: Path) -> None:
        """A read that no object could answer is a ValueError, with nothing held or read."""
        stored = make_object(1)
        async with self.opened(tmp_path) as backend:
            await store_all(backend, stored)
            buffer = aligned_buffer(4096)
            with pytest.raises(ValueError, match="-4096"):
                await load_all(backend, [Read(stored.key, -4096, buffer)])
            assert buffer.hold.in_flight == 0
            assert await self.bytes_of(backend, stored) == stored.data

    async def test_an_object_shortened_behind_the_back_is_short(self, tmp_path: Path) -> None:
        """An object that lost its tail is no longer looked up, and reads of the tail are SHORT."""
        stored = make_object(1)
        for keep in (20000, 8192, 5000):
            async with self.opened(tmp_path) as backend:
                await store_all(backend, stored)
                await self.damage(backend, stored, stored.data[:keep])
                result, data = await load_one(backend, stored.key, 4096, len(stored.data) - 4096)
                assert result.status is TransferStatus.SHORT
                assert data == stored.data[4096:keep]
                assert await backend.lookup([stored.key.chunk]) == [[]]

    async def test_a_backend_does_not_interpret_payloads(self, tmp_path: Path) -> None:
        """Payload bytes altered in the medium are delivered as they are: who loads verifies."""
        stored = make_object(1)
        damaged = bytearray(stored.data)
        damaged[9000] ^= 1
        async with self.opened(tmp_path) as backend:
            await store_all(backend, stored)
            await self.damage(backend, stored, bytes(damaged))
            assert await self.bytes_of(backend, stored) == damaged

    async def test_only_valid_objects_are_listed(self, tmp_path: Path) -> None:
        """Lookup and scan share one rule: an object whose header is damaged, whose size is wrong
        or which is another object than its name says is not listed, and the others are."""
        good, other = make_object(1), make_object(2)
        flipped = bytearray(good.data)
        flipped[100] ^= 4
        bad = [bytes(flipped), good.data + b"\0" * 4096, other.data, b"", b"x", b"\0" * 9000]
        for data in bad:
            async with self.opened(tmp_path) as backend:
                await store_all(backend, good, other)
                await self.damage(backend, good, data)
                chunks = [good.key.chunk, other.key.chunk]
                assert await backend.lookup(chunks) == [[], [other.info]], data[:16]
                assert [info async for info in backend.scan()] == [other.info]

    async def test_shards_of_a_chunk(self, tmp_path: Path) -> None:
        """Objects of one chunk that differ in layers or heads live side by side, each looked up,
        read and deleted on its own."""
        spans = [(Span(0, 1), Span(0, 2)), (Span(1, 3), Span(0, 1)), (Span(1, 3), Span(1, 2))]
        shards = [make_object(7, layers=layers, heads=heads) for layers, heads in spans]
        async with self.opened(tmp_path) as backend:
            await store_all(backend, *shards)
            [found] = await backend.lookup([shards[0].key.chunk])
            assert {info.key: info for info in found} == {each.key: each.info for each in shards}
            for each in shards:
                assert await self.bytes_of(backend, each) == each.data
            assert await backend.delete([shards[1].key]) == [True]
            [found] = await backend.lookup([shards[0].key.chunk])
            assert {info.key for info in found} == {shards[0].key, shards[2].key}

    async def test_results_are_per_key_in_order(self, tmp_path: Path) -> None:
        """Lookup, store and delete answer in the order asked, misses and repeats included; every
        read gets exactly one result that names it."""
        one, two, absent = make_object(1), make_object(2), make_object(3)
        async with self.opened(tmp_path) as backend:
            writes = [two.write(), one.write()]
            results = await backend.store(writes)
            assert [result.request for result in results] == writes
            asked = [each.key.chunk for each in (two, absent, one, two)]
            found = await backend.lookup(asked)
            assert found == [[two.info], [], [one.info], [two.info]]
            keys = (one.key, absent.key, two.key, one.key)
            reads = [Read(key, 0, aligned_buffer(4096)) for key in keys]
            reads.append(reads[0])
            loaded = await load_all(backend, reads)
            assert sorted(id(r.request) for r in loaded) == sorted(map(id, reads))
            assert all(result.seconds >= 0 for result in loaded)
            assert all(read.buffer.hold.in_flight == 0 for read in reads)
            deleted = await backend.delete([one.key, absent.key, two.key, one.key])
            assert deleted == [True, False, True, False]

    async def test_empty_batches(self, tmp_path: Path) -> None:
        """Nothing asked, nothing answered."""
        async with self.opened(tmp_path) as backend:
            assert await backend.lookup([]) == []
            assert await backend.store([]) == []
            assert await backend.delete([]) == []
            assert await load_all(backend, []) == []

    async def test_a_large_batch(self, tmp_path: Path) -> None:
        """Two hundred objects in one call, then all their layers in one load."""
        objects = [make_object(number) for number in range(200)]
        async with self.opened(tmp_path) as backend:
            await store_all(backend, *objects)
            found = await backend.lookup([each.key.chunk for each in objects])
            assert found == [[each.info] for each in objects]
            if backend.capabilities.ranged_reads:
                ranges = [each.info.layer_range(Span(n, n + 1)) for each in objects for n in (0, 2)]
            else:
                ranges = [(0, len(each.data)) for each in objects for _ in (0, 2)]
            reads = [
                Read(objects[at // 2].key, offset, aligned_buffer(nbytes))
                for at, (offset, nbytes) in enumerate(ranges)
            ]
            results = await load_all(backend, reads)
            assert {result.status for result in results} == {TransferStatus.OK}
            for at, (offset, nbytes) in enumerate(ranges):
                expected = objects[at // 2].data[offset : offset + nbytes]
                assert bytes(reads[at].buffer.view or b"") == expected

    async def test_scan_finds_what_is_stored(self, tmp_path: Path) -> None:
        """A scan lists each stored object once, whatever was replaced or deleted before."""
        objects = [make_object(number) for number in range(20)]
        async with self.opened(tmp_path) as backend:
            await store_all(backend, *objects)
            await store_all(backend, make_object(3, version=1))
            await backend.delete([objects[4].key])
            objects[3] = make_object(3, version=1)
            del objects[4]
            found = [info async for info in backend.scan()]
            assert sorted(info.key for info in found) == sorted(each.key for each in objects)
            assert {info.key: info for info in found} == {each.key: each.info for each in objects}

    async def test_used_bytes_is_exact(self, tmp_path: Path) -> None:
        """Used bytes are the sizes of the stored objects, through replacing and deleting."""
        one, shard = make_object(1), make_object(2, layers=Span(1, 2))
        async with self.opened(tmp_path) as backend:
            await store_all(backend, one, shard)
            assert await backend.used_bytes() == one.info.nbytes + shard.info.nbytes
            await store_all(backend, make_object(1, version=1))
            assert await backend.used_bytes() == one.info.nbytes + shard.info.nbytes
            await backend.delete([one.key])
            assert await backend.used_bytes() == shard.info.nbytes
            await backend.delete([shard.key])
            assert await backend.used_bytes() == 0

    async def test_a_full_store_says_so(self, tmp_path: Path) -> None:
        """What does not fit is FULL with a reason, is not visible, and nothing else is lost."""
        backend = await self.open_small(tmp_path)
        if backend is None:
            pytest.skip("capability: this harness has no small store")
        try:
            objects = [make_object(number) for number in range(16)]
            results = await backend.store([each.write() for each in objects])
            statuses = [result.status for result in results]
            assert set(statuses) == {TransferStatus.OK, TransferStatus.FULL}
            for each, status in zip(objects, statuses, strict=True):
                [found] = await backend.lookup([each.key.chunk])
                assert bool(found) == (status is TransferStatus.OK)
                if found:
                    assert await self.bytes_of(backend, each) == each.data
            for result in results:
                assert (result.error is None) == (result.status is TransferStatus.OK)
            assert not await self.leftovers(backend)
            stored = statuses.count(TransferStatus.OK)
            await backend.delete([objects[statuses.index(TransferStatus.OK)].key])
            await store_all(backend, objects[statuses.index(TransferStatus.FULL)])
            assert await backend.used_bytes() == stored * objects[0].info.nbytes
        finally:
            await backend.aclose()

    async def test_many_at_once(self, tmp_path: Path) -> None:
        """Thirty-two users who store and load at the same time each see their own bytes."""

        async def user(number: int) -> None:
            mine = [make_object(100 * number + each) for each in range(3)]
            await store_all(backend, *mine)
            for stored in mine:
                assert await self.bytes_of(backend, stored) == stored.data

        async with self.opened(tmp_path) as backend:
            async with asyncio.TaskGroup() as group:
                for number in range(32):
                    group.create_task(user(number))
            assert len([info async for info in backend.scan()]) == 96

    async def test_persistence(self, tmp_path: Path) -> None:
        """A persistent store has the same objects after closing and opening again."""
        objects = [make_object(number) for number in range(5)]
        async with self.opened(tmp_path) as backend:
            if not backend.capabilities.persistent:
                pytest.skip("capability: not persistent")
            await store_all(backend, *objects)
        async with self.opened(tmp_path) as backend:
            found = {info.key: info async for info in backend.scan()}
            assert found == {each.key: each.info for each in objects}
            assert await backend.used_bytes() == sum(each.info.nbytes for each in objects)
            for each in objects:
                assert await self.bytes_of(backend, each) == each.data

    async def test_another_user_of_a_shared_store(self, tmp_path: Path) -> None:
        """Of a shared store, two backends see each other's stores, replacements and deletes."""
        old, new = make_object(1), make_object(1, version=1)
        async with self.opened(tmp_path) as one:
            if not one.capabilities.shared:
                pytest.skip("capability: not shared")
            async with self.opened(tmp_path) as two:
                for stored in (old, new):
                    await store_all(one, stored)
                    for backend in (one, two):
                        assert await backend.lookup([stored.key.chunk]) == [[stored.info]]
                        assert await self.bytes_of(backend, stored) == stored.data
                assert await two.delete([old.key]) == [True]
                for backend in (one, two):
                    assert await backend.lookup([old.key.chunk]) == [[]]

    @staticmethod
    def _need_ranges(has_ranges: bool) -> None:
        if not has_ranges:
            pytest.skip("capability: no ranged reads")
