"""A simulated node tells an observer what a restorer would: the same events, in virtual seconds.

So whatever counts or draws real restores does it with simulated ones, and can be checked by them.
Layers are the layer blocks of the cut. A load's times are those of its bytes on the link.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from cacheflow.types import (
    FirstToken,
    LayersComputed,
    LoadEnded,
    LookedUp,
    RestoreEnded,
    Span,
    tell,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cacheflow.scheduling import Policy
    from cacheflow.simulation.records import Record
    from cacheflow.types import (
        Coverage,
        Event,
        Load,
        LoadOutcome,
        Observer,
        RequestSpec,
        TileWork,
    )

__all__ = ["Teller"]


class Teller:
    """Of one node; knows of each unfinished request what its last events have to say."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._open: dict[str, tuple[RequestSpec, str, int, float]] = {}
        """Request, policy, tokens stored anywhere, and seconds it was expected to take."""

    def admitted(
        self,
        spec: RequestSpec,
        policy: Policy,
        coverage: Sequence[Coverage],
        now: float,
        expected: float,
    ) -> None:
        """Its lookups took no time. ``expected``: seconds that it needs by itself."""
        chunks = spec.prefix_tokens // spec.chunk_tokens
        for each in coverage:
            found = sum(1 for mask in each.layers[:chunks] if mask)
            self._tell(LookedUp(spec.id, each.channel, chunks, found, now, now))
        stored = sum(any(each.layers[chunk] for each in coverage) for chunk in range(chunks))
        self._open[spec.id] = (spec, policy.name, stored * spec.chunk_tokens, expected)

    def computed(
        self, work: TileWork, stop_layer: int, seconds: Sequence[float], began: float, now: float
    ) -> None:
        """Layers up to ``stop_layer``, each of which took its entry of ``seconds``."""
        starts = tuple(accumulate(seconds[:-1], initial=began))
        layers = Span(work.first_layer, stop_layer)
        tile = work.tile
        self._tell(
            LayersComputed(
                work.request_id, tile.index, tile.width, work.is_suffix, layers, starts, now
            )
        )

    def loaded(self, load: Load, start: float, stop: float, outcome: LoadOutcome) -> None:
        """A load came to its end."""
        self._tell(
            LoadEnded(
                load.request_id,
                load.channel,
                load.tile,
                load.layers,
                len(load.chunks),
                load.nbytes,
                start,
                stop,
                outcome,
            )
        )

    def answered(self, record: Record) -> None:
        """The request has its first token, which comes with the suffix's last layer."""
        spec, policy, stored, expected = self._open.pop(record.request_id)
        layers, cells = spec.num_layers, dict(record.cells)
        self._tell(
            RestoreEnded(
                request_id=spec.id,
                policy=policy,
                outcome="restored",
                arrival=record.arrival,
                restored=record.restored,
                stop=record.first_token,
                prefix_tokens=spec.prefix_tokens,
                suffix_tokens=record.suffix_tokens,
                num_layers=layers,
                cells=cells,
                stored_tokens=stored,
                expected=expected,
            )
        )
        outcome = "hit" if stored >= spec.prefix_tokens else "partial"
        self._tell(
            FirstToken(
                request_id=spec.id,
                policy=policy,
                outcome=outcome if stored else "miss",
                arrival=record.arrival,
                at=record.first_token,
                prompt_tokens=spec.total_tokens,
                cached_tokens=stored,
                num_layers=layers,
                cells={"suffix": record.suffix_tokens * layers, **cells},
            )
        )

    def _tell(self, event: Event) -> None:
        tell(self._observer, event)
