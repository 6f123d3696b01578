"""What the flows over one engine have in common: names for their requests, and its KV memory.

An engine knows its requests by id and has one KV memory for all of them. So flows that are open
over it at the same time never give two requests one id, and make room for each other.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

from cacheflow.abc import Staged, Together
from cacheflow.errors import ConfigError
from cacheflow.session.room import Room

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cacheflow.abc import Engine
    from cacheflow.session.session import Session

__all__ = ["Common", "Place", "in_common"]


class Common:
    """Of one engine, as long as any flow is open over it; on the event loop of these flows."""

    def __init__(self, engine: Engine, numbers: Iterator[int]) -> None:
        self.engine = engine
        self.loop = asyncio.get_running_loop()
        self.resident: set[Session] = set()
        """Sessions of all flows with KV in memory."""
        self.room = Room(self.resident)
        self.numbers = numbers
        self.flows = 0


class Place:
    """One flow's among those of its engine. ``number``: which of them it is, from 1."""

    def __init__(self, common: Common, number: int) -> None:
        self.resident = common.resident
        self.room = common.room
        self._prefix = "" if number == 1 else f"{number}."

    def request(self, name: str, number: int) -> str:
        """An id for the ``number``-th request of ``name`` that no other flow gives."""
        return f"{name}/{self._prefix}{number}"


_LOCK = threading.Lock()
_COMMON: dict[int, Common] = {}
"""By the identity of the engine, which is kept alive as long: an engine need not be hashable."""


@contextmanager
def in_common(engine: Engine) -> Iterator[Place]:
    """A place for a new flow over ``engine``, until all that the flow has there is closed.

    Raises:
        ConfigError: other flows are open over it that it cannot share the engine with.
    """
    with _LOCK:
        common = _COMMON.get(id(engine))
        if common is None or common.loop.is_closed():
            # A loop that was closed under its flows: what they left in the engine has its ids.
            numbers = count(1) if common is None else common.numbers
            common = _COMMON[id(engine)] = Common(engine, numbers)
        _check_shares(common)
        common.flows += 1
        place = Place(common, next(common.numbers))
    try:
        yield place
    finally:
        with _LOCK:
            common.flows -= 1
            if not common.flows and _COMMON.get(id(engine)) is common:
                del _COMMON[id(engine)]


def _check_shares(common: Common) -> None:
    """Raise ConfigError unless another flow can be opened beside those that are."""
    if not common.flows:
        return
    if common.loop is not asyncio.get_running_loop():
        raise ConfigError(
            "the engine is in use by a CacheFlow of another event loop: close that one first, or "
            "use it from its own loop"
        )
    if isinstance(common.engine, Staged | Together):
        raise ConfigError(
            "the engine is in use by another CacheFlow, and an engine over several ranks serves "
            "one at a time: close that one first, or give its sessions tenants"
        )
