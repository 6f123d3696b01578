"""Name -> class, lazily, through entry points: the same door for ours and for third parties."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Final

from cacheflow.abc import StorageBackend
from cacheflow.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "BACKEND_GROUP",
    "ENGINE_GROUP",
    "SERVER_GROUP",
    "TRANSPORT_GROUP",
    "available",
    "load_backend",
    "load_engine",
    "load_server",
    "load_transport",
]

BACKEND_GROUP: Final = "cacheflow.storage_backends"
ENGINE_GROUP: Final = "cacheflow.engines"
SERVER_GROUP: Final = "cacheflow.servers"
TRANSPORT_GROUP: Final = "cacheflow.transports"

_INSTALL: Final[Mapping[str, str]] = {
    "nixl": "pip install --no-deps nixl-cu12==1.5.1 nixl==1.5.1 numpy",
    "object-store": "pip install 'cacheflow-kv[object-store]'",
    "openai": "pip install 'cacheflow-kv[server]'",
    "pool": "pip install 'cacheflow-kv[pool]'",
    "tcp": "pip install 'cacheflow-kv[pool]'",
    "transformers": "pip install 'cacheflow-kv[transformers]'",
}
"""How to get what one of our own names needs."""


def available(group: str = BACKEND_GROUP) -> dict[str, EntryPoint]:
    """Entry points of ``group`` by name; nothing is imported."""
    return {point.name: point for point in entry_points(group=group)}


def load_backend(name: str) -> type[StorageBackend]:
    """The backend class registered as ``name``.

    Raises:
        ConfigError: nothing is registered under the name, it cannot be imported (the message says
            what to install), or it is not a :class:`StorageBackend`.
    """
    found = _load(BACKEND_GROUP, name, "storage backend")
    if not (isinstance(found, type) and issubclass(found, StorageBackend)):
        raise ConfigError(f"storage backend {name!r}: {found!r} is not a StorageBackend class")
    return found


def load_engine(name: str) -> object:
    """The engine factory registered as ``name``; see :func:`load_backend` for what it raises."""
    return _load(ENGINE_GROUP, name, "engine")


def load_server(name: str) -> object:
    """The coroutine function that serves, registered as ``name``; see :func:`load_backend`."""
    return _load(SERVER_GROUP, name, "server")


def load_transport(name: str) -> object:
    """What the transport registered as ``name`` gives (see :mod:`cacheflow.pool`); see
    :func:`load_backend` for what it raises."""
    return _load(TRANSPORT_GROUP, name, "transport")


def _load(group: str, name: str, what: str) -> object:
    points = available(group)
    if name not in points:
        known = ", ".join(sorted(points)) or "none: is cacheflow-kv installed?"
        hint = f"; to install it: {_INSTALL[name]}" if name in _INSTALL else ""
        raise ConfigError(f"no {what} is registered as {name!r} (known: {known}){hint}")
    try:
        return points[name].load()
    except ImportError as error:
        hint = _INSTALL.get(name, "install the packages that its distribution asks for")
        raise ConfigError(
            f"{what} {name!r} cannot be imported ({error}); to install it: {hint}"
        ) from error
