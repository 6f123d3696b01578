"""The few kinds of panel all dashboards are made of, and the filters their queries share.

A query is PromQL with ``{filters}`` where the dashboard's variables go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as dash
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "INSTANCE",
    "TENANT",
    "TENANTS",
    "TIER",
    "TIERS",
    "board",
    "heat",
    "number",
    "rates",
    "share",
]

INSTANCE: Final = 'instance=~"$instance"'
TIER: Final = 'instance=~"$instance", tier=~"$tier"'
TENANT: Final = 'instance=~"$instance", tenant=~"$tenant"'
TIERS: Final = "cacheflow_lookup_chunks_total"
TENANTS: Final = "cacheflow_tenant_ttft_seconds_count"
"""Series that have every tier, and every tenant with a label."""
_SOURCE: Final = DataSourceRef(type_val="prometheus", uid="$datasource")

_Panel = TypeVar("_Panel", timeseries.Panel, stat.Panel, heatmap.Panel)


def board(
    uid: str,
    title: str,
    text: str,
    *,
    of: str = "cacheflow_info",
    model: str = "model",
    tiers: str = "",
    tenants: str = "",
) -> dash.Dashboard:
    """A dashboard with the variables datasource, model, instance and, if wanted, tier and tenant.

    ``of``, ``tiers``, ``tenants``: series whose labels have the values; ``model``: its label there.
    """
    made = (
        dash.Dashboard(title)
        .uid(uid)
        .description(text)
        .tags(["cacheflow"])
        .refresh("10s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(
            dash.DatasourceVariable("datasource").type("prometheus").label("Data source")
        )
        .with_variable(_variable("model", f"label_values({of}, {model})"))
        .with_variable(_variable("instance", f'label_values({of}{{{model}=~"$model"}}, instance)'))
    )
    for name, series in (("tier", tiers), ("tenant", tenants)):
        if series:
            query = f'label_values({series}{{instance=~"$instance"}}, {name})'
            made = made.with_variable(_variable(name, query))
    return made


def _variable(name: str, query: str) -> dash.QueryVariable:
    return (
        dash.QueryVariable(name)
        .label(name.capitalize())
        .datasource(_SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


def rates(
    title: str,
    text: str,
    queries: Mapping[str, str],
    *,
    unit: str = "short",
    stacked: bool = False,
    limit: float | None = None,
    width: int = 12,
) -> timeseries.Panel:
    """Lines over time, one query a legend; ``limit`` draws a line that should not be crossed."""
    panel = (
        timeseries.Panel()
        .unit(unit)
        .min(0)
        .fill_opacity(25 if stacked else 8)
        .line_width(1)
        .show_points(kinds.VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .display_mode(kinds.LegendDisplayMode.LIST)
            .placement(kinds.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI))
    )
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(kinds.StackingMode.NORMAL))
    if limit is not None:
        panel = panel.thresholds(_thresholds(limit)).thresholds_style(
            common.GraphThresholdsStyleConfig().mode(kinds.GraphTresholdsStyleMode.LINE)
        )
    return _finish(panel, title, text, queries, width, 8)


def share(
    title: str, text: str, queries: Mapping[str, str], *, stacked: bool = False, width: int = 12
) -> timeseries.Panel:
    """A ratio from 0 to 1 over time."""
    return rates(title, text, queries, unit="percentunit", stacked=stacked, width=width).max(1)


def number(
    title: str,
    text: str,
    query: str,
    *,
    unit: str = "short",
    limit: float | None = None,
    width: int = 4,
) -> stat.Panel:
    """One number now; over ``limit`` it turns red."""
    panel = (
        stat.Panel()
        .unit(unit)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .graph_mode(kinds.BigValueGraphMode.AREA)
    )
    if limit is not None:
        panel = panel.thresholds(_thresholds(limit))
    return _finish(panel, title, text, {"": query}, width, 5)


def heat(title: str, text: str, query: str, *, width: int = 12) -> heatmap.Panel:
    """A histogram's buckets over time."""
    panel = heatmap.Panel().calculate(False)
    return _finish(panel, title, text, {"{{le}}": query}, width, 8, PromQueryFormat.HEATMAP)


def _finish(
    panel: _Panel,
    title: str,
    text: str,
    queries: Mapping[str, str],
    width: int,
    height: int,
    form: PromQueryFormat = PromQueryFormat.TIME_SERIES,
) -> _Panel:
    panel = panel.title(title).description(text).datasource(_SOURCE).span(width).height(height)
    for letter, (legend, query) in zip("ABCDEFGH", queries.items(), strict=False):
        target = prometheus.Dataquery().ref_id(letter).expr(query).format(form)
        panel = panel.with_target(target.legend_format(legend))
    return panel


def _thresholds(limit: float) -> dash.ThresholdsConfig:
    return (
        dash.ThresholdsConfig()
        .mode(ThresholdsMode.ABSOLUTE)
        .steps([Threshold(None, "green"), Threshold(limit, "red")])
    )
