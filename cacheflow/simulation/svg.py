"""Just enough SVG for a report: axes, lines, bars and a grid of cells, as text.

Knows nothing of what is drawn. Colours work on light and dark backgrounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["COLOURS", "Plot", "nice_ticks"]

COLOURS: Final = (
    "#2f6fb5",
    "#d1662c",
    "#3f9a4d",
    "#8a5bb0",
    "#b3423f",
    "#7d6a58",
    "#c264a5",
    "#6b6b6b",
)
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 44


def nice_ticks(low: float, high: float, *, log: bool = False, count: int = 6) -> list[float]:
    """Round numbers between ``low`` and ``high``."""
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        steps = (1, 2, 5) if last - first <= 3 else (1,)
        values = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        return [value for value in values if low <= value <= high * (1 + 1e-9)]
    if high <= low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [
        index * step for index in range(first, first + 3 * count) if index * step <= high + 1e-9
    ]


@dataclass
class Plot:
    """One picture with two axes. Data coordinates in, SVG out; ``log_x``: a logarithmic x axis."""

    x: tuple[float, float]
    y: tuple[float, float]
    x_label: str = ""
    y_label: str = ""
    log_x: bool = False
    width: int = 760
    height: int = 300
    _body: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        low, high = self.x
        self._x0, self._x1 = self._scale(low), self._scale(high)
        if self._x1 <= self._x0:
            self._x1 = self._x0 + 1.0

    def _scale(self, value: float) -> float:
        return math.log10(max(value, 1e-12)) if self.log_x else value

    def px(self, value: float) -> float:
        """Pixels from the left."""
        share = (self._scale(value) - self._x0) / (self._x1 - self._x0)
        return _LEFT + share * (self.width - _LEFT - _RIGHT)

    def py(self, value: float) -> float:
        """Pixels from the top."""
        low, high = self.y
        share = (value - low) / ((high - low) or 1.0)
        return self.height - _BOTTOM - share * (self.height - _TOP - _BOTTOM)

    def axes(
        self,
        *,
        show: Callable[[float], str] = lambda value: f"{value:g}",
        y_ticks: Iterable[tuple[float, str]] | None = None,
    ) -> None:
        """Grid lines, numbers (``show`` writes those of x) and labels."""
        for value in nice_ticks(*self.x, log=self.log_x):
            at = self.px(value)
            self._line(at, _TOP, at, self.height - _BOTTOM, "grid")
            self._text(at, self.height - _BOTTOM + 16, show(value), "middle")
        default = ((value, f"{value:g}") for value in nice_ticks(*self.y))
        for value, name in y_ticks if y_ticks is not None else default:
            at = self.py(value)
            self._line(_LEFT, at, self.width - _RIGHT, at, "grid")
            self._text(_LEFT - 6, at + 4, name, "end")
        self.titles()

    def titles(self) -> None:
        """What the axes show."""
        self._text((_LEFT + self.width - _RIGHT) / 2, self.height - 8, self.x_label, "middle")
        middle = (_TOP + self.height - _BOTTOM) / 2
        self._body.append(
            f'<text x="14" y="{middle:.1f}" text-anchor="middle" '
            f'transform="rotate(-90 14 {middle:.1f})">{escape(self.y_label)}</text>'
        )

    def line(self, points: Sequence[tuple[float, float]], colour: str, *, dash: str = "") -> None:
        """A line through ``points``."""
        path = " ".join(f"{self.px(x):.1f},{self.py(y):.1f}" for x, y in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._body.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>'
        )

    def box(
        self, x: tuple[float, float], y: tuple[float, float], colour: str, title: str = ""
    ) -> None:
        """A filled rectangle; ``title`` shows when pointed at."""
        left, right = self.px(x[0]), self.px(x[1])
        top, bottom = self.py(y[1]), self.py(y[0])
        tip = f"<title>{escape(title)}</title>" if title else ""
        self._body.append(
            f'<rect x="{left:.2f}" y="{top:.2f}" width="{max(right - left, 0.4):.2f}" '
            f'height="{max(bottom - top, 0.4):.2f}" fill="{colour}">{tip}</rect>'
        )

    def label(self, x: float, y: float, text: str, *, css: str = "") -> None:
        """Text centred on a point."""
        self._text(self.px(x), self.py(y) + 4, text, "middle", css)

    def _line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        self._body.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'
        )

    def _text(self, x: float, y: float, text: str, anchor: str, css: str = "") -> None:
        style = f' class="{css}"' if css else ""
        self._body.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'
        )

    def render(self) -> str:
        """The picture as one ``<svg>`` element."""
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img">{"".join(self._body)}</svg>'
        )
