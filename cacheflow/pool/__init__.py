"""The memory pool: a store process whose arena many hosts share, and the protocol to talk to it.

What is here is loaded when it is first asked for: a client needs the protocol, not the store.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from cacheflow.pool import messages
    from cacheflow.pool.etcd import Etcd, check_etcd_url
    from cacheflow.pool.frames import (
        FIRST_BODY,
        MAX_BODY,
        PROTOCOL,
        Frame,
        Kind,
        read_frame,
    )
    from cacheflow.pool.server import StoreServer, running
    from cacheflow.pool.settings import StoreSettings
    from cacheflow.pool.sockets import watch_socket
    from cacheflow.pool.transport import Access, Link, Piece, Target, Transport, TransportKind

__all__ = [
    "FIRST_BODY",
    "MAX_BODY",
    "PROTOCOL",
    "Access",
    "Etcd",
    "Frame",
    "Kind",
    "Link",
    "Piece",
    "StoreServer",
    "StoreSettings",
    "Target",
    "Transport",
    "TransportKind",
    "check_etcd_url",
    "messages",
    "read_frame",
    "running",
    "watch_socket",
]

_WHERE: Final = {
    "FIRST_BODY": "frames",
    "MAX_BODY": "frames",
    "PROTOCOL": "frames",
    "Access": "transport",
    "Etcd": "etcd",
    "Frame": "frames",
    "Kind": "frames",
    "Link": "transport",
    "Piece": "transport",
    "StoreServer": "server",
    "StoreSettings": "settings",
    "Target": "transport",
    "Transport": "transport",
    "TransportKind": "transport",
    "check_etcd_url": "etcd",
    "read_frame": "frames",
    "running": "server",
    "watch_socket": "sockets",
}


def __getattr__(name: str) -> Any:
    if name == "messages":
        return import_module("cacheflow.pool.messages")
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"cacheflow.pool.{_WHERE[name]}"), name)
