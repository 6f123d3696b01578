"""Host memory for I/O: leases, holds, quarantine. Imports torch only to pin."""

from __future__ import annotations

from cacheflow.memory.hold import InFlight
from cacheflow.memory.pool import Lease, StagingPool, buffer_from

__all__ = ["InFlight", "Lease", "StagingPool", "buffer_from"]
