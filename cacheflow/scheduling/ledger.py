"""The books of one request: which cells are ready, begun or free, and sums of what is left.

What is left is kept as sums that change by differences, so that a question costs the same for 1,000
tokens and for 100,000. Knows the cost models' terms but no costs, and decides nothing.

Requests with the same leading tiles share the state of those tiles (their cells are the same KV),
and form a family. One of them, the owner of a tile, has it restored; for the others it is *led*:
it counts in what is left of them, but not in what is left of all requests together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from cacheflow.scheduling.outlook import Work
from cacheflow.scheduling.rows import NO_ROWS, Rows
from cacheflow.scheduling.tiles import TileState, bits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cacheflow.scheduling.frontier import Frontier
    from cacheflow.scheduling.outlook import Outlook
    from cacheflow.scheduling.policies import Policy
    from cacheflow.scheduling.queue import Rank
    from cacheflow.types import Coverage, Load, RequestSpec, TileGrid

__all__ = ["NOTHING", "Ledger"]

_Counted: TypeAlias = tuple[int, dict[str, int], dict[str, int], int, int]
"""What of a tile is in the sums: free cells, loadable by channel and by one alone, shared, and free
cells that compute has to pass."""
NOTHING: Final[_Counted] = (0, {}, {}, 0, 0)
_Marks: TypeAlias = tuple[bool, bool, bool, bool, bool]
"""In which of the bitmaps of tiles a tile is: those below, in their order."""
_UNTOUCHED: Final[_Marks] = (True, True, False, False, True)
"""Of a tile that no channel is known to have."""


class Ledger:
    """State of one request. Every method expects the caller to hold the scheduler's gate.

    With slots, down to :class:`Frontier`: an object with so many attributes has a dictionary of its
    own, in which CPython's inline caches find neither attributes nor methods.
    """

    __slots__ = (
        "_by_layers",
        "_counted",
        "_coverage",
        "_flights",
        "_front",
        "_has_free",
        "_has_wanted",
        "_hides",
        "_holes",
        "_last_load",
        "_led_bytes",
        "_led_free",
        "_left",
        "_loads",
        "_marked",
        "_only",
        "_open",
        "_outlook",
        "_pools",
        "_rows",
        "_rows_due",
        "_running",
        "_shared",
        "_strides",
        "_suffix_work",
        "_whole_tiles",
        "begun",
        "cancelled",
        "compute_turned_away",
        "computing",
        "family",
        "filled",
        "free",
        "free_bytes",
        "heights",
        "held",
        "is_first_to_compute",
        "is_first_to_load",
        "leaves",
        "led",
        "policy",
        "spec",
        "stuck",
        "suffix_low",
        "taken_at",
        "tiles",
        "todo",
        "turned_away",
        "vain_wait",
    )

    def __init__(
        self, spec: RequestSpec, policy: Policy, outlook: Outlook, *, pools: bool = False
    ) -> None:
        self.spec = spec
        self._pools = pools
        self.policy = policy
        self.cancelled = False
        self.held = False
        """Whether it waits to be let in: nothing is done for it until then."""
        self.begun = False
        """Whether optional recompute has started (or was found worth starting)."""
        self._left = False
        """Whether the request no longer counts among all."""
        self.leaves = False
        """Whether compute last left the rest of the prefix to loads."""
        self.vain_wait = 0.0
        """Seconds that compute last let pass before it asked again without a reason to."""
        self.taken_at: Rank = (0, 0.0, 0)
        """Its rank when compute last turned to it."""
        self.computing = False
        """Whether the compute worker is at it."""
        self.is_first_to_compute = self.is_first_to_load = True
        """Whether no request is more urgent: nothing of others is waited for before this one."""
        self.turned_away: set[str] = set()
        """Channels that had nothing to load for it when last asked."""
        self.compute_turned_away = False
        """The same for compute."""
        self.todo = Work()
        """All that nobody has begun: free cells of the prefix, and the suffix."""
        self.free = Work()
        """Free cells of the prefix alone."""
        self.stuck = Work()
        """Those of them that compute has to pass, whatever is loaded."""
        self.free_bytes: dict[str, int] = {}
        """Left to be asked of each channel; cells of several channels count in each."""
        self.led = 0
        """How many leading tiles another request has restored."""
        self.filled = 0
        """How many leading tiles were in the KV cache on arrival."""
        self.family: list[Frontier] = [cast("Frontier", self)]
        """All requests that share the first tile, in the order in which they came; one list."""
        self._led_free = Work()
        self._led_bytes: dict[str, int] = {}
        """What of ``free`` and ``free_bytes`` is in led tiles."""
        self._coverage: dict[str, Coverage] = {}
        self._outlook = outlook
        self._by_layers = policy.by_layers(spec)
        self._rows = Rows(len(spec.tiles), 1) if self._by_layers else NO_ROWS
        """Leading tiles that compute takes row by row."""
        self._rows_due = policy.rows and not spec.fed
        """Whether that is still to be found out, once costs are known."""
        self._whole_tiles = policy.whole_tiles(spec)
        self._hides = policy.overlaps and not spec.fed
        """Whether loads can hide behind the suffix: it may start under the last ones, and is here
        (in a stage of a pipeline, it comes)."""
        self.heights: Sequence[int] | None = None
        """Planned layers of each tile to recompute, if the policy plans."""
        self._strides: dict[str, int] = {}
        self._only: dict[str, int] = {}
        self._shared = 0
        self._loads: dict[str, int] = {}
        """Loads in flight, by channel."""
        self._last_load: dict[str, int] = {}
        """The latest of them."""
        self._flights: dict[int, Load] = {}
        """All of them by id, but those of activations."""
        self._lay_out()

    def _lay_out(self) -> None:
        """Every tile and suffix piece, nothing of them done."""
        spec, work = self.spec, self._outlook.compute.work
        works = [work(tile) for tile in spec.tiles]
        self.tiles = [
            TileState(tile, spec.num_layers, spec.chunk_tokens, each)
            for tile, each in zip(spec.tiles, works, strict=True)
        ]
        self._suffix_work = [work(piece) for piece in spec.suffix]
        self.suffix_low = [0] * len(spec.suffix)
        every = (1 << len(self.tiles)) - 1
        self._has_free = every
        """Tiles with free cells."""
        self._open = every
        """Tiles that are not complete."""
        self._running = 0
        self._has_wanted = 0
        """Tiles that some channel could be asked for."""
        self._holes = every
        """Tiles that compute has to go on with, since something of them cannot be loaded."""
        self._front = [0] * spec.num_layers
        """Per layer: how many leading tiles are ready."""
        self._counted: list[_Counted] = [(spec.num_layers, {}, {}, 0, spec.num_layers)] * len(
            self.tiles
        )
        self._marked: list[_Marks] = [_UNTOUCHED] * len(self.tiles)
        for total in (self.todo, self.free, self.stuck, self._outlook.all_work):
            total.add_each(spec.num_layers, works)
        for work_of_piece in self._suffix_work:
            self._count_suffix(spec.num_layers, work_of_piece)
        self._outlook.requests += 1

    def lengthen(self, total_tokens: int, grid: TileGrid) -> None:
        """The prompt goes on, to ``total_tokens`` in all: what of the suffix nobody has begun is
        laid out anew, together with what came."""
        begun = sum(low > 0 for low in self.suffix_low)
        for work in self._suffix_work[begun:]:
            self._count_suffix(-self.spec.num_layers, work)
        first = self.spec.suffix[begun].start if begun < len(self.suffix_low) else None
        pieces = grid.split(self.spec.total_tokens if first is None else first, total_tokens)
        suffix = (*self.spec.suffix[:begun], *pieces)
        self.spec = replace(self.spec, total_tokens=total_tokens, suffix=suffix)
        added = [self._outlook.compute.work(piece) for piece in pieces]
        self._suffix_work[begun:] = added
        self.suffix_low[begun:] = [0] * len(pieces)
        for work in added:
            self._count_suffix(self.spec.num_layers, work)

    def _count_suffix(self, layers: int, work: tuple[float, float]) -> None:
        """So many layers more of a piece of the suffix are to be done."""
        self._add_work(self.todo, layers, work)
        if not self._left:
            self._outlook.all_suffixes.add(layers, work)

    def _refresh(self, t: int) -> None:
        self.tiles[t].refresh()
        self._recount_all(t)

    def _recount_all(self, t: int) -> None:
        """:meth:`_recount` by all who have the tile."""
        state = self.tiles[t]
        if len(self.family) == 1:
            self._recount(t)
            return
        for member in self.family:
            if t < len(member.tiles) and member.tiles[t] is state:
                member._recount(t)

    def _recount(self, t: int) -> None:
        """Bring the sums up to date with what the tile says now."""
        state = self.tiles[t]
        free = state.free
        stuck = (free & ((1 << state.must) - 1)).bit_count() if state.must else 0
        self._count(t, (free.bit_count(), state.counts, state.only, state.shared, stuck))
        marks = (
            state.free > 0,
            not state.complete,
            state.running,
            state.union > 0,
            state.must > state.low,
        )
        if marks != self._marked[t]:
            self._marked[t] = marks
            self._mark(1 << t, *marks)

    def _mark(
        self, bit: int, free: bool, open_: bool, running: bool, wanted: bool, hole: bool
    ) -> None:
        self._has_free = self._has_free | bit if free else self._has_free & ~bit
        self._open = self._open | bit if open_ else self._open & ~bit
        self._running = self._running | bit if running else self._running & ~bit
        self._has_wanted = self._has_wanted | bit if wanted else self._has_wanted & ~bit
        self._holes = self._holes | bit if hole else self._holes & ~bit

    def _count(self, t: int, now: _Counted) -> None:
        """Put ``now`` in place of what the sums hold of the tile."""
        free, counts, only, shared, stuck = self._counted[t]
        led, work = t < self.led, self.tiles[t].work
        if now[0] != free:
            self._add_work(self.todo, now[0] - free, work, led=led)
            self.free.add(now[0] - free, work)
            if led:
                self._led_free.add(now[0] - free, work)
        if now[1] != counts or now[2] != only:
            for channel, stride in self._strides.items():
                self._add_bytes(
                    channel, (now[1].get(channel, 0) - counts.get(channel, 0)) * stride, led=led
                )
                alone = now[2].get(channel, 0) - only.get(channel, 0)
                self._only[channel] += alone * stride
        if now[4] != stuck:
            self.stuck.add(now[4] - stuck, work)
        self._shared += now[3] - shared
        self._counted[t] = now

    def _add_work(
        self, total: Work, count: int, work: tuple[float, float], *, led: bool = False
    ) -> None:
        total.add(count, work)
        if led:
            return
        if not self._left:
            self._outlook.all_work.add(count, work)
        for channel in self.turned_away:
            self._outlook.work_ahead[channel].add(count, work)

    def _add_bytes(self, channel: str, nbytes: int, *, led: bool) -> None:
        self.free_bytes[channel] += nbytes
        if led:
            self._led_bytes[channel] += nbytes
            return
        if not self._left:
            self._outlook.all_bytes[channel] += nbytes
        if self.compute_turned_away:
            self._outlook.bytes_ahead[channel] += nbytes

    def own_bytes(self, channel: str) -> int:
        """Left to be asked of ``channel`` for tiles that are not led."""
        return self.free_bytes[channel] - self._led_bytes[channel]

    def turn_compute_away(self, away: bool) -> None:
        """Compute found nothing to do here for now, so others are computed while this one loads."""
        if away != self.compute_turned_away:
            self.compute_turned_away = away
            for channel in self.free_bytes:
                nbytes = self.own_bytes(channel)
                self._outlook.bytes_ahead[channel] += nbytes if away else -nbytes

    def turn_away(self, channel: str, away: bool) -> None:
        """``channel`` found nothing to load here for now: this one is computed first."""
        if away != (channel in self.turned_away):
            (self.turned_away.add if away else self.turned_away.discard)(channel)
            ahead = self._outlook.work_ahead[channel]
            ahead.add_all(self.todo, 1 if away else -1)
            ahead.add_all(self._led_free, -1 if away else 1)

    def leave(self) -> None:
        """The request is over: nothing of it counts any more. Idempotent."""
        if self._left:
            return
        self._left = True
        outlook = self._outlook
        outlook.requests -= 1
        outlook.all_work.add_all(self.todo, -1)
        outlook.all_work.add_all(self._led_free, 1)
        for i, work in enumerate(self._suffix_work):
            outlook.all_suffixes.add(self.suffix_low[i] - self.spec.num_layers, work)
        for channel in self.free_bytes:
            outlook.all_bytes[channel] -= self.own_bytes(channel)

    def extend(self, coverage: Coverage) -> None:
        """A channel answered: it has these layers of these chunks."""
        channel = coverage.channel
        self._outlook.channel(channel)
        if channel not in self._strides:
            self.free_bytes[channel] = self._only[channel] = self._loads[channel] = 0
            self._led_bytes[channel] = 0
            for t in range(self.led):  # Counted without this channel so far.
                self._count(t, NOTHING)
        self._strides[channel] = coverage.stride
        self._coverage[channel] = coverage
        for t in range(self.led):
            self._recount(t)
        for t in range(self.led, len(self.tiles)):
            self.tiles[t].extend(channel, coverage.layers)
            self._refresh(t)

    def drop_channel(self, channel: str) -> None:
        """Stop counting on a channel: it is late or broken."""
        if (known := self._coverage.get(channel)) is not None:
            self._coverage[channel] = replace(known, layers=())
        for t in range(self.led, len(self.tiles)):
            self.tiles[t].forget(channel)
            self._refresh(t)

    @property
    def channels(self) -> Sequence[str]:
        """Channels that have answered."""
        return tuple(self._strides)

    @property
    def restored(self) -> bool:
        """Every cell of the prefix is ready, none merely enqueued on the compute stream."""
        return not (self._open or self._running)

    @property
    def finished(self) -> bool:
        """Prefix restored and suffix computed."""
        last = self.spec.num_layers
        return self.restored and all(low == last for low in self.suffix_low)

    @property
    def position(self) -> int:
        """First token of the lowest tile that is not complete."""
        first = (self._open & -self._open).bit_length() - 1
        return self.tiles[first].tile.start if first >= 0 else self.spec.prefix_tokens

    @property
    def complete_tokens(self) -> int:
        """First token of the lowest tile that is not complete, or is being worked on."""
        unfinished = self._open | self._running
        first = (unfinished & -unfinished).bit_length() - 1
        return self.tiles[first].tile.start if first >= 0 else self.spec.prefix_tokens

    @property
    def last_free(self) -> int:
        """First token of the highest tile with free cells (0 without one)."""
        return self.tiles[self._has_free.bit_length() - 1].tile.start if self._has_free else 0

    def _free_tiles(self) -> Iterator[int]:
        tiles = self._has_free
        while tiles:
            yield (tiles & -tiles).bit_length() - 1
            tiles &= tiles - 1

    def _advance_front(self, layer: int) -> int:
        front, tiles = self._front[layer], self.tiles
        while front < len(tiles) and tiles[front].ready >> layer & 1:
            front += 1
        self._front[layer] = front
        return front

    def start(self, load: Load) -> None:
        """The load's cells are claimed from now on."""
        self._loads[load.channel] += 1
        self._last_load[load.channel] = load.id
        self._flights[load.id] = load
        self.tiles[load.tile].claim(load)
        self._refresh(load.tile)

    def commit(self, load: Load) -> int:
        """Layers (bitmap) of a verified load that may be published; compute took the others."""
        state = self.tiles[load.tile]
        layers = 0 if self.cancelled else bits(load.layers) & ~state.ready
        state.commit(load, layers)
        return layers

    def landed(self, load: Load, layers: int) -> None:
        """Published."""
        self._loads[load.channel] -= 1
        self._flights.pop(load.id, None)
        self.tiles[load.tile].landed(load, layers)
        self._refresh(load.tile)

    def lost(self, load: Load, chunks: Sequence[int]) -> None:
        """Not delivered: other sources or recompute take over."""
        self._loads[load.channel] -= 1
        self._forget(load, chunks)
        self._flights.pop(load.id, None)
        self.tiles[load.tile].lost(load, chunks)
        self._refresh(load.tile)

    def _forget(self, load: Load, chunks: Sequence[int]) -> None:
        """What failed is not stored for this request any more, whoever restores the tile next."""
        known, mask = self._coverage[load.channel], ~bits(load.layers)
        layers = list(known.layers)
        for chunk in chunks:
            if chunk < len(layers):
                layers[chunk] &= mask
        self._coverage[load.channel] = replace(known, layers=tuple(layers))
