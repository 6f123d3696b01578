"""Which transports to offer a store: the best first, without those that lead nowhere. Pure.

A link that breaks after it has delivered something says that the store, or the network, was gone
for a moment. Two links in a row over which nothing came at all say that this transport does not
work between the two of us, whatever each of us can do: then the next one has its turn for a while.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Ways"]

_FRUITLESS: Final = 2
"""Links in a row after which a transport is set aside."""
_SECONDS: Final = 60.0
"""For so long."""


class Ways:
    """``names``: transports, best first. Of one store; time is an argument."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names: Final = tuple(names)
        self._fruitless: Counter[str] = Counter()
        self._aside: dict[str, float] = {}

    def offered(self, now: float) -> list[str]:
        """Best first; all of them if every one is set aside."""
        fit = [name for name in self._names if self._aside.get(name, now) <= now]
        return fit or list(self._names)

    def failed(self, name: str, now: float, *, delivered: bool = False) -> bool:
        """A link could not be made, or was given up; ``delivered``: it had been of use before.
        True if the transport is set aside because of it."""
        self._fruitless[name] = 0 if delivered else self._fruitless[name] + 1
        if self._fruitless[name] < _FRUITLESS:
            return False
        self._fruitless[name] = 0
        self._aside[name] = now + _SECONDS
        return len(self._names) > 1
