"""A static page of all panels with what a Prometheus server says now: no Grafana needed.

    python dashboards/source/preview.py http://127.0.0.1:9090 preview.html [SECONDS]

Shows titles, descriptions, queries and the last half hour (or SECONDS) as small charts. It is not
Grafana: it says whether the queries give what the panels promise.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.parse
import urllib.request
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from queries import Query, queries

_SECONDS = 1800
_STEPS = 60
_COLOURS = ("#3274d9", "#e0752d", "#56a64b", "#a352cc", "#e02f44", "#8a8a8a")
_STYLE = """
body{font:14px system-ui;margin:2em auto;max-width:1100px;color:#222}
section{display:grid;grid-template-columns:1fr 1fr;gap:1em}
article{border:1px solid #ddd;border-radius:6px;padding:.8em}
h3{margin:0 0 .3em}p{margin:.2em 0;color:#555}code{font-size:11px;word-break:break-all}
.none{color:#a00}svg{width:100%;height:90px;background:#fafafa}li{font-size:12px}
"""


def fetch(server: str, expr: str, seconds: int) -> list[dict[str, Any]]:
    """The series of ``expr`` over the last ``seconds``.

    Raises:
        urllib.error.HTTPError: Prometheus does not take the query.
    """
    now = time.time()
    asked = {"query": expr, "start": now - seconds, "end": now, "step": seconds / _STEPS}
    url = f"{server}/api/v1/query_range?{urllib.parse.urlencode(asked)}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def page(server: str, folder: Path, seconds: int = _SECONDS) -> str:
    """The whole page as HTML, with the last ``seconds``."""
    parts = [f"<!doctype html><meta charset=utf-8><title>CacheFlow</title><style>{_STYLE}</style>"]
    for board, of_board in groupby(queries(folder), key=lambda query: query.board):
        parts.append(f"<h2>{escape(board)}</h2><section>")
        for _, of_panel in groupby(of_board, key=lambda query: query.panel):
            parts.append(_panel(server, list(of_panel), seconds))
        parts.append("</section>")
    return "\n".join(parts)


def _panel(server: str, of_panel: list[Query], seconds: int) -> str:
    first = of_panel[0]
    lines: list[tuple[str, list[tuple[float, float]]]] = []
    for query in of_panel:
        for series in fetch(server, query.expr, seconds):
            values = [(at, float(value)) for at, value in series["values"]]
            lines.append((_legend(query.legend, series["metric"]), values))
    codes = "".join(f"<p><code>{escape(query.expr)}</code></p>" for query in of_panel)
    return (
        f'<article data-series="{len(lines)}"><h3>{escape(first.panel)}</h3>'
        f"<p>{escape(first.text)}</p>{_chart(lines)}<ul>{_values(lines, first.unit)}</ul>"
        f"{codes}</article>"
    )


def _legend(legend: str, labels: dict[str, str]) -> str:
    for name, value in labels.items():
        legend = legend.replace(f"{{{{{name}}}}}", value)
    return legend


def _values(lines: list[tuple[str, list[tuple[float, float]]]], unit: str) -> str:
    if not lines:
        return '<li class="none">no data</li>'
    return "".join(
        f"<li>{escape(f'{name}: ' if name else '')}{values[-1][1]:.4g} {escape(unit)}</li>"
        for name, values in lines
    )


def _chart(lines: list[tuple[str, list[tuple[float, float]]]]) -> str:
    points = [point for _, values in lines for point in values if point[1] == point[1]]  # no NaN
    if not points:
        return "<svg viewBox='0 0 100 30'></svg>"
    start, stop = min(at for at, _ in points), max(at for at, _ in points)
    top = max(value for _, value in points) or 1.0
    drawn = []
    for number, (_, values) in enumerate(lines):
        path = " ".join(
            f"{100 * (at - start) / (stop - start or 1):.1f},{29 - 28 * value / top:.1f}"
            for at, value in values
            if value == value
        )
        colour = _COLOURS[number % len(_COLOURS)]
        drawn.append(f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='.5'/>")
    return f"<svg viewBox='0 0 100 30' preserveAspectRatio='none'>{''.join(drawn)}</svg>"


if __name__ == "__main__":
    shown = int(sys.argv[3]) if len(sys.argv) > 3 else _SECONDS
    made = page(sys.argv[1], Path(__file__).parent.parent / "grafana", shown)
    Path(sys.argv[2]).write_text(made, encoding="utf-8")
