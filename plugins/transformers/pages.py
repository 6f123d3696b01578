"""The KV cache: one page per grid tile, ``[layer, K/V, head, token, dim]``.

A page is what is recomputed, loaded, shared and freed together. Because every page starts at a
tile edge, which is a function of position alone, attention over a list of pages does the same
arithmetic however the pages came to be, and forks share whole pages. Knows no requests.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from cacheflow.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from cacheflow.types import KVLayout, Tile, TileGrid

__all__ = ["Page", "PagePool", "Paused"]


@dataclass(frozen=True, slots=True)
class Paused:
    """A tile stopped before ``layer``: ``hidden [1, n, hidden_size]`` is that layer's input."""

    hidden: torch.Tensor
    layer: int


@dataclass(slots=True, eq=False)
class Page:
    """KV of the tokens ``[start, start + width)`` of one or more requests, all layers."""

    start: int
    data: torch.Tensor
    """``[L, 2, Hkv, width, D]`` in the layout's dtype."""
    users: int = 1
    """Requests that hold the page."""
    paused: dict[int, Paused] = field(default_factory=dict)
    """Tiles (pieces of one) stopped half way, by their first token; the compute thread's, one tile
    at a time. Here, not with a request: whoever shares the page can go on with it."""
    shape: tuple[int, ...] = field(init=False)
    strides: tuple[int, ...] = field(init=False)
    offset: int = field(init=False)
    """Of ``data``, in elements: asking torch for them costs as much as making a view."""

    def __post_init__(self) -> None:
        self.shape, self.strides = tuple(self.data.shape), self.data.stride()
        self.offset = int(self.data.storage_offset())

    @property
    def width(self) -> int:
        return self.shape[3]

    @property
    def stop(self) -> int:
        return self.start + self.width

    def keys(self, layer: int, first: int, stop: int) -> torch.Tensor:
        """Keys ``[1, Hkv, n, D]`` of tokens ``[first, stop)`` (absolute positions)."""
        return self.data[layer, 0, None, :, first - self.start : stop - self.start]

    def values(self, layer: int, first: int, stop: int) -> torch.Tensor:
        """Values, as :meth:`keys`."""
        return self.data[layer, 1, None, :, first - self.start : stop - self.start]

    def part(self, layer: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all the page's tokens before ``stop``."""
        return self.keys(layer, self.start, stop), self.values(layer, self.start, stop)


class PagePool:
    """Allocates pages up to a cap and keeps freed ones for reuse: their memory is already mapped.

    Loop-owned.
    """

    def __init__(
        self, layout: KVLayout, grid: TileGrid, capacity: int, device: torch.device
    ) -> None:
        """Raises ConfigError where not even the first page fits ``capacity`` (bytes)."""
        width, each = grid.tile(0).width, layout.token_bytes
        if capacity < width * each:
            raise ConfigError(
                f"kv_bytes {capacity} is less than the shortest prompt takes: give at least "
                f"{width * each}, which is {width} tokens of {each} bytes; prompts that are longer "
                "and requests at once take more"
            )
        self._layout = layout
        self._grid = grid
        self._capacity = capacity
        self._device = device
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._free_bytes = 0
        self.used_bytes = 0

    def take(self, index: int) -> Page:
        """A page for grid tile ``index``; its contents are undefined.

        Raises:
            CapacityError: the cap would be exceeded.
        """
        tile = self._grid.tile(index)
        nbytes = tile.width * self._layout.token_bytes
        if self.used_bytes + nbytes > self._capacity:
            raise CapacityError(
                f"no KV memory for tokens {tile.start} to {tile.stop}: {self.used_bytes} of "
                f"{self._capacity} bytes are used; raise kv_bytes or end other requests"
            )
        self.used_bytes += nbytes
        return Page(tile.start, self._tensor(tile, nbytes))

    def share(self, page: Page) -> Page:
        """One more request holds ``page``."""
        page.users += 1
        return page

    def give(self, page: Page) -> None:
        """One request less holds the page; the last one frees it."""
        page.users -= 1
        if page.users:
            return
        page.paused.clear()
        nbytes = page.width * self._layout.token_bytes
        self.used_bytes -= nbytes
        self._free_bytes += nbytes
        self._free[page.width].append(page.data)

    def _tensor(self, tile: Tile, nbytes: int) -> torch.Tensor:
        if self._free[tile.width]:
            self._free_bytes -= nbytes
            return self._free[tile.width].pop()
        if self.used_bytes + self._free_bytes > self._capacity:
            self._free.clear()
            self._free_bytes = 0
        layout = self._layout
        shape = (layout.num_layers, 2, layout.num_kv_heads, tile.width, layout.head_dim)
        return torch.empty(shape, dtype=self._dtype, device=self._device)
