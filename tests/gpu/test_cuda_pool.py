"""Loads of the pool straight into a GPU's memory, over NIXL, from a store in another process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
import torch

from cacheflow.memory import InFlight
from cacheflow.storage_backends.nixl.agent import why_missing
from cacheflow.testing.objects import make_object
from cacheflow.testing.storage_harness import idle, load_all, store_all
from cacheflow.testing.store_process import StoreProcess
from cacheflow.types import Buffer, MemoryKind, Read, TransferStatus
from tests.faults.test_pool_stores import opened, started

if TYPE_CHECKING:
    from pathlib import Path

if not torch.cuda.is_available():
    pytest.skip("CUDA: no device here", allow_module_level=True)
if (reason := why_missing()) is not None:
    pytest.skip(f"no NIXL here: {reason}", allow_module_level=True)

OBJECTS: Final = [make_object(number) for number in range(8)]
PATIENT: Final = {"connect_seconds": 30.0, "transfer_seconds": 30.0, "request_seconds": 30.0}
GAP: Final = 512
"""Bytes around each buffer that nobody may touch."""


async def test_objects_land_in_device_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole objects and a range of one, all at once, into one registered tensor: their bytes are
    what was stored, and what lies between them is untouched."""
    monkeypatch.setenv("UCX_TLS", "all")
    contents = [each.data for each in OBJECTS] + [OBJECTS[0].data[5:1005]]
    offsets = [GAP + sum(map(len, contents[:at])) + at * GAP for at in range(len(contents))]
    total = offsets[-1] + len(contents[-1]) + GAP
    memory = torch.full((total,), 0xEE, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    hold = InFlight()
    buffers = [
        device_buffer(memory, offset, len(content), hold)
        for offset, content in zip(offsets, contents, strict=True)
    ]
    reads = [Read(each.key, 0, at) for each, at in zip(OBJECTS, buffers, strict=False)]
    reads.append(Read(OBJECTS[0].key, 5, buffers[-1]))
    store = StoreProcess(tmp_path / "log", arena="2MiB", transports='["nixl"]')
    async with started(store), opened(store, transports=["nixl"], **PATIENT) as backend:
        await store_all(backend, *OBJECTS)
        end = backend.register_memory(device_buffer(memory, 0, total, hold))
        results = await load_all(backend, reads)
        assert {result.status for result in results} == {TransferStatus.OK}
        end()
        await idle(hold)
    expected = bytearray(b"\xee" * total)
    for offset, content in zip(offsets, contents, strict=True):
        expected[offset : offset + len(content)] = content
    assert bytes(memory.cpu().tolist()) == expected


def device_buffer(memory: torch.Tensor, offset: int, nbytes: int, hold: InFlight) -> Buffer:
    """Bytes ``[offset, offset + nbytes)`` of a tensor of bytes."""
    return Buffer(memory.data_ptr() + offset, nbytes, MemoryKind.DEVICE, None, hold)
