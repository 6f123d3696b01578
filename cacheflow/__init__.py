"""CacheFlow: KV caches restored from both ends at once.

The names most programs need are here, imported when they are first asked for: importing
``cacheflow.types`` or ``cacheflow.scheduling`` brings neither torch nor asyncio along.
``__init__.pyi`` says the same to type checkers (SPEC 1, lazy loading).
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

__version__ = version("cacheflow-kv")

_HOMES = {
    "BackendError": "errors",
    "CacheFlow": "session",
    "CacheFlowError": "errors",
    "CapacityError": "errors",
    "ClosedError": "errors",
    "ConfigError": "errors",
    "Generation": "session",
    "IntegrityError": "errors",
    "PeerError": "errors",
    "PrometheusObserver": "metrics",
    "Sampling": "types",
    "Session": "session",
    "Settings": "settings",
    "TierSettings": "settings",
    "Usage": "session",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'cacheflow' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"cacheflow.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
