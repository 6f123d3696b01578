"""Conformance: what is lent stays as it is until it is given back. For stores that lend."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from cacheflow.errors import ClosedError
from cacheflow.testing.objects import make_object, object_key
from cacheflow.testing.storage_harness import PATIENCE, BackendHarness, store_all
from cacheflow.types import Extent, TransferStatus

if TYPE_CHECKING:
    from pathlib import Path

    from cacheflow.abc import StorageBackend
    from cacheflow.testing.objects import StoredObject
    from cacheflow.types import Lent, Loan

__all__ = ["LoanTests"]

_ROUNDS = 40


class LoanTests(BackendHarness):
    """The doc line of each test is the rule it checks."""

    async def test_what_is_lent_is_what_is_stored(self, tmp_path: Path) -> None:
        """Any ranges of any objects, in the order asked, repeats included, as read-only views."""
        one, two = make_object(1), make_object(2)
        async with self.opened(tmp_path) as backend:
            await store_all(backend, one, two)
            asked = [(two, 0, len(two.data)), (one, 4096, 8192), (one, 123, 5000), (two, 7, 0)]
            extents = [Extent(each.key, offset, nbytes) for each, offset, nbytes in asked * 2]
            with self._borrow(backend, extents) as loan:
                assert [part.extent for part in loan.parts] == extents
                for part, (each, offset, nbytes) in zip(loan.parts, asked * 2, strict=True):
                    assert part.status is TransferStatus.OK
                    assert part.buffer is not None
                    assert part.buffer.view is not None
                    assert part.buffer.view.readonly
                    assert part.buffer.nbytes == nbytes
                    assert bytes(part.buffer.view) == each.data[offset : offset + nbytes]

    async def test_what_cannot_be_lent_says_so(self, tmp_path: Path) -> None:
        """An absent object is MISSING, a range that reaches over the end SHORT, without a view;
        what else is asked for in the same call is lent. A range that no object has is an error."""
        stored, absent = make_object(1), object_key(2)
        size = len(stored.data)
        async with self.opened(tmp_path) as backend:
            await store_all(backend, stored)
            extents = [
                Extent(absent, 0, 4096),
                Extent(stored.key, size - 4096, 4097),
                Extent(stored.key, size + 1, 1),
                Extent(stored.key, 4096, 4096),
            ]
            with self._borrow(backend, extents) as loan:
                missing, over, behind, there = loan.parts
                assert (missing.status, missing.buffer) == (TransferStatus.MISSING, None)
                assert (over.status, over.buffer) == (TransferStatus.SHORT, None)
                assert (behind.status, behind.buffer) == (TransferStatus.SHORT, None)
                assert _bytes(there) == stored.data[4096:8192]
            for wrong in (Extent(stored.key, -4096, 4096), Extent(stored.key, 0, -1)):
                with pytest.raises(ValueError, match="-"):
                    backend.borrow([Extent(stored.key, 0, 1), wrong])

    async def test_deleting_what_is_lent(self, tmp_path: Path) -> None:
        """A deleted object is gone at once, its lent bytes stay, however much is stored then."""
        stored = make_object(1)
        async with self.opened(tmp_path) as backend:
            await store_all(backend, stored)
            with self._borrow(backend, [_whole(stored)]) as loan:
                assert await backend.delete([stored.key]) == [True]
                assert await backend.lookup([stored.key.chunk]) == [[]]
                await self._store_many(backend)
                assert _bytes(loan.parts[0]) == stored.data

    async def test_replacing_what_is_lent(self, tmp_path: Path) -> None:
        """A replaced object's lent bytes stay the old ones; who borrows anew gets the new ones."""
        versions = [make_object(1, version) for version in range(4)]
        async with self.opened(tmp_path) as backend:
            loans = []
            for each in versions:
                await store_all(backend, each)
                loans.append(self._borrow(backend, [_whole(each)]))
            await self._store_many(backend)
            for each, loan in zip(versions, loans, strict=True):
                assert _bytes(loan.parts[0]) == each.data
            for loan in reversed(loans):
                loan.release()
            assert await self.bytes_of(backend, versions[-1]) == versions[-1].data

    async def test_what_is_given_back_is_room_again(self, tmp_path: Path) -> None:
        """A loan given back, once or more often, keeps no memory: lending and replacing goes on
        for ever, also in a small store."""
        backend = await self.open_small(tmp_path)
        if backend is None:
            pytest.skip("capability: this harness has no small store")
        try:
            for version in range(_ROUNDS):
                stored = make_object(1, version)
                await store_all(backend, stored)
                loan = self._borrow(backend, [_whole(stored)])
                assert _bytes(loan.parts[0]) == stored.data
                loan.release()
                loan.release()
                assert await backend.delete([stored.key]) == [True]
            assert await backend.used_bytes() == 0
        finally:
            await backend.aclose()

    async def test_a_cancelled_borrower_gives_back(self, tmp_path: Path) -> None:
        """Whoever is cancelled inside ``with`` holds nothing any more."""
        stored = make_object(1)
        async with self.opened(tmp_path) as backend:
            await store_all(backend, stored)
            lent = self._borrow(backend, [_whole(stored)])
            buffer = lent.parts[0].buffer
            assert buffer is not None
            lent.release()
            assert buffer.hold.in_flight == 0

            async def borrow() -> None:
                with self._borrow(backend, [_whole(stored)]):
                    await asyncio.Event().wait()

            task = asyncio.ensure_future(borrow())
            await asyncio.sleep(0)
            assert buffer.hold.in_flight > 0
            task.cancel()
            await asyncio.wait([task], timeout=PATIENCE)
            assert buffer.hold.in_flight == 0

    async def test_closing_while_something_is_lent(self, tmp_path: Path) -> None:
        """Lent bytes stay until they are given back, also when the store is closed; then nothing
        is lent any more."""
        stored = make_object(1)
        backend = await self.open_backend(tmp_path)
        try:
            await store_all(backend, stored)
            loan = self._borrow(backend, [_whole(stored)])
            closing = asyncio.ensure_future(backend.aclose())
            for _ in range(5):
                await asyncio.sleep(0)
            with pytest.raises(ClosedError):
                backend.borrow([_whole(stored)])
            assert _bytes(loan.parts[0]) == stored.data
            loan.release()
            await asyncio.wait_for(closing, PATIENCE)
        finally:
            await backend.aclose()

    def _borrow(self, backend: StorageBackend, extents: list[Extent]) -> Loan:
        loan = backend.borrow(extents)
        if loan is None:
            pytest.skip("capability: this store does not lend")
        return loan

    async def _store_many(self, backend: StorageBackend) -> None:
        """More than a store would put elsewhere than into the first free place."""
        await store_all(backend, *(make_object(100 + number) for number in range(8)))


def _whole(stored: StoredObject) -> Extent:
    return Extent(stored.key, 0, len(stored.data))


def _bytes(part: Lent) -> bytes:
    assert part.buffer is not None
    assert part.buffer.view is not None
    return bytes(part.buffer.view)
