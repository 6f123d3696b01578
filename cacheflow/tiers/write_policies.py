"""Write policies: which chunks of a finished request are worth storing. Pure.

``all`` is here; ``planned`` is in :mod:`cacheflow.tiers.planned`.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

__all__ = ["WriteAll", "WritePolicy"]


class WritePolicy(Protocol):
    """Asked once for every save; answers at once."""

    @property
    def name(self) -> str:
        """What settings call it."""
        ...

    def skipped(self, chunks: int) -> int:
        """How many leading chunks of a request of ``chunks`` whole ones need not be stored."""
        ...


class WriteAll:
    """Store everything."""

    name: ClassVar[str] = "all"

    def skipped(self, chunks: int) -> int:
        """See :class:`WritePolicy`."""
        return 0
