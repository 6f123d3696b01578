"""A store whose speed and faults are steered from another process, through a small JSON file.

For engines that open their tiers in processes of their own, like vLLM's workers. Objects lie in
memory, or in a folder; :func:`install` registers the backend as ``steered``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from cacheflow.abc import StorageBackend
from cacheflow.errors import BackendError
from cacheflow.registry import load_backend
from cacheflow.types import TransferResult, TransferStatus

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from cacheflow.types import ChunkInfo, ChunkKey, ObjectKey, Read, Write

__all__ = ["SteeredStore", "install", "steer"]


def install(folder: Path) -> None:
    """Register the backend in ``folder``, for this process and those it starts."""
    info = folder / "steered-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: steered\nVersion: 1.0\n")
    entry = "[cacheflow.storage_backends]\nsteered = cacheflow.testing.steered:SteeredStore\n"
    (info / "entry_points.txt").write_text(entry)
    if str(folder) not in sys.path:  # which multiprocessing hands on
        sys.path.append(str(folder))


def steer(control: Path, **wishes: float | str) -> None:
    """``seconds`` to load an object (one after the other; a part of one takes its share),
    ``fail_after`` so many loads (-1: never) the next ``fail_count`` (all), how to fail (``fault``:
    "error", "corrupt" or "hang"), ``lookup`` seconds, ``stores`` ("full" or "failed": how they
    end), ``clear`` (a new number empties the store). ``head``: all that only for objects whose
    first KV head this is, which one of several ranks has. ``parts``: only loads of a part of an
    object count, and fail. ``shared``: storing an object takes as long, on the line of the
    loads."""
    temporary = control.with_suffix(".new")
    temporary.write_text(json.dumps(wishes))
    temporary.replace(control)


class SteeredStore(StorageBackend):
    """``options``: ``control``, the file's path; ``path``: of the folder, if there is to be one."""

    name: ClassVar[str] = "steered"

    def __init__(self, inner: StorageBackend, control: Path) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities
        self._control = control
        self._free_at = 0.0
        self._state: tuple[object, int] = (None, 0)
        """The wishes seen last, and loads since then."""
        self._cleared: object = None

    @classmethod
    async def open(cls, options: Mapping[str, object]) -> Self:
        if "path" in options:
            inner = await load_backend("nvme").open({"path": options["path"]})
        else:
            inner = await load_backend("dram").open({"capacity_bytes": 8 << 30})
        return cls(inner, Path(str(options["control"])))

    async def lookup(self, keys: Sequence[ChunkKey]) -> list[Sequence[ChunkInfo]]:
        wishes = await self._wishes()
        await asyncio.sleep(float(wishes.get("lookup", 0.0)))
        return await self.inner.lookup(keys)

    async def load(self, reads: Sequence[Read]) -> AsyncGenerator[TransferResult, None]:
        for read in reads:
            read.buffer.hold.acquire()
        try:
            for read in reads:
                yield await self._load(read)
        finally:
            for read in reads:
                read.buffer.hold.release()

    async def _load(self, read: Read) -> TransferResult:
        wishes = await self._wishes()
        if not _is_meant(wishes, read.key):
            async for result in self.inner.load([read]):
                return result
        share = await self._share(read)
        due = self._queued(share * float(wishes.get("seconds", 0.0)))
        fails = (share < 1.0 or not wishes.get("parts")) and self._fails(wishes)
        if fails and wishes.get("fault") == "hang":
            await asyncio.sleep(3600)
        async for result in self.inner.load([read]):
            await _until(due)
            return _spoiled(result, str(wishes.get("fault"))) if fails else result
        raise BackendError("no result", operation="load")

    def _queued(self, seconds: float) -> float:
        """When what takes so long is done, behind those before it."""
        self._free_at = max(self._free_at, asyncio.get_running_loop().time()) + seconds
        return self._free_at

    def _fails(self, wishes: Mapping[str, float | str]) -> bool:
        """Whether the load that begins now is to fail; it counts."""
        seen, count = self._state
        self._state = (seen, count + 1)
        after = int(wishes.get("fail_after", -1))
        return 0 <= after <= count < after + int(wishes.get("fail_count", sys.maxsize))

    async def _share(self, read: Read) -> float:
        """Of the object's payload."""
        (infos,) = await self.inner.lookup([read.key.chunk])
        sizes = [info.layer_range(info.key.layers)[1] for info in infos if info.key == read.key]
        return min(read.buffer.nbytes / sizes[0], 1.0) if sizes else 1.0

    async def _wishes(self) -> dict[str, float | str]:
        try:
            text = self._control.read_text()
        except FileNotFoundError:
            text = "{}"
        wishes: dict[str, float | str] = json.loads(text)
        if text != self._state[0]:
            self._state = (text, 0)
            self._free_at = 0.0
        if wishes.get("clear", 0) != (self._cleared or 0):
            self._cleared = wishes.get("clear", 0)
            there = [info.key async for info in self.inner.scan()]
            await self.inner.delete([key for key in there if _is_meant(wishes, key)])
        return wishes

    async def store(self, writes: Sequence[Write]) -> list[TransferResult]:
        wishes = await self._wishes()
        status = TransferStatus(str(wishes.get("stores", "ok")))
        if status is TransferStatus.OK or not all(_is_meant(wishes, w.info.key) for w in writes):
            if wishes.get("shared"):
                await _until(self._queued(len(writes) * float(wishes.get("seconds", 0.0))))
            return await self.inner.store(writes)
        error = BackendError("steered not to store", operation="store", is_temporary=True)
        return [TransferResult(write, status, 0, 0.0, error) for write in writes]

    async def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return await self.inner.delete(keys)

    async def scan(self) -> AsyncGenerator[ChunkInfo, None]:
        async for info in self.inner.scan():
            yield info

    async def used_bytes(self) -> int:
        return await self.inner.used_bytes()

    async def aclose(self) -> None:
        await self.inner.aclose()


async def _until(due: float) -> None:
    await asyncio.sleep(max(due - asyncio.get_running_loop().time(), 0.0))


def _is_meant(wishes: Mapping[str, float | str], key: ObjectKey) -> bool:
    return wishes.get("head", key.heads.start) == key.heads.start


def _spoiled(result: TransferResult, fault: str) -> TransferResult:
    if fault == "corrupt":
        view = result.request.buffer.view  # type: ignore[union-attr]
        assert view is not None
        view[len(view) // 2] ^= 1
        return result
    error = BackendError("steered to fail", operation="load")
    return replace(result, status=TransferStatus.FAILED, nbytes=0, error=error)
