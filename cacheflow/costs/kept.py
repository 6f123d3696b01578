"""The cost models of one open CacheFlow, and where what they learn is kept.

Takes snapshots where the models live and leaves the file to :class:`CostStore`. Knows no tasks:
whoever owns the event loop decides when, and on which thread, to read and write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cacheflow.costs.channel import ChannelModel
    from cacheflow.costs.compute import ComputeModel
    from cacheflow.costs.profile import ChannelProfile, ComputeProfile
    from cacheflow.costs.store import CostStore

__all__ = ["KeptCosts"]

P_co = TypeVar("P_co", covariant=True)


class KeptCosts:
    """``compute_key`` and ``channels`` (name to key) say under which names costs are kept."""

    def __init__(
        self,
        store: CostStore,
        compute: ComputeModel,
        compute_key: str,
        channels: Mapping[str, str],
        channel: Callable[[str], ChannelModel],
    ) -> None:
        self._store = store
        self._compute = compute
        self._compute_key = compute_key
        self._channels = dict(channels)
        self._channel = channel
        self._saved = self._snapshot()

    def read(self) -> tuple[ComputeProfile | None, dict[str, ChannelProfile]]:
        """What was learned once: from the file, so not on the event loop."""
        found = {name: self._store.channel(key) for name, key in self._channels.items()}
        known = {name: profile for name, profile in found.items() if profile is not None}
        return self._store.compute(self._compute_key), known

    def prime(self, compute: ComputeProfile | None, channels: Mapping[str, ChannelProfile]) -> None:
        """Give the models their head start; those that know something already keep it."""
        if compute is not None and not self._compute.known:
            self._compute.prime(compute)
        for name, profile in channels.items():
            model = self._channel(name)
            if model.bandwidth is None and not model.in_flight:
                model.prime(profile)
        self._saved = self._snapshot()

    def to_save(self) -> Callable[[], bool] | None:
        """The write that is due, to be called off the event loop; None when nothing was learned."""
        now = self._snapshot()
        if now == self._saved:
            return None
        self._saved = now
        compute, channels = now
        return lambda: self._store.save(compute, channels)

    def _snapshot(self) -> tuple[dict[str, ComputeProfile], dict[str, ChannelProfile]]:
        learned = _known(self._compute)
        compute = {} if learned is None else {self._compute_key: learned}
        found = {key: _known(self._channel(name)) for name, key in self._channels.items()}
        return compute, {key: profile for key, profile in found.items() if profile is not None}


class _Model(Protocol[P_co]):
    def profile(self) -> P_co | None: ...


def _known(model: _Model[P_co]) -> P_co | None:
    try:
        return model.profile()
    except ValueError:  # numbers that no machine shows (a clock that jumped): not worth keeping
        return None
