"""What the demo found, as records, as a table and as JSON. Measures nothing itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from cacheflow.costs import fluid_seconds
from cacheflow.errors import ConfigError
from cacheflow.types import LayersComputed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from cacheflow.types import Event, Tile

__all__ = [
    "ADAPTIVE",
    "Link",
    "Row",
    "cell_seconds",
    "drift",
    "fluid",
    "parse_links",
    "results_table",
]

ADAPTIVE: Final = "adaptive"
_WAYS: Final = {"recompute": "recompute", "load": "load", ADAPTIVE: "CacheFlow"}
_RAW: Final = "raw"
_TIE: Final = 0.03
"""Within this of the better single way counts as a tie."""


@dataclass(frozen=True, slots=True)
class Link:
    """A channel to the store. ``ratio``: recompute time to load time; None is the disk itself."""

    name: str
    ratio: float | None

    def bandwidth(self, nbytes: int, recompute_seconds: float) -> float | None:
        """Bytes a second at which loading ``nbytes`` takes ``recompute_seconds / ratio``."""
        return None if self.ratio is None else nbytes * self.ratio / recompute_seconds


@dataclass(frozen=True, slots=True)
class Row:
    """One way over one link. Times in seconds; ``speedup`` and ``efficiency`` of CacheFlow only."""

    link: str
    bandwidth: float | None
    way: str
    ttft: float
    restored: float
    """Until the last cell of the prefix was ready."""
    recomputed_share: float
    failed_loads: int
    tokens_identical: bool
    """The greedy tokens are those of the run that never forgot."""
    exact_cells: int
    """(chunk, layer) cells equal, byte for byte, to that run's or to the cold recompute's."""
    cells: int
    canonical_identical: bool
    """No byte of a chunk that was computed on grid tiles differs from the run that never forgot."""
    speedup: float | None = None
    """TTFT of the better single way / this TTFT."""
    efficiency: float | None = None
    """Fluid bound / measured, of the restore."""
    drift: float | None = None
    """Seconds of the cells it recomputed / what recompute alone took for them: about 1, unless the
    machine's speed changed between the two."""

    @property
    def sound(self) -> bool:
        """Whether everything that is promised about the values holds."""
        return self.tokens_identical and self.canonical_identical

    def as_json(self) -> dict[str, Any]:
        """All fields, by name."""
        return asdict(self)


def parse_links(text: str) -> tuple[Link, ...]:
    """``"raw,3:1"``: the disk, and a link over which loading is three times faster than compute.

    Raises:
        ConfigError: an entry is neither ``raw`` nor two positive numbers.
    """
    links: dict[str, Link] = {}
    for name in (part.strip() for part in text.split(",") if part.strip()):
        links[name] = Link(name, None if name == _RAW else _ratio(name))
    if not links:
        raise ConfigError("--links names no link: give for instance raw,3:1,1:1,1:3")
    return tuple(links.values())


def _ratio(name: str) -> float:
    compute, colon, load = name.partition(":")
    try:
        ratio = float(compute) / float(load) if colon else 0.0
    except (ValueError, ZeroDivisionError):
        ratio = 0.0
    if not 0 < ratio < float("inf"):
        raise ConfigError(
            f"--links: {name!r} is not compute:I/O as two positive numbers (1:3, 1:1) nor 'raw'"
        )
    return ratio


def cell_seconds(events: Iterable[Event]) -> dict[tuple[int, int], float]:
    """Seconds of every ``(tile, layer)`` that compute pushed through in these events."""
    cells: dict[tuple[int, int], float] = {}
    for event in events:
        if isinstance(event, LayersComputed) and not event.is_suffix:
            ends = pairwise((*event.starts, event.stop))
            for layer, (start, stop) in zip(event.layers, ends, strict=True):
                cells[event.tile, layer] = stop - start
    return cells


def drift(
    alone: Mapping[tuple[int, int], float], again: Mapping[tuple[int, int], float]
) -> float | None:
    """What the cells computed ``again`` took, over what they took ``alone``; None without any."""
    both = alone.keys() & again.keys()
    return sum(again[cell] for cell in both) / sum(alone[cell] for cell in both) if both else None


def fluid(
    recompute: Mapping[tuple[int, int], float], load: float, tiles: Sequence[Tile], layers: int
) -> float:
    """The bound: cells take what recompute alone took, loads their share of load alone."""
    order = [(tile, layer) for tile in tiles for layer in range(layers)]
    tokens = sum(tile.width for tile in tiles)
    compute = [recompute[tile.index, layer] for tile, layer in order]
    return fluid_seconds(compute, [load * tile.width / tokens / layers for tile, _ in order])


def results_table(rows: Sequence[Row], title: str) -> Table:
    """A block a link, the ways below each other; fits 80 columns."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0)
    table.add_column("compute\n:I/O", min_width=9)
    table.add_column("way", min_width=9)
    heads = ("TTFT", "recomp.\n/ loaded", "speed-up", "fluid /\nmeasured", "tokens\nidentical")
    for name in (*heads, "KV cells\nexact"):
        table.add_column(name, justify="right")
    for index, row in enumerate(rows):
        first = index == 0 or rows[index - 1].link != row.link
        last = index + 1 == len(rows) or rows[index + 1].link != row.link
        second = index > 0 and not first and (index < 2 or rows[index - 2].link != row.link)
        table.add_row(_place(row, first, second), *_cells(row), end_section=last)
    return table


def _place(row: Row, first: bool, second: bool) -> str:
    """The link's name beside its first way, its speed beside the second."""
    if first:
        return row.link
    return f"{row.bandwidth / 1e6:.1f} MB/s" if second and row.bandwidth is not None else ""


def _cells(row: Row) -> tuple[str, ...]:
    failed = f" [red]{row.failed_loads} failed[/]" if row.failed_loads else ""
    exact = f"{row.exact_cells}/{row.cells}"
    return (
        f"[bold]{_WAYS[row.way]}[/]" if row.way == ADAPTIVE else _WAYS[row.way],
        f"{row.ttft:.2f} s",
        f"{row.recomputed_share:.0%} / {1 - row.recomputed_share:.0%}{failed}",
        _verdict(row.speedup),
        "" if row.efficiency is None else f"{row.efficiency:.2f}",
        "[green]yes[/]" if row.tokens_identical else "[red]NO[/]",
        exact if row.canonical_identical else f"[red]{exact}[/]",
    )


def _verdict(speedup: float | None) -> str:
    """Over the better single way: wins, ties and losses alike."""
    if speedup is None:
        return ""
    if speedup < 1 - _TIE:
        return f"[red]{speedup:.2f}x lost[/]"
    if speedup <= 1 + _TIE:
        return f"{speedup:.2f}x tie"
    return f"[green]{speedup:.2f}x[/]"
