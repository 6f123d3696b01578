"""Memory in huge pages: reserved ones if there are enough, else as the kernel sees fit."""

from __future__ import annotations

import mmap
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final
from unittest import mock

import pytest

from cacheflow.memory import pages
from cacheflow.testing.objects import make_object
from cacheflow.testing.storage_harness import store_all
from tests.unit.pool.storing import SIZE, client, serving, there

if TYPE_CHECKING:
    from collections.abc import Iterator

RESERVED: Final = Path("/proc/sys/vm/nr_hugepages")
HUGE: Final = 2 << 20
ENOUGH: Final = 128
"""Pages, for other tests that ask for some meanwhile as well."""


@contextmanager
def reserved(number: int) -> Iterator[None]:
    """So many huge pages are there for whoever asks, and as many as before afterwards."""
    try:
        before = RESERVED.read_text("ascii")
        RESERVED.write_text(str(int(before) + number), "ascii")
    except OSError as error:
        pytest.skip(f"capability: no huge pages can be reserved here ({error})")
    try:
        if int(RESERVED.read_text("ascii")) < int(before) + number:
            pytest.skip("capability: there is no room for huge pages here")
        yield
    finally:
        RESERVED.write_text(before, "ascii")


async def test_an_arena_in_reserved_pages() -> None:
    """What is stored in one is read from it; its size is what was asked for."""
    objects = [make_object(number) for number in range(4)]
    with reserved(ENOUGH):
        async with serving(arena=HUGE + 8 * SIZE) as server, client(server) as backend:
            assert server.directory.arena.pages == "hugetlb"
            assert server.directory.arena.memory.nbytes == HUGE + 8 * SIZE
            await store_all(backend, *objects)
            assert await there(backend, objects) == [0, 1, 2, 3]


@pytest.mark.parametrize("hindrance", ["none reserved", "no wishes"])
def test_memory_without_reserved_pages(hindrance: str) -> None:
    """Where there are none it is memory all the same, and says what it is."""
    asked: list[int] = []
    make = mmap.mmap

    def refusing(number: int, nbytes: int, **options: int) -> mmap.mmap:
        if options.get("flags", 0) & pages._MAP_HUGETLB:
            asked.append(nbytes)
            raise OSError(12, os.strerror(12))
        made = make(number, nbytes, **options)
        return made if hindrance == "none reserved" else mock.Mock(wraps=made, spec=["close"])

    with mock.patch.object(mmap, "mmap", refusing):
        made, kind = pages._map_huge(HUGE + 1)
    assert asked == [2 * HUGE]
    assert kind == ("advised" if hindrance == "none reserved" else "normal")
    made.close()
