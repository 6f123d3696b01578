"""Host memory for I/O: leases, holds, quarantine. Imports torch only to pin."""

from __future__ import annotations

from cacheflow.memory.hold import InFlight
from cacheflow.memory.pages import buffer_from
from cacheflow.memory.pool import Lease, StagingPool

__all__ = ["InFlight", "Lease", "StagingPool", "buffer_from"]
