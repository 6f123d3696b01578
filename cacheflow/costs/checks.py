"""Predictions held against outcomes: collected where things are learned, told a request at a time.

Decides nothing and predicts nothing.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Final

from cacheflow.types import CostChecked, RestoreEnded

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from cacheflow.costs.channel import ChannelModel
    from cacheflow.costs.compute import ComputeModel
    from cacheflow.types import Event, Observer

__all__ = ["CostChecks", "Ratios"]

_KEPT: Final = 256


class Ratios(deque[float]):
    """Outcome over prediction, the latest few hundred. One thread adds, another may take."""

    def __init__(self) -> None:
        super().__init__(maxlen=_KEPT)

    def take(self) -> list[float]:
        """All of them, and forget them; what is added meanwhile is in this or in the next."""
        taken = []
        while self:
            taken.append(self.popleft())
        return taken


class CostChecks:
    """An observer that passes everything on, and after each restore how good the predictions were.

    At most one :class:`~cacheflow.types.CostChecked` a request for layers, and one for the loads of
    each channel. Requests that run at the same time share the outcomes: they go to the first that
    ends. ``channel`` gives the model of a channel by name.
    """

    def __init__(
        self,
        observer: Observer,
        compute: ComputeModel,
        channels: Collection[str],
        channel: Callable[[str], ChannelModel],
    ) -> None:
        self._observer = observer
        self._compute = compute
        self._channels = tuple(channels)
        self._channel = channel

    def __call__(self, event: Event) -> None:
        self._observer(event)
        if isinstance(event, RestoreEnded):
            self._tell(event, "layer", "", self._compute.take_checks())
            for name in self._channels:
                self._tell(event, "load", name, self._channel(name).take_checks())

    def _tell(self, ended: RestoreEnded, kind: str, channel: str, ratios: list[float]) -> None:
        if ratios:
            checked = CostChecked(
                request_id=ended.request_id,
                kind=kind,
                channel=channel,
                ratio=median(ratios),
                count=len(ratios),
                at=ended.stop,
            )
            self._observer(checked)
