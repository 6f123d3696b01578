"""What a cost model knows, as a few numbers that outlive the process. Pure records, no files."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ChannelProfile", "ComputeProfile"]

_LEAST: float = 1e-30
_MOST: float = 1e12


@dataclass(frozen=True, slots=True)
class ComputeProfile:
    """Rates of :class:`~cacheflow.costs.ComputeModel`.

    Raises:
        ValueError: a number that no machine could have shown.
    """

    launch: float
    """Seconds a tile-layer (k0)."""
    linear: float
    """Seconds per FLOP of linear work (k1)."""
    attention: float
    """Seconds per FLOP of attention work (k2)."""
    typical: float
    """Seconds of a layer of a usual tile: the scale of the launch."""

    def __post_init__(self) -> None:
        _check("launch", self.launch, 0.0)
        _check("linear", self.linear)
        _check("attention", self.attention)
        _check("typical", self.typical)


@dataclass(frozen=True, slots=True)
class ChannelProfile:
    """Rates of :class:`~cacheflow.costs.ChannelModel`.

    Raises:
        ValueError: a number that no machine could have shown.
    """

    latency: float
    """Seconds a load that others do not hide."""
    per_byte: float
    """Seconds a byte."""
    unit: float
    """Bytes of a usual load."""

    def __post_init__(self) -> None:
        _check("latency", self.latency, 0.0)
        _check("per_byte", self.per_byte)
        _check("unit", self.unit)


def _check(name: str, value: object, least: float = _LEAST) -> None:
    # No infinity is between the two, nor is what is not a number.
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not least <= value <= _MOST
    ):
        raise ValueError(f"{name} cannot be {value!r}")
