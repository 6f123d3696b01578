"""The conformance suite of the storage contract, for whoever implements a backend.

Fill in the hooks and run it with pytest (``asyncio_mode = "auto"``)::

    from cacheflow.testing.conformance import StorageBackendTests

    class TestMyBackend(StorageBackendTests):
        async def open_backend(self, where): ...
        async def raw_get(self, backend, key): ...
        async def raw_set(self, backend, stored, data): ...

``raw_get`` and ``raw_set`` are a back door: they look at the medium without the backend, so that a
store cannot pass by believing itself. Tests choose themselves by what the backend can do and by
the optional hooks (``paused``, ``leftovers``, ``open_small``); what is skipped says why.

Needs pytest, pytest-asyncio and hypothesis.
"""

from __future__ import annotations

from cacheflow.testing.storage_data import DataTests
from cacheflow.testing.storage_faults import FaultTests
from cacheflow.testing.storage_harness import BackendHarness, Pause
from cacheflow.testing.storage_loans import LoanTests
from cacheflow.testing.storage_model import ModelTests

__all__ = ["BackendHarness", "Pause", "StorageBackendTests"]


class StorageBackendTests(DataTests, FaultTests, LoanTests, ModelTests):
    """Every test of the contract; subclass it once a backend."""
