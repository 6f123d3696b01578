"""A client that is stopped while it fills a slot, and writes when nobody waits for it any more."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import pytest
from pool_writer import Writer

from cacheflow.pool import messages
from cacheflow.storage_backends.nixl.agent import why_missing
from cacheflow.storage_backends.pool.channel import Channel
from cacheflow.testing.objects import make_object
from cacheflow.testing.storage_harness import store_all
from cacheflow.testing.store_process import StoreProcess
from tests.faults.test_pool_stores import opened, started, until
from tests.unit.pool.storing import SIZE, there

if TYPE_CHECKING:
    from pathlib import Path

if (reason := why_missing()) is not None:
    pytest.skip(f"no NIXL here: {reason}", allow_module_level=True)


LINGER: Final = 1.0
"""Seconds for which a store that cuts a client off waits for what is on the wire."""


async def asked(store: StoreProcess) -> messages.StatReply:
    """How the store is."""
    channel = await Channel.connect("asker", ("127.0.0.1", store.port), None)
    try:
        hello = messages.Hello(client="asker", token=b"", offers=(("tcp", b""),))
        await channel.ask(hello, messages.HelloReply, 5.0)
        return await channel.ask(messages.Stat(), messages.StatReply, 5.0)
    finally:
        await channel.aclose()


async def test_a_stopped_writer_does_not_write_over_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot stays its own after ``fill_seconds``, since nothing keeps it out of shared memory:
    what others have stored meanwhile is what they stored. Others need not wait for it, and the slot
    is used again when the writer is gone."""
    monkeypatch.setenv("UCX_TLS", "all")
    log = tmp_path / "log"
    options = {"arena": 8 * SIZE, "fill_seconds": 0.3, "eviction": "lru"}
    store = StoreProcess(log, transports='["nixl", "tcp"]', **options)
    objects = [make_object(number) for number in range(16)]
    async with started(store), opened(store) as backend:
        writer = await asyncio.to_thread(Writer.start, store.port, 99, {"UCX_TLS": "all"})
        try:
            await asyncio.to_thread(writer.freeze)

            async def is_late() -> bool:
                return "did not commit in time" in await asyncio.to_thread(log.read_text)

            await until(is_late)
            end = (await asked(store)).uptime + LINGER + 0.5
            while (await asked(store)).uptime < end:  # all the while others store
                for each in objects:
                    await store_all(backend, each)
            assert await asyncio.to_thread(writer.thaw_and_write)
            assert len(await there(backend, objects)) == 7
            assert (await asked(store)).uncommitted == 1
        finally:
            await asyncio.to_thread(writer.kill)

        async def is_free() -> bool:
            return (await asked(store)).uncommitted == 0

        await until(is_free)
        for each in objects:
            await store_all(backend, each)
        assert len(await there(backend, objects)) == 8
