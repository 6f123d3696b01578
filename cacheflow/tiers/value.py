"""What a stored object is worth to a tier: how eviction is told about costs. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FLAT", "Value"]


class Value(Protocol):
    """Asked at every lookup and store; answers at once, on any scale that is always the same."""

    def per_byte(self, start: int, stop: int, nbytes: int) -> float:
        """What loading ``nbytes`` of KV computed in tokens ``[start, stop)`` saves, per byte."""
        ...

    def evidence(self, chunks: int) -> Sequence[float]:
        """How likely each chunk of a request of ``chunks`` would really be loaded, 0 to 1."""
        ...


class _Flat:
    """Every byte and every use is worth the same."""

    def per_byte(self, start: int, stop: int, nbytes: int) -> float:
        return 1.0

    def evidence(self, chunks: int) -> Sequence[float]:
        return (1.0,) * chunks


FLAT: Final[Value] = _Flat()
