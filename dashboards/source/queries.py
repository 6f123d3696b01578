"""The queries inside generated dashboards, with their variables filled in.

For tests and the preview page: Grafana fills them in by itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Query", "queries"]


@dataclass(frozen=True, slots=True)
class Query:
    """One query of one panel."""

    board: str
    panel: str
    text: str
    legend: str
    expr: str
    unit: str


def queries(folder: Path, *, window: str = "1m") -> Iterator[Query]:
    """All queries of the dashboards in ``folder``, for all instances and tiers."""
    for path in sorted(folder.glob("*.json")):
        board = json.loads(path.read_text(encoding="utf-8"))
        for panel in board["panels"]:
            for target in panel["targets"]:
                expr = target["expr"].replace("$__rate_interval", window)
                for name in ("instance", "tier", "tenant", "model"):
                    expr = expr.replace(f"${name}", ".*")
                yield Query(
                    board=board["title"],
                    panel=panel["title"],
                    text=panel["description"],
                    legend=target["legendFormat"],
                    expr=expr,
                    unit=panel["fieldConfig"]["defaults"].get("unit", ""),
                )
