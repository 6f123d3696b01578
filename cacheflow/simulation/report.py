"""One HTML file with everything of a simulation: figures, plots, no scripts, nothing from outside.

Draws what it is given. Knows no schedulers.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any, Final

from cacheflow.simulation.svg import COLOURS, Plot

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping, Sequence

    from cacheflow.simulation.maps import Point
    from cacheflow.simulation.records import Record, Work
    from cacheflow.simulation.results import Summary
    from cacheflow.simulation.scenario import Run

__all__ = ["busy_shares", "render_report"]

_BINS: Final = 120
_POINTS: Final = 400
_OURS: Final = "adaptive"
_TIE: Final = 1.01
_SOURCES: Final = {"recompute": "#d1662c", "suffix": "#8a5bb0"}
_LOADS: Final = ("#2f6fb5", "#3f9a4d", "#6b6b6b")
_STYLE: Final = """
body{font:15px/1.5 system-ui,sans-serif;max-width:820px;margin:2em auto;padding:0 1em;color:#222;
background:#fff}h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}svg{max-width:100%;height:auto}
svg text{font:11px system-ui,sans-serif;fill:#444}svg .cell{fill:#fff;font-weight:600}
svg .grid{stroke:#ddd;stroke-width:1}table{border-collapse:collapse}td,th{padding:.25em .7em;
text-align:right;border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}
.key span{display:inline-block;width:.9em;height:.9em;margin:0 .35em 0 1em;vertical-align:-.1em}
p.note{color:#666;font-size:.9em}
"""


def render_report(
    title: str,
    settings: Mapping[str, Any],
    runs: Sequence[Run],
    batch: Run | None,
    points: Sequence[Point],
) -> str:
    """The whole page.

    ``runs``: one a policy, recorded; ``batch``: a small run with its timeline; ``points``: the map
    of single requests. Parts without data are left out.
    """
    parts = [f"<h1>{escape(title)}</h1>", _settings(settings), _table(runs)]
    parts += _section("Time to first token", _cdf(runs), _key([run.policy for run in runs]))
    for run in runs:
        parts += _section(f"Busy over time: {run.policy}", *_busy(run))
    if batch is not None and batch.nodes[0].timeline:
        parts += _section(f"Both pointers: {batch.policy}, all there at 0", *_pointers(batch))
    if points:
        parts += _section("Where each policy wins", *_map(points))
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n"
        "</body></html>\n"
    )


def _section(heading: str, *parts: str) -> list[str]:
    return [f"<h2>{escape(heading)}</h2>", *parts]


def _settings(settings: Mapping[str, Any]) -> str:
    rows = (f"<b>{escape(name)}</b> {escape(str(value))}" for name, value in settings.items())
    return f"<p>{' &middot; '.join(rows)}</p>"


def _key(names: Sequence[str], colours: Sequence[str] = COLOURS) -> str:
    items = (
        f'<span style="background:{colours[i % len(colours)]}"></span>{escape(name)}'
        for i, name in enumerate(names)
    )
    return f'<p class="key">{"".join(items)}</p>'


def _table(runs: Sequence[Run]) -> str:
    names = list(runs[0].summary.utilisation) if runs else []
    heads = ["policy", "mean s", "P50", "P90", "P99", *(f"{name} used" for name in names)]
    heads += ["fluid / taken", "recomputed"]
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    rows = "".join(f"<tr>{_row(run.summary, names)}</tr>" for run in runs)
    note = (
        "Times to first token. Used: useful busy time / time in which a prefix waited to be "
        "restored. Fluid / taken: lower bound of the nodes' busy periods / their length."
    )
    return f'<table><tr>{head}</tr>{rows}</table><p class="note">{note}</p>'


def _row(summary: Summary, names: Sequence[str]) -> str:
    ttft = summary.ttft
    cells = [summary.policy, *(f"{v:.3f}" for v in (ttft.mean, ttft.p50, ttft.p90, ttft.p99))]
    cells += [f"{summary.utilisation[name]:.0%}" for name in names]
    restored = sum(summary.sources.values())
    share = summary.sources.get("recompute", 0.0) / restored if restored else 0.0
    cells += [f"{summary.efficiency:.3f}", f"{share:.0%}"]
    return "".join(f"<td>{escape(cell)}</td>" for cell in cells)


def _cdf(runs: Sequence[Run]) -> str:
    times = [sorted(record.ttft for record in run.records) for run in runs]
    low = max(min((each[0] for each in times if each), default=0.01), 1e-4)
    high = max((each[-1] for each in times if each), default=1.0)
    plot = Plot((low, max(high, low * 1.1)), (0.0, 1.0), "seconds (log)", "requests", log_x=True)
    plot.axes(y_ticks=[(share / 4, f"{share * 25} %") for share in range(5)])
    for i, ordered in enumerate(times):
        step = max(1, len(ordered) // _POINTS)
        kept = [*range(0, len(ordered), step), len(ordered) - 1] if ordered else []
        points = [(ordered[k], (k + 1) / len(ordered)) for k in kept]
        if points:
            plot.line([(points[0][0], 0.0), *points], COLOURS[i % len(COLOURS)])
    return plot.render()


def busy_shares(intervals: Sequence[array[float]], span: float, bins: int = _BINS) -> list[float]:
    """Mean share of ``bins`` equal parts of ``[0, span)`` that the resources were busy.

    ``intervals[r]`` holds ``start, stop, start, stop, ...`` of resource ``r``.
    """
    width = span / bins if span else 1.0
    sums = [0.0] * bins
    for each in intervals:
        for k in range(0, len(each), 2):
            start, stop = each[k], min(each[k + 1], span)
            while start < stop:
                bin_ = min(int(start / width), bins - 1)
                edge = stop if bin_ == bins - 1 else min(stop, max((bin_ + 1) * width, start))
                sums[bin_] += edge - start
                if edge <= start:
                    break  # rounding: nothing measurable is left
                start = edge
    return [total / width / max(1, len(intervals)) for total in sums]


def _busy(run: Run) -> tuple[str, str]:
    span = max((record.first_token for record in run.records), default=1.0)
    plot = Plot((0.0, span), (0.0, 1.0), "seconds", "busy", height=200)
    plot.axes(y_ticks=[(0.0, "0 %"), (0.5, "50 %"), (1.0, "100 %")])
    names = ["compute", *run.nodes[0].links]
    for i, name in enumerate(names):
        usages = [node.compute if not i else node.links[name] for node in run.nodes]
        shares = busy_shares([usage.intervals for usage in usages], span)
        points = [((k + 0.5) * span / len(shares), share) for k, share in enumerate(shares)]
        plot.line(points, COLOURS[i % len(COLOURS)])
    return plot.render(), _key(names)


def _pointers(run: Run) -> tuple[str, str]:
    """Time to the right, tokens upward, each request in a band of its own; inside a tile the
    height is the share of its layers."""
    works = run.nodes[0].timeline or []
    records = {record.request_id: record for record in run.records}
    bases, top = _bands(records)
    span = max(record.first_token for record in run.records)
    blocks = max(work.last_layer for work in works)
    plot = Plot((0.0, span), (0.0, top), "seconds", "tokens", height=120 + 90 * len(bases))
    ticks = [(base, name) for name, base in bases.items()]
    plot.axes(y_ticks=ticks)
    channels = sorted({work.source for work in works} - set(_SOURCES))
    colours = {**_SOURCES, **dict(zip(channels, _LOADS, strict=False))}
    for work in works:
        _bar(plot, work, bases[work.request_id], blocks, colours)
    names = [name for name in colours if any(work.source == name for work in works)]
    return plot.render(), _key(names, [colours[name] for name in names])


def _bands(records: Mapping[str, Record]) -> tuple[dict[str, float], float]:
    bases, top = {}, 0.0
    for name, record in records.items():
        bases[name] = top
        top += (record.prefix_tokens + record.suffix_tokens) * 1.08
    return bases, top


def _bar(plot: Plot, work: Work, base: float, blocks: int, colours: Mapping[str, str]) -> None:
    width = work.tile_stop - work.tile_start
    low = base + work.tile_start + width * work.first_layer / blocks
    high = base + work.tile_start + width * work.last_layer / blocks
    title = (
        f"{work.request_id}: {work.source}, tokens {work.tile_start}-{work.tile_stop}, blocks "
        f"{work.first_layer}-{work.last_layer}, {work.start:.4f}-{work.stop:.4f} s"
    )
    plot.box((work.start, work.stop), (low, high), colours.get(work.source, "#999"), title)


def _map(points: Sequence[Point]) -> tuple[str, ...]:
    ratios = sorted({point.ratio for point in points})
    lengths = sorted({point.tokens for point in points})
    names = list(points[0].ttft)
    size = (0.0, float(len(ratios))), (0.0, float(len(lengths)))
    plot = Plot(*size, "compute:I/O", "prefix tokens", height=80 + 34 * len(lengths))
    plot.titles()
    for point in points:
        x, y = ratios.index(point.ratio), lengths.index(point.tokens)
        colour = COLOURS[names.index(point.winner) % len(COLOURS)]
        times = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in point.ttft.items())
        plot.box((x + 0.02, x + 0.98), (y + 0.03, y + 0.97), colour, times)
        plot.label(x + 0.5, y + 0.5, _says(point), css="cell")
    for y, tokens in enumerate(lengths):
        plot.label(-0.35, y + 0.5, f"{tokens // 1024}k")
    for x, ratio in enumerate(ratios):
        plot.label(x + 0.5, -0.35, _ratio(ratio))
    note = (
        "One request on an idle GPU; colour: the fastest policy. Number: time of the better of "
        f"recompute and load / time of {_OURS}; = where they are within 1 %."
    )
    return plot.render(), _key(names), f'<p class="note">{note}</p>'


def _says(point: Point) -> str:
    gain = point.gain(_OURS, ("recompute", "load"))
    if gain is None:
        return ""
    return "=" if 1 / _TIE <= gain <= _TIE else f"{gain:.2f}"


def _ratio(ratio: float) -> str:
    return f"{ratio:g}:1" if ratio >= 1 else f"1:{1 / ratio:g}"
