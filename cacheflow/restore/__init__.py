"""The asyncio shell around the decision core: lookups, loads, compute, publication."""

from __future__ import annotations

from cacheflow.restore.request import Restoration, RestoreRequest
from cacheflow.restore.restorer import Restorer

__all__ = ["Restoration", "RestoreRequest", "Restorer"]
