"""The dram backend fulfils the storage contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cacheflow.storage_backends.dram import DramBackend
from tests.conformance.in_dram import InDram

if TYPE_CHECKING:
    from pathlib import Path

    from cacheflow.abc import StorageBackend

pytestmark = pytest.mark.both_loops


class TestDram(InDram):
    async def open_backend(self, where: Path) -> StorageBackend:
        return await DramBackend.open({"capacity_bytes": 8 << 20})

    async def open_small(self, where: Path) -> StorageBackend:
        return await DramBackend.open({"capacity_bytes": 100 << 10})
