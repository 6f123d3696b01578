"""The process that bench_crash.py kills: stores, replaces, deletes and loads until it dies.

It says on a pipe what it is about to do and what it has done, each a line written in one step, so
that whoever kills it knows what was committed. Knows nothing of being killed. Imports no torch.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import OrderedDict
from typing import TYPE_CHECKING

from cacheflow.errors import CapacityError, IntegrityError
from cacheflow.kv import decode_header, verify
from cacheflow.storage_backends.nvme import NvmeBackend
from cacheflow.testing.objects import StoredObject, load_one, make_object
from cacheflow.types import Span, TransferStatus

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from cacheflow.types import ObjectKey

__all__ = ["CONTESTED", "NUMBERS", "WORKERS", "child", "object_of", "owner"]

WORKERS = 4
"""Tasks of one process."""
NUMBERS = 96
CONTESTED = 24
"""Numbers that any process may store and delete; the others belong to one worker of one process."""


def object_of(number: int, version: int) -> StoredObject:
    """Objects of three sizes; the version is in its ``grid_id``."""
    return make_object(number, version, layers=Span(0, 1 + number % 3))


def owner(number: int) -> int | None:
    """Which of the two processes alone stores and deletes this number; None: both may."""
    return None if number < CONTESTED else number % 2


def child(which: int, folder: Path, options: Mapping[str, object], seed: int, pipe: int) -> None:
    """Run until killed, or until SIGTERM; then report what the store believes it uses."""
    asyncio.run(_Child(which, seed, pipe).run({"path": str(folder), **options}))


class _Child:
    def __init__(self, which: int, seed: int, pipe: int) -> None:
        self.which = which
        self.seed = seed
        self.pipe = pipe
        self.versions: dict[int, int] = {}
        """What this process's own numbers have been stored as; absent: not by this process."""
        self.stop = False

    def say(self, *words: object) -> None:
        os.write(self.pipe, (" ".join(map(str, words)) + "\n").encode())

    async def run(self, options: dict[str, object]) -> None:
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "stop", True))
        backend = await NvmeBackend.open(options)
        async with asyncio.TaskGroup() as group:
            for worker in range(WORKERS):
                group.create_task(self._work(backend, worker))
        await self._fill(backend)
        self.say("used", await backend.used_bytes())
        await backend.aclose()

    async def _work(self, backend: NvmeBackend, worker: int) -> None:
        chance = random.Random(f"{self.seed} {self.which} {worker}")
        mine = [n for n in range(NUMBERS) if owner(n) == self.which and n // 2 % WORKERS == worker]
        kept: OrderedDict[int, None] = OrderedDict()
        while not self.stop:
            is_own = chance.random() < 0.7
            number = chance.choice(mine) if is_own else chance.randrange(CONTESTED)
            act = chance.random()
            if act < 0.5:
                await self._store(backend, number, chance.randrange(1 << 30), kept, chance)
            elif act < 0.6:
                await self._delete(backend, number, kept)
            else:
                await self._load(backend, number)

    async def _store(
        self,
        backend: NvmeBackend,
        number: int,
        version: int,
        kept: OrderedDict[int, None],
        chance: random.Random,
    ) -> None:
        """Evict the oldest until there is room, as a tier does."""
        stored = object_of(number, version)
        self.say("store", number, version)
        while not self.stop:
            [result] = await backend.store([stored.write()])
            if result.status is TransferStatus.OK:
                self.say("stored", number, version)
                if owner(number) is not None:
                    self.versions[number] = version
                kept[number] = None
                kept.move_to_end(number)
                return
            if not isinstance(result.error, CapacityError):
                self.say("wrong", f"store {number}: {result}")
                return
            oldest = next((n for n in kept if n != number), None)
            victim = chance.randrange(CONTESTED) if oldest is None else oldest
            await self._delete(backend, victim, kept)
        self.say("kept", number)

    async def _delete(
        self, backend: NvmeBackend, number: int, kept: OrderedDict[int, None]
    ) -> None:
        self.say("delete", number)
        kept.pop(number, None)
        self.versions.pop(number, None)
        await backend.delete([object_of(number, 0).key])
        self.say("deleted", number)

    async def _load(self, backend: NvmeBackend, number: int) -> None:
        stored = object_of(number, 0)
        result, data = await load_one(backend, stored.key, 0, len(stored.data))
        if result.status is TransferStatus.MISSING:
            if number in self.versions:
                self.say("wrong", f"{number} is missing")
        elif result.status is not TransferStatus.OK:
            self.say("wrong", f"load {number}: {result}")
        else:
            self._check(stored.key, number, data)

    def _check(self, key: ObjectKey, number: int, data: bytes) -> None:
        """What is served is one whole object, and of an own number the one stored last."""
        try:
            info = decode_header(data, expect=key)
            verify(info, key.layers, memoryview(data)[info.payload_offset :])
        except IntegrityError as error:
            self.say("wrong", f"{number}: {error}")
            return
        version = self.versions.get(number)
        if version is not None and info.grid_id != f"conformance {version}":
            self.say("wrong", f"{number} is stale")
        self.say("loaded", number)

    async def _fill(self, backend: NvmeBackend) -> None:
        """Store until the cap says no: by then what the dead had reserved is given back."""
        for number in range(NUMBERS):
            if owner(number) is None:
                self.say("store", number, 0)
                [result] = await backend.store([object_of(number, 0).write()])
                self.say("stored" if result.status is TransferStatus.OK else "kept", number, 0)
