"""A request's events as a Chrome trace (opens in Perfetto) and as a picture of the two pointers.

Lanes: the compute stream, each channel (one more for each load in flight at once), publication.
Keeps every event: for single runs, not for a server's lifetime.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from cacheflow.errors import ConfigError
from cacheflow.types import LayersComputed, LoadEnded, LoadOutcome, LookedUp, Published

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cacheflow.types import Event

__all__ = ["Timeline"]

_MICROSECONDS: Final = 1e6
_COLOURS: Final = {"recompute": "#d9822b", "load": "#2b7bd9", "suffix": "#8a8a8a"}


class Timeline:
    """An observer that remembers. ``origin`` is the time shown as zero (default: first event)."""

    def __init__(self, origin: float | None = None) -> None:
        self.events: list[Event] = []
        self.origin = origin

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def trace(self) -> dict[str, Any]:
        """The Chrome-trace object (JSON Object Format, complete events, microseconds)."""
        lanes, spans, zero = _Lanes(), [], self._zero()
        for lane, name, start, stop, args in sorted(self._spans(), key=lambda span: span[2]):
            spans.append(
                {
                    "name": name,
                    "ph": "X",
                    "pid": 1,
                    "tid": lanes.place(lane, start, stop),
                    "ts": (start - zero) * _MICROSECONDS,
                    "dur": max(stop - start, 0.0) * _MICROSECONDS,
                    "args": args,
                }
            )
        names = [_meta("process_name", 0, "CacheFlow")]
        names += [_meta("thread_name", tid, lane) for lane, tid in lanes.names.items()]
        return {"traceEvents": names + spans, "displayTimeUnit": "ms"}

    def write_trace(self, path: Path) -> None:
        """Write :meth:`trace` as JSON."""
        path.write_text(json.dumps(self.trace()), encoding="utf-8")

    def write_png(self, path: Path, title: str = "") -> None:
        """Draw who made each (token, layer) cell and when: both pointers, meeting.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ConfigError("a PNG needs matplotlib: pip install 'cacheflow-kv[demo]'") from error
        figure = Figure(figsize=(9, 5), layout="constrained")
        axes = figure.add_subplot()
        rows = list(self._rows())
        for start, stop, row, height, source in rows:
            axes.barh(row, stop - start, height, left=start, align="edge", color=_COLOURS[source])
        for source, colour in _COLOURS.items():
            axes.barh(0, 0, color=colour, label=source)
        axes.set_xlabel("seconds since arrival")
        axes.set_ylabel("cells of the prefix: tiles from the front, layers within")
        axes.set_title(title or "recompute from the front, load from the back")
        axes.legend(loc="center right")
        FigureCanvasAgg(figure).print_png(path)

    def _zero(self) -> float:
        if self.origin is not None:
            return self.origin
        starts = [span[2] for span in self._spans()]
        return min(starts, default=0.0)

    def _spans(self) -> Iterator[tuple[str, str, float, float, dict[str, Any]]]:
        for event in self.events:
            match event:
                case LayersComputed():
                    what = "suffix" if event.is_suffix else "tile"
                    for layer, (a, b) in zip(
                        event.layers, pairwise((*event.starts, event.stop)), strict=False
                    ):
                        name = f"{what} {event.tile} layer {layer}"
                        yield "compute", name, a, b, {"request": event.request_id}
                case LoadEnded():
                    name = f"tile {event.tile} layers {event.layers.start}-{event.layers.stop - 1}"
                    args = {"bytes": event.nbytes, "outcome": event.outcome, "why": event.reason}
                    yield f"load {event.channel}", name, event.start, event.stop, args
                case Published():
                    name = f"tile {event.tile}"
                    yield "publish", name, event.start, event.stop, {"bytes": event.nbytes}
                case LookedUp():
                    args = {"asked": event.asked, "found": event.found}
                    yield f"lookup {event.channel}", "lookup", event.start, event.stop, args
                case _:
                    pass

    def _rows(self) -> Iterator[tuple[float, float, float, float, str]]:
        """``(start, stop, row, height, source)``: a row per cell, tile by tile, layer by layer."""
        layers = 1 + max(
            (e.layers.stop - 1 for e in self.events if isinstance(e, LayersComputed | LoadEnded)),
            default=0,
        )
        zero = self._zero()
        for event in self.events:
            if isinstance(event, LayersComputed):
                source = "suffix" if event.is_suffix else "recompute"
                ends = pairwise((*event.starts, event.stop))
                for layer, (a, b) in zip(event.layers, ends, strict=False):
                    yield a - zero, b - zero, event.tile * layers + layer, 1.0, source
            elif isinstance(event, LoadEnded) and event.outcome is LoadOutcome.PUBLISHED:
                row, height = event.tile * layers + event.layers.start, len(event.layers)
                yield event.start - zero, event.stop - zero, row, height, "load"


class _Lanes:
    """Rows of a trace. What overlaps on one of them gets another, as viewers need it: several loads
    of a channel are in flight at once."""

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        """Row by name."""
        self._free_at: dict[str, list[float]] = {}

    def place(self, lane: str, start: float, stop: float) -> int:
        """The row of a span; they come in the order of their starts."""
        rows = self._free_at.setdefault(lane, [])
        number = next((i for i, free in enumerate(rows) if free <= start), len(rows))
        rows[number : number + 1] = [max(start, stop)]
        name = f"{lane} ({number + 1})" if number else lane
        return self.names.setdefault(name, len(self.names) + 1)


def _meta(kind: str, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": 1, "tid": tid, "args": {"name": name}}
