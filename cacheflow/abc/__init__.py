"""The contracts third parties implement: one concept each.

``StorageBackend`` is one tier's store, ``Recomputer`` the half of an engine that restoration needs,
``Engine`` the whole of it, ``ChatTemplate`` how its model reads messages. Nothing here does work.
"""

from __future__ import annotations

from cacheflow.abc.engine import ChatTemplate, Decoder, Engine, Packer, Sampler
from cacheflow.abc.ranks import Peers, Sharded, Staged, StageListener, Together
from cacheflow.abc.recomputer import ClaimLayer, Recomputer
from cacheflow.abc.storage import StorageBackend

__all__ = [
    "ChatTemplate",
    "ClaimLayer",
    "Decoder",
    "Engine",
    "Packer",
    "Peers",
    "Recomputer",
    "Sampler",
    "Sharded",
    "StageListener",
    "Staged",
    "StorageBackend",
    "Together",
]
