"""The demo's figures: links, the fluid bound from events, verdicts, what counts as sound."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from cacheflow.cli.demo_report import (
    Link,
    Row,
    cell_seconds,
    drift,
    fluid,
    parse_links,
    results_table,
)
from cacheflow.errors import ConfigError
from cacheflow.types import LayersComputed, Span, Tile

ROW = Row(
    link="1:1",
    bandwidth=10e6,
    way="adaptive",
    ttft=1.0,
    restored=0.9,
    recomputed_share=0.53,
    failed_loads=0,
    tokens_identical=True,
    exact_cells=60,
    cells=60,
    canonical_identical=True,
    speedup=1.9,
    efficiency=0.97,
)


def test_links_are_parsed_in_order_and_once() -> None:
    """`raw` is the disk itself, `3:1` a link three times as fast as compute."""
    links = parse_links(" raw, 3:1,1:2 ,3:1")
    assert links == (Link("raw", None), Link("3:1", 3.0), Link("1:2", 0.5))


@pytest.mark.parametrize("text", ["", ",", "fast", "1:0", "0:1", "1:-2", "3", "nan:1", "1:2:3"])
def test_bad_links_are_named(text: str) -> None:
    """What is not a ratio of two positive numbers is refused with an example of what is."""
    with pytest.raises(ConfigError, match="--links"):
        parse_links(text)


def test_bandwidth_puts_compute_to_io_at_the_ratio() -> None:
    """Over a 1:3 link loading everything takes three times as long as recomputing it."""
    bandwidth = Link("1:3", 1 / 3).bandwidth(300, recompute_seconds=10.0)
    assert bandwidth is not None
    assert 300 / bandwidth == pytest.approx(30.0)
    assert Link("raw", None).bandwidth(300, 10.0) is None


def test_a_machine_that_changed_its_speed_is_noticed() -> None:
    """Only cells that both computed are compared."""
    alone = {(0, 0): 1.0, (0, 1): 1.0, (1, 0): 3.0}
    assert drift(alone, {(0, 0): 1.5, (0, 1): 2.5}) == pytest.approx(2.0)
    assert drift(alone, {(2, 0): 1.5}) is None


def test_fluid_bound_from_layer_times() -> None:
    """Equal ways meet in the middle; suffix layers are not part of the prefix."""
    tiles = (Tile(0, 0, 512), Tile(1, 512, 1024))
    events = [
        LayersComputed("r", 0, 512, False, Span(0, 2), (0.0, 1.0), 2.0),
        LayersComputed("r", 1, 512, False, Span(0, 2), (2.0, 3.0), 4.0),
        LayersComputed("r", 2, 30, True, Span(0, 2), (4.0, 5.0), 6.0),
    ]
    cells = cell_seconds(events)
    assert cells == {(0, 0): 1.0, (0, 1): 1.0, (1, 0): 1.0, (1, 1): 1.0}
    assert fluid(cells, 4.0, tiles, 2) == pytest.approx(2.0)
    assert fluid(cells, 0.0, tiles, 2) == pytest.approx(0.0)


def test_sound_needs_tokens_and_canonical_bytes() -> None:
    """Different tokens or a different byte of a canonical chunk break the promise."""
    assert ROW.sound
    assert not replace(ROW, tokens_identical=False).sound
    assert not replace(ROW, canonical_identical=False).sound


@pytest.mark.parametrize(
    ("speedup", "said"), [(1.9, "1.90x"), (1.01, "1.01x tie"), (0.9, "0.90x lost")]
)
def test_table_says_wins_ties_and_losses(speedup: float, said: str) -> None:
    """A loss is printed as one, in a table of 80 columns."""
    out = StringIO()
    rows = [replace(ROW, way="recompute", speedup=None), replace(ROW, speedup=speedup)]
    Console(file=out, width=80).print(results_table(rows, "title"))
    text = out.getvalue()
    assert said in text
    assert "10.0 MB/s" in text
    assert "60/60" in text
    assert "…" not in text
