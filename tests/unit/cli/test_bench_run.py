"""What a benchmark run believes of the machine's speed."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cacheflow.cli.bench import points_table
from cacheflow.cli.bench_run import Point, _Alone
from cacheflow.cli.demo_report import parse_links


def test_cells_count_as_what_they_took_at_that_moment() -> None:
    """Between two recomputes by how near each was; both ends included."""
    before = _Alone(10.0, 3.0, 0.2, {(0, 0): 1.0, (0, 1): 2.0})
    after = _Alone(20.0, 6.0, 0.4, {(0, 0): 2.0, (0, 1): 4.0})
    assert before.at(after, 10.0) == (before.cells, 0.2)
    cells, suffix = before.at(after, 15.0)
    assert cells == pytest.approx({(0, 0): 1.5, (0, 1): 3.0})
    assert suffix == pytest.approx(0.3)
    assert before.at(after, 20.0)[0] == after.cells


def measured(drift: list[float]) -> Point:
    [link] = parse_links("1:1")
    fluid, adaptive = [1.0, 1.0, 1.0], [1.0, 0.5, 1.25]
    return Point(512, link, [2.0] * 3, [2.0] * 3, adaptive, fluid, [0.5] * 3, drift)


def test_runs_on_a_machine_that_changed_its_speed_do_not_count() -> None:
    """Efficiency is of the steady runs; of all where none is, and both are told."""
    found = measured([1.05, 1.5, 0.98]).summary()
    assert (found["efficiency"], found["steady"], found["drift"]) == (0.9, 2, 1.5)
    assert (found["efficiency_min"], found["efficiency_max"]) == (0.8, 1.0)
    found = measured([0.7, 1.5, 1.2]).summary()
    assert (found["efficiency"], found["steady"], found["rounds"]) == (1.0, 0, 3)


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    """No figure of the longest prefix over the slowest link is cut."""
    [link] = parse_links("10:1")
    numbers = [59.321], [589.277], [55.234], [52.6], [0.912], [1.24]
    point = Point(7936, link, *numbers, load_is_scaled=True)
    out = io.StringIO()
    Console(file=out, width=80).print(points_table([point]))
    row = next(line for line in out.getvalue().splitlines() if "7936" in line)
    assert row.split() == [
        *("7936", "10:1", "59.3", "589.3*", "55.2", "91%", "0.95", "0.95-0.95", "1.07"),
        *("-4087", "(1780)"),
    ]
    assert "0 of 1 runs were steady" in " ".join(out.getvalue().split())
    assert "changed by 24 % at most" in " ".join(out.getvalue().replace("24%", "24 %").split())
